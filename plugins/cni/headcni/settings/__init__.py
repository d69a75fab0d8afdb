"""/etc/headcni/config.yaml: what the operator tells the daemon.

Each key is declared once, below, with its default, what may stand there, what it is for, and
whether SIGHUP is enough to change it. Reading, the JSON Schema for editors and the answer to
``changes`` follow from the declaration, so they cannot disagree.

YAML is read by ruamel.yaml: PyYAML has no wheel that is good on every architecture, and a node
need not have either. It costs 22 ms and 4.7 MB at start, in the daemon alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from ipaddress import ip_address, ip_network
from typing import Any, Callable, Dict, List, NamedTuple, Tuple, TypeVar, Union

from .. import port_ranges
from ..call import is_interface_name
from ..config import error, render
from ..errors import IO_FAILURE, CniError
from ..ipam.config import Problem, unknown_keys
from ..ipam.pool import STRATEGIES
from ..model import Network, PortRange
from ..shared import bearer_token
from ..shared.modes import LINKS, MODES, socket_of
from ..shared.podcidr import (
    PodCidrError,
    Resolution,
    parse_cidr,
    parse_pod_cidrs,
    parse_sizes,
    resolve,
)
from ..tailnet_access import ALL as WHOLE_TAILNET
from ..tailnet_access import (
    MOST_ENTRIES,
    MOST_NAMESPACES,
    NAMESPACE,
    RANGES,
    WrongAccess,
    allows,
)
from ..tailnet_access import parse as parse_access

PATH = "/etc/headcni/config.yaml"
LEVELS = ("DEBUG", "INFO", "WARN", "ERROR", "FATAL")

_LARGEST_FILE = 1 << 20
_TAG = r"tag:[A-Za-z][A-Za-z0-9-]{0,62}"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

T = TypeVar("T")


class _Wrong(Exception):
    """What was expected in place of a value, or of items of it: (where in it, value, expected)."""

    def __init__(self, expected: str = "", items: Sequence[Tuple[str, Any, str]] = ()) -> None:
        super().__init__(expected)
        self.items = items


class Kind(NamedTuple):
    """What may stand at a key: how it is read, and how an editor is told of it."""

    read: Callable[[Any], Any]
    schema: Mapping[str, Any]


def _flag() -> Kind:
    def read(value: Any) -> bool:
        if isinstance(value, bool):
            return value
        raise _Wrong("true or false")

    return Kind(read, {"type": "boolean"})


def _number(low: int, high: int) -> Kind:
    def read(value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise _Wrong(f"a number from {low} to {high}")

    return Kind(read, {"type": "integer", "minimum": low, "maximum": high})


def _seconds(low: float, high: float) -> Kind:
    """A number of seconds, or 500ms, 30s, 5m, 1h."""

    def read(value: Any) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            seconds = float(value)
        else:
            match = re.match(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h)\Z", str(value))
            seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
        if low <= seconds <= high:
            return seconds
        raise _Wrong(f"a time such as 30s or 5m, from {_time(low)} to {_time(high)}")

    number = {"type": "number", "minimum": low, "maximum": high}
    text = {"type": "string", "pattern": r"^\d{1,9}(\.\d{1,9})?(ms|s|m|h)$"}
    return Kind(read, {"anyOf": [number, text]})


def _time(seconds: float) -> str:
    for unit in ("h", "m", "s"):
        if seconds >= _UNITS[unit] and seconds % _UNITS[unit] == 0:
            return f"{seconds / _UNITS[unit]:g}{unit}"
    return f"{seconds * 1000:g}ms"


def _choice(*options: str, any_case: bool = False) -> Kind:
    def read(value: Any) -> str:
        for option in options:
            same = isinstance(value, str) and (
                value.upper() == option.upper() if any_case else value == option
            )
            if same:
                return option
        raise _Wrong(" or ".join(options))

    spelled = [*options, *(o.lower() for o in options)] if any_case else options
    return Kind(read, {"enum": list(spelled)})


def _text(valid: Callable[[str], Any], expected: str, pattern: str = "") -> Kind:
    def read(value: Any) -> str:
        if isinstance(value, str) and valid(value):
            return value
        raise _Wrong(expected)

    return Kind(read, {"type": "string", **({"pattern": pattern} if pattern else {})})


def _pattern(pattern: str, expected: str) -> Kind:
    return _text(lambda text: re.match(f"(?:{pattern})\\Z", text), expected, f"^(?:{pattern})?$")


def _path() -> Kind:
    return _pattern(r"/.*", "an absolute path")


def _is_address(text: str) -> bool:
    try:
        return bool(ip_address(text))
    except ValueError:
        return False


def _list(item: Kind, expected: str) -> Kind:
    def read(value: Any) -> Tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Wrong(f"a list, of {expected} each")
        good, bad = [], []
        for at, one in enumerate(value):
            try:
                good.append(item.read(one))
            except _Wrong as wrong:
                bad.append((f"[{at}]", one, str(wrong)))
        if bad:
            raise _Wrong(items=bad)
        return tuple(good)

    return Kind(read, {"type": "array", "items": item.schema})


_CIDR_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 2}]
}


def _cidrs(parse: Callable[[Any], Tuple[Network, ...]]) -> Kind:
    """One CIDR, or one of each family: a string, a comma list or a list."""

    def read(value: Any) -> Tuple[Network, ...]:
        if not isinstance(value, (str, list)) or not all(isinstance(one, str) for one in value):
            raise _Wrong("a CIDR such as 10.244.1.0/24, or one of each family")
        try:
            return parse(value)
        except PodCidrError as problem:
            raise _Wrong(f"a CIDR such as 10.244.1.0/24: {problem}") from None

    return Kind(read, _CIDR_SCHEMA)


def _any_cidrs(value: Any) -> Tuple[Network, ...]:
    texts = value.split(",") if isinstance(value, str) else value
    found = tuple(parse_cidr(text.strip()) for text in texts if text.strip())
    if len({cidr.version for cidr in found}) < len(found):
        raise PodCidrError("two of one family")
    return found


def _sizes() -> Kind:
    """As the resolver reads it: 24, "24" and ["/24"] are all /24."""

    def read(value: Any) -> str:
        try:
            return ",".join(f"/{size}" for size in parse_sizes(value).values())
        except (PodCidrError, TypeError, AttributeError):
            raise _Wrong("the prefix length of a node's share: /24, or /24,/64") from None

    return Kind(read, {"anyOf": [{"type": "integer"}, {"type": "string"}]})


def _answered() -> Kind:
    """true, false, or a list of ports; an empty list is false."""
    most = port_ranges.MOST_ANSWERED

    def read(value: Any) -> port_ranges.Answered:
        if isinstance(value, bool):
            return value
        if not isinstance(value, list) or len(value) > most:
            raise _Wrong(f"true, false or a list of up to {most} ports such as [22, 6443/tcp]")
        return ports.read(value) or False

    ports = _list(_answered_ports(), "a port")
    return Kind(read, {"anyOf": [{"type": "boolean"}, {**ports.schema, "maxItems": most}]})


def _answered_ports() -> Kind:
    def read(value: Any) -> PortRange:
        try:
            return port_ranges.parse(value, port_ranges.ANSWERED_PROTOCOLS)
        except ValueError as problem:
            raise _Wrong(str(problem)) from None

    text = {"type": "string", "pattern": f"^{port_ranges.PATTERN}(/(tcp|udp))?$"}
    return Kind(read, {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65535}, text]})


def _tags() -> Kind:
    """A list of tags, one tag, or `any` for none in particular."""

    def read(value: Any) -> Tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list):
            raise _Wrong("a list of tags such as tag:headcni, or any")
        if texts == ["any"]:
            return ()
        bad = [
            (f"[{at}]", one, "a tag such as tag:headcni; any stands alone")
            for at, one in enumerate(texts)
            if not isinstance(one, str) or not re.match(f"(?:{_TAG})\\Z", one)
        ]
        if bad:
            raise _Wrong(items=bad)
        return tuple(texts)

    one = {"type": "string", "pattern": f"^(any|{_TAG})?$"}
    several = {"type": "array", "items": {"type": "string", "pattern": f"^{_TAG}$"}}
    return Kind(read, {"anyOf": [one, several]})


class Accesses(Tuple[Tuple[str, str], ...]):
    """What namespaces may reach of the tailnet: a mapping that cannot be changed."""


_ONE_ACCESS = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {"type": "string"},
            "maxItems": MOST_ENTRIES,
        },
    ]
}


def _access() -> Kind:
    """all, pods, or a list of addresses and ports."""

    def read(value: Any) -> str:
        try:
            return parse_access(value)
        except WrongAccess as wrong:
            if isinstance(value, list) and wrong.at >= 0:
                items = [(f"[{wrong.at}]", value[wrong.at], str(wrong))]
                raise _Wrong(items=items) from None
            raise _Wrong(str(wrong)) from None

    return Kind(read, _ONE_ACCESS)


def _accesses() -> Kind:
    """The same for each namespace."""
    most, one = MOST_NAMESPACES, _access()

    def read(value: Any) -> Accesses:
        if not isinstance(value, Mapping):
            raise _Wrong("namespaces, each with all, pods or a list")
        if len(value) > most:
            raise _Wrong(f"at most {most} namespaces")
        good, bad = {}, []
        for name, access in value.items():
            if not isinstance(name, str) or not re.match(f"{NAMESPACE}\\Z", name):
                bad.append((f"[{name}]", name, "the name of a namespace"))
                continue
            try:
                good[name] = one.read(access)
            except _Wrong as wrong:
                items = wrong.items or (("", access, str(wrong)),)
                bad += [(f"[{name}]{at}", found, expected) for at, found, expected in items]
        if bad:
            raise _Wrong(items=bad)
        return Accesses(sorted(good.items()))

    schema = {"type": "object", "additionalProperties": _ONE_ACCESS, "maxProperties": most}
    return Kind(read, schema)


def _key(default: Any, kind: Kind, about: str, *, name: str = "", live: bool = False) -> Any:
    """A key; ``live`` says that SIGHUP changes it. Its name is the field's in camelCase."""
    return field(  # pylint: disable=invalid-field-call
        default=default, metadata={"kind": kind, "about": about, "name": name, "live": live}
    )


