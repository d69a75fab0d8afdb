"""subnet.env, in flannel's format: a node agent describes the node's network.

    HEADCNI_NETWORK=10.244.0.0/16          the cluster's, a comma list
    HEADCNI_SUBNET=10.244.1.1/24           this node's; the host part is flannel's gateway
    HEADCNI_IPV6_NETWORK=fd00:244::/48
    HEADCNI_IPV6_SUBNET=fd00:244:0:1::1/64
    HEADCNI_MTU=1280
    HEADCNI_IPMASQ=true

Values of the netconf override the environment (the same names), which overrides the file. A file
of flanneld, with the prefix FLANNEL_, is read too. In that file, IPMASQ=true means that flanneld
does the masquerading, so we do not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_network

from .model import Network
from .problems import Problem
from .record import dataclass

DEFAULT_FILE = "/run/headcni/subnet.env"
DEFAULT_DATA_DIR = "/var/lib/cni/headcni"

_KEYS = ("NETWORK", "IPV6_NETWORK", "SUBNET", "IPV6_SUBNET", "MTU", "IPMASQ")
_PREFIXES = ("HEADCNI_", "FLANNEL_", "")
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class SubnetEnv:
    """The values of environment and file; None or empty if they have none."""

    networks: tuple[Network, ...] = ()
    subnets: tuple[Network, ...] = ()
    mtu: int | None = None
    ip_masq: bool | None = None

    def over(self, other: SubnetEnv) -> SubnetEnv:
        """These values, and the other's for those that are missing."""
        return SubnetEnv(
            self.networks or other.networks,
            self.subnets or other.subnets,
            other.mtu if self.mtu is None else self.mtu,
            other.ip_masq if self.ip_masq is None else self.ip_masq,
        )


def load(
    env: Mapping[str, str], subnet_file: str, problems: list[Problem], named: bool = False
) -> SubnetEnv:
    """The environment over the file. A missing file is a mistake only if ``named``."""
    return from_env(env, problems).over(from_file(subnet_file, problems, named))


def from_env(env: Mapping[str, str], problems: list[Problem]) -> SubnetEnv:
    given = {key: ("HEADCNI_" + key, env.get("HEADCNI_" + key, "").strip()) for key in _KEYS}
    return _read(given, "", problems)


def from_file(path: str, problems: list[Problem], named: bool = False) -> SubnetEnv:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            text = stream.read(65536)
    except FileNotFoundError:
        if named:
            problems.append(Problem("subnet_file", path, "a file that exists"))
        return SubnetEnv()
    except OSError as wrong:
        problems.append(Problem("subnet_file", path, f"a file that can be read ({wrong.strerror})"))
        return SubnetEnv()
    return parse(text, path, problems)


def parse(text: str, where: str, problems: list[Problem]) -> SubnetEnv:
    """The text of a subnet.env. Mistakes are added to ``problems`` as ``where:KEY``."""
    given: dict[str, str] = {}
    for line in text.splitlines():
        line = line.strip().removeprefix("export ")
        key, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            given[key.strip()] = value.strip().strip("\"'")
    chosen = {}
    for key in _KEYS:
        name = next((p + key for p in _PREFIXES if given.get(p + key)), "HEADCNI_" + key)
        chosen[key] = (name, given.get(name, ""))
    return _read(chosen, f"{where}:", problems)


def _read(given: Mapping[str, tuple[str, str]], where: str, problems: list[Problem]) -> SubnetEnv:
    networks: list[Network] = []
    subnets: list[Network] = []
    for key in ("NETWORK", "IPV6_NETWORK", "SUBNET", "IPV6_SUBNET"):
        name, value = given[key]
        version = 6 if key.startswith("IPV6") else 0
        kept = networks if key.endswith("NETWORK") else subnets
        kept += _cidrs(value, version, where + name, problems)
    if len({subnet.version for subnet in subnets}) < len(subnets):
        shown = ",".join(map(str, subnets))
        problems.append(Problem(where + given["SUBNET"][0], shown, "one subnet of a family"))
        subnets = subnets[:1]
    return SubnetEnv(
        tuple(networks),
        tuple(subnets),
        _mtu(given["MTU"], where, problems),
        _ip_masq(given["IPMASQ"], where, problems),
    )


def _cidrs(value: str, version: int, path: str, problems: list[Problem]) -> list[Network]:
    found: list[Network] = []
    for text in filter(None, (item.strip() for item in value.split(","))):
        try:
            network = ip_network(text, strict=False) if "/" in text else None
        except ValueError:
            network = None
        if network is None or (version and network.version != version):
            kind = f"an IPv{version} CIDR" if version else "a CIDR, or several with commas"
            problems.append(Problem(path, text, kind))
        else:
            found.append(network)
    return found


def _mtu(given: tuple[str, str], where: str, problems: list[Problem]) -> int | None:
    name, value = given
    if not value:
        return None
    if value.isascii() and value.isdigit() and 576 <= int(value) <= 65535:
        return int(value)
    problems.append(Problem(where + name, value, "a number from 576 to 65535"))
    return None


def _ip_masq(given: tuple[str, str], where: str, problems: list[Problem]) -> bool | None:
    name, value = given
    if not value:
        return None
    truth = _TRUTH.get(value.lower())
    if truth is None:
        problems.append(Problem(where + name, value, "true or false"))
        return None
    return not truth if name.startswith("FLANNEL_") else truth


def render(settings: SubnetEnv) -> str:
    """The text of our subnet.env."""
    lines = []
    for key, networks in (("NETWORK", settings.networks), ("SUBNET", settings.subnets)):
        for prefix, version in (("HEADCNI_", 4), ("HEADCNI_IPV6_", 6)):
            family = ",".join(str(n) for n in networks if n.version == version)
            if family:
                lines.append(f"{prefix}{key}={family}")
    if settings.mtu is not None:
        lines.append(f"HEADCNI_MTU={settings.mtu}")
    if settings.ip_masq is not None:
        lines.append(f"HEADCNI_IPMASQ={'true' if settings.ip_masq else 'false'}")
    return "".join(f"{line}\n" for line in lines)


def write(path: str, settings: SubnetEnv) -> bool:
    """Replace the file atomically, so that no ADD reads a part of it; whether it has changed."""
    text = render(settings)
    try:
        with open(path, encoding="utf-8") as stream:
            if stream.read() == text:
                return False
    except (OSError, ValueError):
        pass
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fresh = f"{path}.{os.getpid()}"
    try:
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(handle)
        os.replace(fresh, path)
    except BaseException:
        if os.path.exists(fresh):
            os.unlink(fresh)
        raise
    return True