def _about(about: str, name: str = "") -> Dict[str, Any]:
    """Of a section, what it is for."""
    return {"about": about, "name": name}


_URL = r"https?://[^\s/@?#]+(?:/[^\s@]*)?"
_DOMAIN = r"(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?"
_address = _text(_is_address, "an IP address")


@dataclass(frozen=True)
class Daemon:
    socket: str = _key(
        "/run/headcni/cni.sock", _path(), "where the plugin finds the daemon; root alone may use it"
    )
    data_dir: str = _key(
        "/var/lib/cni/headcni", _path(), "the allocation store; the plugin's data_dir must agree"
    )
    reconcile_interval: float = _key(
        30.0,
        _seconds(1, 3600),
        "how often desired and actual state are compared when no event asks for it",
        live=True,
    )
    stop_timeout: float = _key(
        20.0, _seconds(0, 300), "how long a stopping daemon waits for calls in progress", live=True
    )
    node_name: str = _key(
        "",
        _pattern(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "a name as Kubernetes has it"),
        "what Kubernetes calls this node; else NODE_NAME, else the host name in lower case",
    )
    kubeconfig: str = _key(
        "", _path(), "watch this node's pods with it; without one, a service account's, or none"
    )
    token_lifetime: float = _key(
        7_776_000.0,
        _seconds(bearer_token.SHORTEST, bearer_token.LONGEST),
        "how long a token lives that the daemon renews for itself; the API server may grant less",
    )
    pod_selector: str = _key(
        "",
        _pattern(r"[^\s&]+(?: [^\s&]+)*", "a label selector such as app=web,tier!=test"),
        "watch only the pods with these labels",
    )


@dataclass(frozen=True)
class Headscale:
    url: str = _key(
        "", _pattern(_URL, "an http:// or https:// URL"), "the control server", live=True
    )
    api_key_file: str = _key(
        "",
        _path(),
        "a file, 0600, with an API key: the daemon then asks for its own routes itself. "
        "Without it the approval is only watched",
        live=True,
    )
    timeout: float = _key(10.0, _seconds(0.1, 300), "of one request", live=True)
    retries: int = _key(3, _number(0, 20), "of a request that failed, with back-off", live=True)


@dataclass(frozen=True)
class TailscaleSocket:
    path: str = _key("", _path(), "of tailscaled's LocalAPI; by default as the mode has it")


@dataclass(frozen=True)
class Tailscale:
    mode: str = _key(
        "host",
        _choice(*MODES),
        "host: the node's own tailscaled; daemon: one of ours, in a network namespace of its own",
    )
    socket: TailscaleSocket = field(
        default_factory=TailscaleSocket, metadata=_about("where tailscaled answers")
    )
    interface_name: str = _key(
        "",
        _text(is_interface_name, "an interface name of at most 15 characters"),
        "the way to the other nodes; by default tailscale0 (host) or headcni01 (daemon)",
    )
    port: int = _key(41642, _number(1, 65535), "the UDP port of our own tailscaled (daemon mode)")
    link_cidr: Tuple[Network, ...] = _key(
        (),
        _cidrs(_any_cidrs),
        "addresses of the link to our own tailscaled; by default such as clash with no route",
        name="linkCIDR",
    )
    answer_for_node: Union[bool, Tuple[PortRange, ...]] = _key(
        True,
        _answered(),
        "on which ports the node answers at the tailnet address of our own tailscaled: true for "
        "all, a list such as [22, 6443/tcp, 30000-32767], or false for none, in which case the "
        "node itself does not reach the tailnet either (daemon mode)",
    )
    peer_tags: Tuple[str, ...] = _key(
        ("tag:headcni",),
        _tags(),
        "only peers with one of these tags may serve pods; any, or an empty list: every peer may",
    )

    @property
    def socket_path(self) -> str:
        return socket_of(self.mode, self.socket.path)

    @property
    def interface(self) -> str:
        return self.interface_name or LINKS[self.mode]


@dataclass(frozen=True)
class PodCidr:
    node_local: Tuple[Network, ...] = _key(
        (), _cidrs(parse_pod_cidrs), "this node's own; the answer that needs no guessing"
    )
    base: Tuple[Network, ...] = _key((), _cidrs(_any_cidrs), "the cluster's, of which it is a part")
    per_node: str = _key("", _sizes(), "the size of a node's share of base; /24 and /64 if not set")
    peer_sizes: Tuple[int, ...] = _key(
        (),
        _list(_number(1, 126), "a prefix length such as 24 or 64"),
        "prefix lengths that other nodes' ranges may also have; without it, all must be as long as "
        "perNode or this node's own. 32 or less: of IPv4",
    )


@dataclass(frozen=True)
class NetworkSection:
    pod_cidr: PodCidr = field(
        default_factory=PodCidr, metadata=_about("where the pods' addresses come from", "podCIDR")
    )
    service_cidr: Tuple[Network, ...] = _key(
        (), _cidrs(_any_cidrs), "the services' range, which no pod may have", name="serviceCIDR"
    )
    mtu: int = _key(
        1280, _number(576, 65535), "of pods' interfaces; 1280 is what Tailscale carries"
    )
    bridge: str = _key(
        "headcni0",
        _text(is_interface_name, "an interface name of at most 15 characters"),
        "the bridge that pods are on; the plugin's bridge must agree",
    )
    firewall: str = _key(
        "auto",
        _choice("auto", "none"),
        "auto: other firewalls on the node are told to let pods through; none: they are left "
        "alone, and what they block is only reported",
    )
    own_networks_first: bool = _key(
        True,
        _flag(),
        "whether networks in the node's main routing table are reached directly although a peer "
        "advertises them in the tailnet (host mode)",
    )
    tailnet_access: str = _key(
        WHOLE_TAILNET,
        _access(),
        "what pods may reach of the tailnet, where they have the node's address and so its rights: "
        "all; pods: only pods of the mesh; or a list of addresses and ports beside those",
        live=True,
    )
    tailnet_access_namespaces: Tuple[Tuple[str, str], ...] = _key(
        Accesses(),
        _accesses(),
        "the same for pods of these namespaces, over their annotation headcni.dev/tailnet-access",
        live=True,
    )


@dataclass(frozen=True)
class IpamSection:
    type: str = _key("headcni-ipam", _choice("headcni-ipam", "host-local"), "who gives addresses")
    strategy: str = _key("sequential", _choice(*STRATEGIES), "which free address a pod gets")
    gc_interval: float = _key(
        3600.0,
        _seconds(10, 7 * 86400),
        "how often addresses of pods that are gone are looked for",
        name="gcInterval",
        live=True,
    )


@dataclass(frozen=True)
class MagicDns:
    enabled: bool = _key(False, _flag(), "whether pods resolve by way of the tailnet")
    base_domain: str = _key("", _pattern(_DOMAIN, "a domain name"), "the tailnet's domain")
    nameservers: Tuple[str, ...] = _key((), _list(_address, "an IP address"), "asked in this order")
    search_domains: Tuple[str, ...] = _key(
        (), _list(_pattern(_DOMAIN, "a domain name"), "a domain name"), "tried for short names"
    )
    options: Tuple[str, ...] = _key(
        (), _list(_pattern(r"\S+", "a resolver option"), "a resolver option"), "such as ndots:5"
    )


@dataclass(frozen=True)
class DnsSection:
    magic_dns: MagicDns = field(
        default_factory=MagicDns, metadata=_about("what pods' resolv.conf says", "magicDNS")
    )


@dataclass(frozen=True)
class Monitoring:
    enabled: bool = _key(True, _flag(), "whether to answer over HTTP at all", live=True)
    address: str = _key(
        "127.0.0.1", _address, "where to listen; 0.0.0.0 or :: lets everyone ask", live=True
    )
    port: int = _key(9001, _number(1, 65535), "where to listen", live=True)
    path: str = _key("/metrics", _pattern(r"/[\w./-]*", "a path"), "of the metrics", live=True)
    pprof: bool = _key(False, _flag(), "whether /debug/pprof is served", live=True)
    pod_name_label: bool = _key(
        False, _flag(), "label the set-up time by pod as well: a time series for every pod"
    )


@dataclass(frozen=True)
class Logging:
    level: str = _key(
        "INFO", _choice(*LEVELS, any_case=True), "the least that is written", live=True
    )
    format: str = _key("logfmt", _choice("logfmt", "json"), "how a line is written", live=True)


@dataclass(frozen=True)
class DaemonConfig:
    """The whole file, complete. What it does not say has its default."""

    daemon: Daemon = field(default_factory=Daemon, metadata=_about("the daemon itself"))
    headscale: Headscale = field(
        default_factory=Headscale,
        metadata=_about("the control server; the daemon works without it"),
    )
    tailscale: Tailscale = field(
        default_factory=Tailscale, metadata=_about("the tailscaled that carries the packets")
    )
    network: NetworkSection = field(
        default_factory=NetworkSection, metadata=_about("the addresses of pods and services")
    )
    ipam: IpamSection = field(
        default_factory=IpamSection, metadata=_about("how addresses are given")
    )
    dns: DnsSection = field(default_factory=DnsSection, metadata=_about("how pods resolve names"))
    monitoring: Monitoring = field(
        default_factory=Monitoring, metadata=_about("health, metrics and profiles over HTTP")
    )
    logging: Logging = field(
        default_factory=Logging, metadata=_about("what is written to the journal")
    )


# Keys of the Go original that would promise something here that nobody keeps. Saying no to them
# by false, "" or [] is right and passes.
RETIRED: Dict[str, str] = {
    "daemon.logLevel": "no such key: it is logging.level here",
    "daemon.hostNetwork": "no such key: the daemon is a service of the node",
    "headscale.authKey": "no key in this file: name a file with one in headscale.apiKeyFile",
    "tailscale.url": "no such key: it is headscale.url here",
    "tailscale.socket.name": "no such key: the name is part of tailscale.socket.path",
    "tailscale.mtu": "no such key: tailscaled has its own, and pods have network.mtu",
    "tailscale.acceptDNS": "no such key: tailscaled keeps what the node joined with",
    "tailscale.hostname": "no such key: the node joins under its own name",
    "tailscale.user": "no such key: the controller chooses who the node belongs to",
    "tailscale.tags": "no such key: the controller's pre-auth key carries the tags",
    "network.enableIPv6": "no such key: give an IPv6 range in network.podCIDR",
    "network.enableNetworkPolicy": "false: HeadCNI does not enforce network policies yet",
    "ipam.subnets": "no such key: the ranges come from network.podCIDR",
    "dns.custom": "no such key: the dns section of the netconf has fixed servers",
    "logging.output": "no such key: the log goes to stderr, which the journal keeps",
    "logging.file": "no such key: the log goes to stderr, which the journal keeps",
    "security": "no such section: bind monitoring.address to a network that you trust",
    "performance": "no such section: there is nothing to tune",
    "configPath": "no such key: the path is given on the command line",
}
_SECRET = re.compile(r"(?i)(?:key|token|secret|password)\Z")


def load(path: str = PATH, missing_ok: bool = False) -> DaemonConfig:
    """The file as a value; all its mistakes in one CniError.

    With ``missing_ok`` a file that is not there stands for the defaults.
    """
    try:
        text = _read(path)
    except FileNotFoundError as problem:
        if missing_ok:
            return DaemonConfig()
        raise _unreadable(path, problem) from None
    except OSError as problem:
        raise _unreadable(path, problem) from None
    made, found = parse(text)
    if found:
        raise error(found)
    return made


def parse(text: bytes) -> Tuple[DaemonConfig, List[Problem]]:
    """What is right of it, and every mistake; what is wrong is left at its default."""
    found: List[Problem] = []
    made: DaemonConfig = _make(DaemonConfig, _decode(text, found), "", found)
    _check_together(made, found)
    return made, found


def check(path: str = PATH, as_json: bool = False) -> Tuple[int, str]:
    """``--check-config``: an exit code (0 good, 1 mistakes, 3 not to be read) and what to print."""
    try:
        made, found = parse(_read(path))
    except OSError as problem:
        unreadable = _unreadable(path, problem)
        shown = {"file": path, "valid": False, "error": str(unreadable)}
        return 3, json.dumps(shown, indent=2) if as_json else str(unreadable)
    if as_json:
        report = {"file": path, **json.loads(render(found, as_json=True))}
        return int(bool(found)), json.dumps({**report, "config": as_dict(made)}, indent=2)
    lines = [f"{path}: {render(found)}"]
    if not found:
        differing = changes(DaemonConfig(), made)
        lines += [
            f"  {one.path} = {_shown(one.new)}"
            for one in (*differing.applied, *differing.needs_restart)
        ]
    return int(bool(found)), "\n".join(lines)


class Change(NamedTuple):
    """A key whose value is another now."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.old)} → {_shown(self.new)}"


class Changes(NamedTuple):
    """What SIGHUP does, and what waits for a restart."""

    applied: Tuple[Change, ...]
    needs_restart: Tuple[Change, ...]


def changes(old: DaemonConfig, new: DaemonConfig) -> Changes:
    differing = [
        (Change(path, before, after), live)
        for (path, before, live), (_path, after, _live) in zip(_flat(old), _flat(new))
        if before != after
    ]
    return Changes(
        tuple(change for change, live in differing if live),
        tuple(change for change, live in differing if not live),
    )


def with_applied(old: DaemonConfig, new: DaemonConfig) -> DaemonConfig:
    """The old one with those changes that need no restart: what is in force after SIGHUP."""
    return _merged(old, new)


def as_dict(config: Any) -> Dict[str, Any]:
    """By the file's own keys, for JSON; good to be read again."""
    return {
        name: as_dict(value) if is_dataclass(value) else _plain(value)
        for name, value in ((_name(one), getattr(config, one.name)) for one in fields(config))
    }


def pod_cidrs(config: DaemonConfig) -> Resolution:
    """This node's own, as the file says or as they are found."""
    return resolve(for_resolver(config), os.environ, node_name=config.daemon.node_name)


def node_sizes(config: DaemonConfig) -> Tuple[Tuple[int, int], ...]:
    """What the file says about the lengths of nodes' ranges: IP version and prefix length."""
    pod = config.network.pod_cidr
    allowed = {(4 if size <= 32 else 6, size) for size in pod.peer_sizes}
    return tuple(sorted({*parse_sizes(pod.per_node).items(), *allowed}))


def in_mode(config: DaemonConfig, mode: str, socket: str = "") -> DaemonConfig:
    """The same in another mode, with that one's own socket and interface."""
    own = TailscaleSocket(socket)
    tailscale = replace(config.tailscale, mode=mode, socket=own, interface_name="")
    return replace(config, tailscale=tailscale)


def answered(config: DaemonConfig) -> List[str]:
    """The node's ports that tailnet peers reach in daemon mode, for people; nothing in host mode,
    where it is the node's own tailscaled that answers."""
    chosen = config.tailscale
    if chosen.mode != "daemon":
        return []
    if isinstance(chosen.answer_for_node, bool):
        return ["all"] if chosen.answer_for_node else ["none"]
    return [str(one) for one in chosen.answer_for_node]


def node_name(config: DaemonConfig) -> str:
    """What Kubernetes calls this node."""
    given = config.daemon.node_name or os.environ.get("NODE_NAME", "")
    return given or os.uname().nodename.lower()


def for_resolver(config: DaemonConfig) -> Dict[str, Any]:
    """The part that ``podcidr.resolve`` asks about."""
    return {"network": {"podCIDR": as_dict(config.network.pod_cidr)}}


def schema() -> Dict[str, Any]:
    """JSON Schema for editors; ``config.schema.json`` is this."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "HeadCNI daemon configuration",
        **_schema_of(DaemonConfig),
    }


def described() -> Iterator[Tuple[str, str, Any, bool]]:
    """Path, meaning, default and whether SIGHUP changes it, of each key."""
    for path, one, default in _walk(DaemonConfig(), ""):
        yield path, one.metadata["about"], _plain(default), one.metadata["live"]


def _read(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(_LARGEST_FILE + 1)


def _unreadable(path: str, problem: OSError) -> CniError:
    return CniError(IO_FAILURE, f"{path} cannot be read", problem.strerror or str(problem))


def _decode(text: bytes, found: List[Problem]) -> Mapping[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    if len(text) > _LARGEST_FILE:
        found.append(Problem("", f"{len(text)} bytes or more", f"at most {_LARGEST_FILE} bytes"))
        return {}
    try:
        value = YAML(typ="safe", pure=True).load(text.decode("utf-8"))
    except MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = " ".join(str(wrong.problem or wrong.context).split())
        if reason.startswith("found duplicate key"):
            name = reason.split('"')[1] if '"' in reason else ""
            found.append(Problem(where, name, "each key to be given once"))
        else:
            # The line itself may hold a secret: it is not shown.
            found.append(Problem(where, "not YAML", f"valid YAML: {reason}"))
        return {}
    except (YAMLError, ValueError, RecursionError) as wrong:
        reason = " ".join(str(wrong).split())[:120]
        found.append(Problem("", "not YAML", f"valid YAML: {reason}"))
        return {}
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        found.append(Problem("", _shown(value), "sections such as network: and logging:"))
        return {}
    return value


def _make(of: Any, values: Mapping[Any, Any], path: str, found: List[Problem]) -> Any:
    """A section out of what stands in the file. null and "" count as not given."""
    given = {str(key): value for key, value in values.items()}
    made: Dict[str, Any] = {}
    known = {_name(one): one for one in _fields(of)}
    unknown: Dict[str, Any] = {}
    for key, value in given.items():
        where = f"{path}.{key}" if path else key
        one = known.get(key)
        if one is None:
            if key.startswith(("_", "x-")) or (where in RETIRED and not value):
                continue
            if where in RETIRED:
                found.append(Problem(where, _safe(key, value), RETIRED[where]))
            else:
                unknown[key] = _safe(key, value)
        elif one.default_factory is not MISSING:
            inner = one.default_factory
            if value is not None and not isinstance(value, Mapping):
                some = ", ".join(_name(f) for f in _fields(inner)[:3])
                found.append(
                    Problem(where, _safe(key, value), f"a section with keys such as {some}")
                )
            elif value is not None:
                made[one.name] = _make(inner, value, where, found)
        elif value not in (None, ""):
            try:
                made[one.name] = one.metadata["kind"].read(value)
            except _Wrong as wrong:
                for at, bad, expected in wrong.items or (("", value, str(wrong)),):
                    found.append(Problem(where + at, _safe(key, bad), expected))
    before = len(found)
    unknown_keys(unknown, list(known), path, found)
    found[before:] = [one._replace(path=one.path.lstrip(".")) for one in found[before:]]
    return of(**made)


def _check_together(config: DaemonConfig, found: List[Problem]) -> None:
    """Mistakes that no key has by itself."""
    network, pod = config.network, config.network.pod_cidr
    for cidr in pod.node_local:
        bases = [base for base in pod.base if base.version == cidr.version]
        if bases and not any(b.prefixlen <= cidr.prefixlen and b.overlaps(cidr) for b in bases):
            expected = f"a range within network.podCIDR.base {', '.join(map(str, bases))}"
            found.append(Problem("network.podCIDR.nodeLocal", str(cidr), expected))
    for name, cidrs in (("nodeLocal", pod.node_local), ("base", pod.base)):
        for cidr in cidrs:
            for service in network.service_cidr:
                if service.version == cidr.version and service.overlaps(cidr):
                    expected = f"a range apart from network.serviceCIDR {service}"
                    found.append(Problem(f"network.podCIDR.{name}", str(cidr), expected))
    if network.mtu < 1280 and any(c.version == 6 for c in (*pod.node_local, *pod.base)):
        found.append(Problem("network.mtu", network.mtu, "at least 1280, as IPv6 needs it"))
    if config.headscale.api_key_file and not config.headscale.url:
        expected = "headscale.url beside it, to know whose key it is"
        found.append(Problem("headscale.apiKeyFile", config.headscale.api_key_file, expected))
    if config.monitoring.path.startswith(("/healthz", "/ready", "/debug/")):
        found.append(Problem("monitoring.path", config.monitoring.path, "a path of its own"))
    magic = config.dns.magic_dns
    said = magic.base_domain or magic.nameservers or magic.search_domains
    if magic.enabled and not said and not any(p.path.startswith("dns.magicDNS") for p in found):
        expected = "baseDomain, nameservers or searchDomains beside it"
        found.append(Problem("dns.magicDNS.enabled", True, expected))
    _check_resolvers(config, found)


def _check_resolvers(config: DaemonConfig, found: List[Problem]) -> None:
    """Pods that may not ask their own nameservers would look as if DNS were broken."""
    access, magic = config.network.tailnet_access, config.dns.magic_dns
    for text in magic.nameservers if magic.enabled else ():
        address = ip_address(text)
        tailnet = ip_network(RANGES[address.version])
        if address in tailnet and not all(allows(access, address, 53, p) for p in ("udp", "tcp")):
            entry = f"[{text}]:53" if address.version == 6 else f"{text}:53"
            expected = f"a list with {entry}, as pods resolve by it (dns.magicDNS.nameservers)"
            found.append(Problem("network.tailnetAccess", access, expected))


def _fields(of: Any) -> Tuple[Field[Any], ...]:
    return fields(of)


def _name(one: Field[Any]) -> str:
    """As the file spells it."""
    if one.metadata["name"]:
        return str(one.metadata["name"])
    first, *others = one.name.split("_")
    return first + "".join(part.capitalize() for part in others)


def _walk(config: Any, path: str) -> Iterator[Tuple[str, Field[Any], Any]]:
    for one in _fields(config):
        where = f"{path}.{_name(one)}" if path else _name(one)
        value = getattr(config, one.name)
        if is_dataclass(value):
            yield from _walk(value, where)
        else:
            yield where, one, value


def _flat(config: DaemonConfig) -> Iterator[Tuple[str, Any, bool]]:
    for path, one, value in _walk(config, ""):
        yield path, value, bool(one.metadata["live"])


def _merged(old: T, new: T) -> T:
    values = {}
    for one in _fields(old):
        before, after = getattr(old, one.name), getattr(new, one.name)
        if is_dataclass(before):
            values[one.name] = _merged(before, after)
        else:
            values[one.name] = after if one.metadata["live"] else before
    return type(old)(**values)


def _schema_of(of: Any) -> Dict[str, Any]:
    properties = {}
    for one in _fields(of):
        about = {"description": one.metadata["about"]}
        if one.default_factory is not MISSING:
            properties[_name(one)] = {**about, **_schema_of(one.default_factory)}
        else:
            kind: Kind = one.metadata["kind"]
            properties[_name(one)] = {**about, "default": _plain(one.default), **kind.schema}
    return {
        "type": ["object", "null"],
        "properties": properties,
        "patternProperties": {"^(_|x-)": {}},
        "additionalProperties": False,
    }


def _plain(value: Any) -> Any:
    """As the file would have it."""
    if isinstance(value, Accesses):
        return dict(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (str, int, float, bool)) else str(value)


def _safe(key: str, value: Any) -> Any:
    """What may be shown of a value: no secret, and nothing that JSON has no word for."""
    if _SECRET.search(key):
        return "(not shown)"
    if isinstance(value, str):
        return re.sub(r"//[^/@\s]*@", "//(not shown)@", value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (Mapping, Sequence)):
        kind = "a section" if isinstance(value, Mapping) else "a list"
        return f"{kind} of {len(value)}"
    return str(value)


def _shown(value: Any) -> str:
    plain = _plain(value)
    return json.dumps(plain if plain != [] else "")


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
