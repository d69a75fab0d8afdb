"""netconf + environment + subnet.env → one NetworkConfig, or every mistake at once.

A key that is null counts as not given, as it does for Go. Keys with a dot or a slash belong to
others (cni.dev/…), keys that start with an underscore are comments: both are left alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_network
from typing import Any, Callable, NamedTuple

from . import port_ranges, subnet_env
from .call import EXPECTED_NAME, NAME, is_interface_name
from .errors import (
    INCOMPATIBLE_VERSION,
    INVALID_CONFIG,
    UNDECODABLE,
    CniError,
    shortened,
)
from .ipam.config import (
    ANNOTATIONS,
    LONGEST_VALUE,
    POD_LABELS,
    Problem,
    named_mistakes,
    parse_address,
    parse_ipam,
    split_cni_args,
    tolerated,
    warn,
)
from .model import (
    Address,
    Bandwidth,
    Dns,
    IpamConfig,
    Network,
    NetworkConfig,
    PortMapping,
    PortRange,
)
from .runtime_config import as_specified
from .shared.podcidr import PodCidrError, parse_cidr, unfit_for_pods

TYPE = "headcni"
CNI_VERSIONS = ("0.3.1", "0.4.0", "1.0.0", "1.1.0")

_KEYS = (
    *("cniVersion", "cniVersions", "name", "type", "disableCheck", "disableGC"),
    *("capabilities", "runtimeConfig", "args", "prevResult", "ipam", "dns"),
    *("headscale_url", "tailscale_socket", "pod_cidr", "service_cidr", "cluster_cidr"),
    *("magic_dns", "mtu", "enable_ipv6", "enable_network_policy", "mode", "datapath", "bridge"),
    *("ip_masq", "hairpin", "default_route", "mac", "delegate", "plugins", "delegate_timeout"),
    *("is_gateway", "mesh_grace", "data_dir", "subnet_file"),
    *("anti_spoofing", "anti_spoofing_exempt"),
    *("reserved_ports", "host_ports_over_listeners"),
)
# As other plugins spell them.
_ALIASES = {
    "ip_masq": "ipMasq",
    "hairpin": "hairpinMode",
    "is_gateway": "isGateway",
    "default_route": "isDefaultGateway",
    "data_dir": "dataDir",
    "subnet_file": "subnetFile",
}
_CAPABILITIES = (
    *("portMappings", "bandwidth", "ipRanges", "ips", "dns", "mac"),
    *("aliases", "cgroupPath", "deviceID", "infinibandGUID", ANNOTATIONS),
)
_CNI_ARGS = (
    *("IgnoreUnknown", "IP", "MAC", "K8S_POD_NAMESPACE", "K8S_POD_NAME"),
    *("K8S_POD_INFRA_CONTAINER_ID", "K8S_POD_UID", POD_LABELS),
)
_OWN_IPAM = ("headcni-ipam", "host-local")
_LARGEST_BURST = 8 * (2**32 - 1)  # bits; tc counts it in bytes, in 32 bits
_RESERVED_LINKS = ("lo", "all", "default", "tailscale0", "headcni01")

_WHICH_POD = tuple(
    f"K8S_POD_{what}=" for what in ("NAMESPACE", "NAME", "INFRA_CONTAINER_ID", "UID")
)

KEPT = 64  # configurations that were understood; the pods of a node have few between them
LONGEST_KEPT = 16 << 10  # bytes; a larger one has annotations that no other pod has
_ONCE = frozenset(("prevResult", "cni.dev/valid-attachments"))  # no two calls have the same

# Compiled where they are used, which most calls never do.
_DOMAIN = r"(?i:(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_-]{1,63}\.?)\Z"
_MAC = r"(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\Z|(?:[0-9a-f]{4}\.){2}[0-9a-f]{4}\Z"

_EXPECTED_LINK = "an interface name of at most 15 characters that is not the system's"
_EXPECTED_PODS = "namespace/name of pods, where * and ? stand for any characters"
_EXPECTED_TYPE = "the name of a plugin's executable"
_EXPECTED_ADDRESSES = (
    "ipam.subnet or ipam.ranges, or else pod_cidr, HEADCNI_SUBNET or a subnet.env, "
    "to take addresses from"
)


class _Known(NamedTuple):
    network: NetworkConfig
    subnet_file: str  # "" if it was not asked
    seen: tuple[int, ...]


_known: dict[tuple[bytes, bool, tuple[tuple[str, ...], ...]], _Known] = {}


def parse(stdin: bytes, env: Mapping[str, str], forgiving: bool = False) -> NetworkConfig:
    """The netconf on stdin, checked and complete; all mistakes in one CniError.

    ``forgiving`` is for DEL: what cannot be understood is left at its default, because a pod must
    be removable whatever has become of the configuration since it was added.
    """
    asked = (stdin, forgiving, _what_counts(env))
    known = _known.get(asked)
    if known is not None and known.seen == _state_of(known.subnet_file):
        return known.network
    conf, found = _decode(stdin)
    _refuse_version(conf)
    subnet_file = _subnet_file(_top(conf, []), env)
    seen = _state_of(subnet_file)  # before it is read: if it changes meanwhile, it is read again
    network = _network(conf, env, found)
    if forgiving:
        found = [problem for problem in found if problem.path == "name"]
    else:
        found = tolerated(found)
    if found:
        raise error(found)
    for doubt in () if forgiving else _doubts(network):
        warn(doubt)
    if len(stdin) <= LONGEST_KEPT and not _ONCE.intersection(conf):
        if len(_known) >= KEPT:
            _known.clear()
        _known[asked] = _Known(network, subnet_file, seen)
    return network


def _state_of(path: str) -> tuple[int, ...]:
    """Of a file, what another one in its place would not have; nothing where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _what_counts(env: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """What of the environment a NetworkConfig is made of. Which pod it is for is not: of all that
    a runtime says to a plugin, often only this differs from one pod to the next."""
    pairs = env.get("CNI_ARGS", "").split(";")
    return (
        tuple(pair for pair in pairs if not pair.startswith(_WHICH_POD)),
        *(item for item in env.items() if item[0].startswith("HEADCNI_")),
    )


def problems(stdin: bytes, env: Mapping[str, str]) -> list[Problem]:
    """Every mistake in a netconf, those that ``parse`` would stop at included."""
    try:
        conf, found = _decode(stdin)
    except CniError as wrong:
        return [_undecodable(stdin, wrong)]
    try:
        _refuse_version(conf)
    except CniError:
        found.append(Problem("cniVersion", conf.get("cniVersion"), " or ".join(CNI_VERSIONS)))
    _network(conf, env, found)
    return found


def doubts(text: bytes, env: Mapping[str, str]) -> list[str]:
    """What is no mistake in a netconf or conflist, but probably not meant."""
    try:
        conf, found = _decode(text)
    except CniError:
        return []
    plugins = conf["plugins"] if isinstance(conf.get("plugins"), list) else ()
    listed = (conf,) if conf.get("type") == TYPE else plugins
    return [
        doubt
        for plugin in listed
        if isinstance(plugin, dict) and plugin.get("type") == TYPE
        for doubt in _doubts(_network({"name": "injected", **plugin}, env, found))
    ]


def _doubts(network: NetworkConfig) -> Iterator[str]:
    if network.ip_masq and network.ipam.type and not (network.cluster_cidrs or network.delegates):
        yield (
            "cluster_cidr is not known, neither here nor from subnet.env: pods of other nodes see"
            " the node's address in place of the pod's; set cluster_cidr to the cluster's range"
        )


def conflist_problems(text: bytes, env: Mapping[str, str]) -> list[Problem]:
    """Every mistake in a conflist file, and in the netconfs of ours that libcni makes of it."""
    from .shared.conflist import validate

    try:
        conf, found = _decode(text)
    except CniError as wrong:
        return [_undecodable(text, wrong)]
    found += [Problem(*mistake) for mistake in validate(conf)]
    plugins = conf.get("plugins")
    for at, plugin in enumerate(plugins if isinstance(plugins, list) else ()):
        if isinstance(plugin, dict) and plugin.get("type") == TYPE:
            injected = {**plugin, "name": "injected"}
            inner: list[Problem] = []
            _network(injected, env, inner)
            known = {problem.path for problem in found}
            for problem in inner:
                path = f"plugins[{at}].{problem.path}"
                if path not in known:
                    found.append(problem._replace(path=path))
    return found


def render(found: Sequence[Problem], as_json: bool = False) -> str:
    """Mistakes for a reader, a line each, or for a program."""
    if as_json:
        listed = [{"path": p.path, "value": p.value, "expected": p.expected} for p in found]
        return json.dumps({"valid": not found, "problems": listed}, indent=2, default=str)
    if not found:
        return "no mistakes"
    return "\n".join([_count(found), *(f"  {_line(problem)}" for problem in found)])


def error(found: Sequence[Problem]) -> CniError:
    """All mistakes as the one answer that a runtime gets."""
    named = "; ".join(named_mistakes(found, _line))
    return CniError(INVALID_CONFIG, f"the configuration has {_count(found)}", named)


def _count(found: Sequence[Problem]) -> str:
    return "1 mistake" if len(found) == 1 else f"{len(found)} mistakes"


def _line(problem: Problem) -> str:
    shown = "missing" if problem.value is None else json.dumps(problem.value, default=str)
    path = shortened(problem.path, LONGEST_VALUE) or "the configuration"
    return f"{path} is {shortened(shown, LONGEST_VALUE)}: expected {problem.expected}"


def _decode(stdin: bytes) -> tuple[dict[str, Any], list[Problem]]:
    found: list[Problem] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        section = dict(items)
        if len(section) < len(items):
            once, twice = set[str](), set[str]()
            for key, _unused in items:
                (twice if key in once else once).add(key)
            found.extend(Problem(key, section[key], "to be given once") for key in sorted(twice))
        return section

    try:
        conf = json.loads(stdin, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as wrong:
        raise CniError(UNDECODABLE, "the configuration is not JSON", str(wrong)) from None
    if not isinstance(conf, dict):
        raise CniError(UNDECODABLE, "the configuration is not JSON", "it is not an object {…}")
    return conf, found


def _undecodable(text: bytes, wrong: CniError) -> Problem:
    return Problem("", text[:80].decode("utf-8", "replace"), f"valid JSON: {wrong.details}")


def _refuse_version(conf: Mapping[str, Any]) -> None:
    version = conf.get("cniVersion")
    if version not in CNI_VERSIONS:
        shown = "none" if version is None else json.dumps(version)
        raise CniError(
            INCOMPATIBLE_VERSION,
            "incompatible CNI versions",
            f"cniVersion is {shown}; HeadCNI speaks {', '.join(CNI_VERSIONS)}",
        )


class _Section:
    """One object of the configuration: reads its keys, and notes what is wrong with them.

    A reader returns the default for a value that is not given or wrong.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: str,
        found: list[Problem],
        spelled: Mapping[str, str] | None = None,
    ) -> None:
        self.values = values
        self.path = path
        self.found = found
        self.spelled = spelled or {}

    def at(self, key: str) -> str:
        key = self.spelled.get(key, key)
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        return self.values.get(self.spelled.get(key, key))

    def wrong(self, key: str, value: Any, expected: str) -> None:
        self.found.append(Problem(self.at(key), value, expected))

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.wrong(key, value, "true or false")
        return default

    def number(self, key: str, default: int, low: int, high: int) -> int:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.wrong(key, value, f"a number from {low} to {high}")
        return default

    def text(
        self, key: str, default: str | None, valid: Callable[[str], bool], expected: str
    ) -> str:
        """A string, where an empty one is not given; one without a default must be."""
        value = self.get(key)
        if value in (None, "") and default is not None:
            return default
        if isinstance(value, str) and valid(value):
            return value
        self.wrong(key, value, expected)
        return default or ""

    def choice(self, key: str, *options: str) -> str:
        return self.text(key, options[0], lambda v: v in options, " or ".join(options))

    def path_name(self, key: str, default: str) -> str:
        return self.text(key, default, lambda v: v.startswith("/"), "an absolute path")

    def items(self, key: str, expected: str) -> Iterator[tuple[str, Any]]:
        """The items of a list, each with its path."""
        value = self.get(key)
        if value is None:
            return
        if not isinstance(value, list):
            self.wrong(key, value, expected)
            return
        for index, item in enumerate(value):
            yield f"{key}[{index}]", item

    def texts(self, key: str, valid: Callable[[str], bool], expected: str) -> tuple[str, ...]:
        found = []
        for path, item in self.items(key, f"a list, of {expected} each"):
            if isinstance(item, str) and valid(item):
                found.append(item)
            else:
                self.wrong(path, item, expected)
        return tuple(found)

    def networks(self, key: str) -> tuple[Network, ...]:
        """A CIDR, a comma list or a list; none of them twice or within another."""
        value = self.get(key)
        items: Iterable[tuple[str, Any]]
        if isinstance(value, str):
            items = [(key, item.strip()) for item in value.split(",")] if value else []
        else:
            items = self.items(key, "a CIDR or a list of CIDRs")
        networks: list[Network] = []
        for path, item in items:
            network = _cidr(item)
            if network is None:
                self.wrong(path, item, _right_cidr(item))
                continue
            clash = _overlap(network, networks)
            if clash is not None:
                self.wrong(path, item, f"a CIDR apart from {clash}")
            else:
                networks.append(network)
        return tuple(networks)

    def section(self, key: str) -> _Section:
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.wrong(key, value, "an object")
        return _Section(value if isinstance(value, Mapping) else {}, self.at(key), self.found)

    def only(self, known: Sequence[str], similar_only: bool = False) -> None:
        """Note keys that nobody reads, with the known one that was probably meant."""
        for key in self.values:
            if key in known or key.startswith("_") or "." in key or "/" in key:
                continue
            near = _nearest(key, known, 0.75 if similar_only else 0.6)
            if near or not similar_only:
                hint = f"{near}?" if near else f"one of {', '.join(known)}"
                self.wrong(key, self.values[key], f"a known key: {hint}")


def _nearest(key: str, known: Sequence[str], likeness: float) -> str:
    import difflib  # only where there is a mistake

    plain = {re.sub("[_-]", "", name).lower(): name for name in known}
    near = difflib.get_close_matches(re.sub("[_-]", "", key).lower(), plain, 1, likeness)
    return plain[near[0]] if near else ""


def _cidr(value: Any) -> Network | None:
    try:
        return parse_cidr(value) if isinstance(value, str) else None
    except PodCidrError:
        return None


def _right_cidr(value: Any) -> str:
    try:
        if isinstance(value, str) and "/" in value:
            return f"the network itself: {ip_network(value, strict=False)}"
    except ValueError:
        pass
    return "a CIDR such as 10.244.1.0/24"


def _overlap(network: Network, others: Iterable[Network]) -> Network | None:
    for other in others:
        if other.version == network.version and other.overlaps(network):
            return other
    return None


def _within(inner: Network, outers: Iterable[Network]) -> bool:
    """Whether it lies in one of them; of a family that they do not speak of, anything does."""
    same = [outer for outer in outers if outer.version == inner.version]
    return not same or any(o.prefixlen <= inner.prefixlen and o.overlaps(inner) for o in same)


def _top(conf: Mapping[str, Any], found: list[Problem]) -> _Section:
    missing = {key: alias for key, alias in _ALIASES.items() if conf.get(key) is None}
    return _Section(conf, "", found, {k: alias for k, alias in missing.items() if alias in conf})


def _network(
    conf: Mapping[str, Any], env: Mapping[str, str], found: list[Problem]
) -> NetworkConfig:
    """The whole of it. What is wrong is noted and left at its default."""
    if isinstance(conf.get("runtimeConfig"), Mapping):
        conf = {**conf, "runtimeConfig": as_specified(conf["runtimeConfig"])}
    top = _top(conf, found)
    for key, alias in _ALIASES.items():
        if conf.get(key) is not None and conf.get(alias) not in (None, conf[key]):
            top.wrong(alias, conf[alias], f"the same as {key}, which is {json.dumps(conf[key])}")
    top.only((*_KEYS, *_ALIASES.values()))
    name = top.text("name", None, lambda v: bool(NAME.match(v)), EXPECTED_NAME)
    top.text("type", None, lambda v: v == TYPE, TYPE)
    for key in ("disableCheck", "disableGC"):
        top.flag(key, False)
    _check_attachments(top)
    _check_capabilities(top.section("capabilities"))
    args, cni_env = top.section("args"), _checked_cni_args(env, found)
    runtime = top.section("runtimeConfig")

    delegates = _delegates(top)
    settings = _subnet_settings(top, env)
    pod_cidrs = _pod_cidrs(top, settings)
    ipam = _ipam(top, args, runtime, cni_env, pod_cidrs, bool(delegates))
    datapath = top.choice("datapath", "bridge", "routed")
    service_cidrs = top.networks("service_cidr")
    cluster_cidrs = top.networks("cluster_cidr")
    _check_pod_cidrs(top, pod_cidrs, cluster_cidrs, service_cidrs)
    _check_ranges(top, ipam, runtime, pod_cidrs, service_cidrs, datapath)
    _check_delegates_have_addresses(top, delegates, ipam)
    if not pod_cidrs:
        subnets = (range_.subnet for ranges in ipam.range_sets for range_ in ranges)
        pod_cidrs = tuple(dict.fromkeys(subnets))
    enable_ipv6 = _enable_ipv6(top, ipam, pod_cidrs, bool(delegates))
    is_gateway = _is_gateway(top, datapath)
    if not ipam.type and datapath == "routed":
        top.wrong("ipam", {}, "addresses with datapath routed")

    return NetworkConfig(
        cni_version=str(conf.get("cniVersion")),
        name=name,
        ipam=ipam,
        datapath=datapath,
        bridge=top.text("bridge", "headcni0", _is_link_of_ours, _EXPECTED_LINK),
        mtu=_mtu(top, settings, enable_ipv6),
        mode=top.choice("mode", "host", "daemon"),
        ip_masq=top.flag("ip_masq", True if settings.ip_masq is None else settings.ip_masq),
        enable_ipv6=enable_ipv6,
        enable_network_policy=top.flag("enable_network_policy", False),
        hairpin=top.flag("hairpin", True),
        is_gateway=is_gateway,
        default_route=top.flag("default_route", is_gateway),
        anti_spoofing=top.flag("anti_spoofing", True),
        anti_spoofing_exempt=top.texts("anti_spoofing_exempt", _is_pod_pattern, _EXPECTED_PODS),
        pod_cidrs=pod_cidrs,
        cluster_cidrs=cluster_cidrs or settings.networks,
        service_cidrs=service_cidrs,
        headscale_url=top.text("headscale_url", "", _is_url, "an http:// or https:// URL"),
        tailscale_socket=top.path_name("tailscale_socket", NetworkConfig.tailscale_socket),
        dns=_dns(top, runtime),
        mac=_mac(top, args, runtime, cni_env),
        port_mappings=_port_mappings(runtime),
        reserved_ports=_reserved_ports(top),
        host_ports_over_listeners=top.flag("host_ports_over_listeners", False),
        bandwidth=_bandwidth(runtime),
        delegates=delegates,
        delegate_timeout=_delegate_timeout(top),
        mesh_grace=float(top.number("mesh_grace", int(NetworkConfig.mesh_grace), 0, 3600)),
        data_dir=top.path_name(
            "data_dir", env.get("HEADCNI_DATA_DIR") or subnet_env.DEFAULT_DATA_DIR
        ),
        prev_result=top.section("prevResult").values or None,
        runtime_config=runtime.values,
        raw=conf,
    )


def _is_pod_pattern(text: str) -> bool:
    namespace, slash, name = text.partition("/")
    return bool(namespace and slash and name) and "/" not in name


def _is_link_of_ours(name: str) -> bool:
    return is_interface_name(name) and name not in _RESERVED_LINKS


def _is_gateway(top: _Section, datapath: str) -> bool:
    """Whether the node is the pods' gateway; it must be if it is to route for them."""
    is_gateway = top.flag("is_gateway", True)
    if not is_gateway and datapath == "routed":
        top.wrong("is_gateway", False, "true with datapath routed")
    if not is_gateway and top.get("default_route") is True:
        expected = f"false beside {top.at('is_gateway')} false, or a route in ipam.routes instead"
        top.wrong("default_route", True, expected)
    return is_gateway


def _is_url(text: str) -> bool:
    return bool(re.match(r"https?://[^\s/@?#]+(?:/[^\s@]*)?\Z", text))


def _is_domain(text: str) -> bool:
    return len(text) <= 253 and bool(re.match(_DOMAIN, text))


def _check_capabilities(section: _Section) -> None:
    for key in section.values:
        section.flag(key, False)
    section.only(_CAPABILITIES, similar_only=True)


def _check_attachments(top: _Section) -> None:
    for key in ("cni.dev/valid-attachments", "cni.dev/attachments"):
        for path, item in top.items(key, "a list of attachments"):
            if not isinstance(item, Mapping) or not all(
                isinstance(item.get(part), str) for part in ("containerID", "ifname")
            ):
                top.wrong(path, item, "an object with containerID and ifname")


def valid_attachments(network: NetworkConfig) -> frozenset[tuple[str, str]] | None:
    """The (container, interface) pairs that GC must spare; None if the runtime named no list."""
    for key in ("cni.dev/valid-attachments", "cni.dev/attachments"):
        if key in network.raw:
            # libcni has null for an empty list.
            listed = network.raw[key] or ()
            return frozenset((item["containerID"], item["ifname"]) for item in listed)
    return None


def _subnet_settings(top: _Section, env: Mapping[str, str]) -> subnet_env.SubnetEnv:
    """What subnet.env and its variables say, if there is anything left for them to say."""
    path = _subnet_file(top, env)
    if not path:
        return subnet_env.SubnetEnv()
    named = path == (top.get("subnet_file") or env.get("HEADCNI_SUBNET_FILE"))
    wanted = named and not _has_addresses(top) and not env.get("HEADCNI_SUBNET")
    return subnet_env.load(env, path, top.found, wanted)


def _subnet_file(top: _Section, env: Mapping[str, str]) -> str:
    """Where it is; "" if the netconf says all that it could."""
    path = top.path_name("subnet_file", env.get("HEADCNI_SUBNET_FILE") or subnet_env.DEFAULT_FILE)
    others = top.get("mtu"), top.get("cluster_cidr"), top.get("ip_masq") is not None
    return "" if _has_addresses(top) and all(others) else path


def _has_addresses(top: _Section) -> bool:
    return bool(top.get("pod_cidr")) or _has_ranges(top.get("ipam"))


def _has_ranges(section: Any) -> bool:
    return isinstance(section, Mapping) and bool(section.get("subnet") or section.get("ranges"))


def _pod_cidrs(top: _Section, settings: subnet_env.SubnetEnv) -> tuple[Network, ...]:
    """The node's own ranges, as the netconf or else subnet.env has them; only those of use."""
    cidrs = top.networks("pod_cidr")
    if not top.get("pod_cidr") and not _has_ranges(top.get("ipam")):
        cidrs = settings.subnets
    fit: dict[int, Network] = {}
    for cidr in cidrs:
        reason = unfit_for_pods(cidr)
        if reason:
            top.wrong("pod_cidr", str(cidr), f"another range: this one {reason}")
        elif cidr.version in fit:
            top.wrong("pod_cidr", str(cidr), f"one range of a family, beside {fit[cidr.version]}")
        else:
            fit[cidr.version] = cidr
    return tuple(fit.values())


def _ipam(
    top: _Section,
    args: _Section,
    runtime: _Section,
    cni_env: Mapping[str, str],
    pod_cidrs: Sequence[Network],
    delegating: bool,
) -> IpamConfig:
    """The section, with the pod CIDRs for its ranges where it names none."""
    given = top.section("ipam").values
    if top.get("ipam") == {} and not delegating:
        return IpamConfig(type="")  # as bridge has it: a link without addresses
    section = {key: value for key, value in given.items() if not key.startswith("_")}
    kind = section.setdefault("type", "host-local" if delegating else _OWN_IPAM[0])
    if isinstance(kind, str) and kind not in _OWN_IPAM:
        return IpamConfig(type=kind, raw=section)  # another plugin's affair, and its keys are too
    if not _has_ranges(section) and not runtime.values.get("ipRanges"):
        if not pod_cidrs:
            said = any(p.path.startswith(("pod_cidr", "subnet_file")) for p in top.found)
            if not delegating and not said:
                top.wrong("ipam", top.get("ipam"), _EXPECTED_ADDRESSES)
            return IpamConfig(type=str(kind), raw=given)
        section["subnet"] = str(pod_cidrs[0])
        if pod_cidrs[1:]:
            section["ranges"] = [[{"subnet": str(cidr)}] for cidr in pod_cidrs[1:]]
    return parse_ipam(section, "ipam", top.found, runtime.values, cni_env, args.values)


def _check_pod_cidrs(
    top: _Section,
    pod_cidrs: Sequence[Network],
    cluster_cidrs: Sequence[Network],
    service_cidrs: Sequence[Network],
) -> None:
    """Pods and services apart, and the node's pods within the cluster's."""
    for cidr in pod_cidrs:
        clash = _overlap(cidr, service_cidrs)
        if clash is not None:
            top.wrong("pod_cidr", str(cidr), f"a range apart from service_cidr {clash}")
        if not _within(cidr, cluster_cidrs):
            within = _joined(cluster_cidrs)
            top.wrong("pod_cidr", str(cidr), f"a range within cluster_cidr {within}")
    for cidr in cluster_cidrs:
        clash = _overlap(cidr, service_cidrs)
        if clash is not None:
            top.wrong("cluster_cidr", str(cidr), f"a range apart from service_cidr {clash}")


def _check_ranges(
    top: _Section,
    ipam: IpamConfig,
    runtime: _Section,
    pod_cidrs: Sequence[Network],
    service_cidrs: Sequence[Network],
    datapath: str,
) -> None:
    """Each range within the pod CIDR, or by itself fit to be one; its gateway on the pod's link."""
    if ipam.type not in _OWN_IPAM:
        return
    listed = [("ipam", ipam.raw)]
    listed += _listed_ranges("ipam.ranges", ipam.raw.get("ranges"))
    listed += _listed_ranges("runtimeConfig.ipRanges", runtime.values.get("ipRanges"))
    for path, section in listed:
        subnet = _cidr(section.get("subnet"))
        if subnet is None:
            continue
        if pod_cidrs:
            if not _within(subnet, pod_cidrs):
                expected = f"a range within pod_cidr {_joined(pod_cidrs)}"
                top.wrong(f"{path}.subnet", str(subnet), expected)
        elif unfit_for_pods(subnet):
            expected = f"another range: this one {unfit_for_pods(subnet)}"
            top.wrong(f"{path}.subnet", str(subnet), expected)
        else:
            clash = _overlap(subnet, service_cidrs)
            if clash is not None:
                expected = f"a range apart from service_cidr {clash}"
                top.wrong(f"{path}.subnet", str(subnet), expected)
        gateway = parse_address(section.get("gateway"))
        if gateway is not None and not _on_link(gateway, subnet, datapath):
            top.wrong(f"{path}.gateway", str(gateway), f"an address in {subnet}")


def _listed_ranges(path: str, sets: Any) -> list[tuple[str, Mapping[str, Any]]]:
    return [
        (f"{path}[{i}][{j}]", member)
        for i, members in enumerate(sets if isinstance(sets, list) else ())
        for j, member in enumerate(members if isinstance(members, list) else ())
        if isinstance(member, Mapping)
    ]


def _on_link(gateway: Address, subnet: Network, datapath: str) -> bool:
    """Whether a pod of the subnet can have this gateway; one of the other family is not for us."""
    if gateway.version != subnet.version or gateway in subnet:
        return True
    return gateway.is_link_local and (gateway.version == 6 or datapath == "routed")


def _check_delegates_have_addresses(
    top: _Section, delegates: Sequence[Mapping[str, Any]], ipam: IpamConfig
) -> None:
    """A delegate that makes an interface gets its addresses from itself or from us."""
    if ipam.range_sets or ipam.type not in _OWN_IPAM:
        return
    for conf in delegates:
        if subnet_env.takes_addresses(conf) and conf["type"] != TYPE:
            in_chain = top.get("delegate") != conf
            path = f"plugins[{top.get('plugins').index(conf)}]" if in_chain else "delegate"
            expected = f"ranges of its own, or {_EXPECTED_ADDRESSES}"
            top.wrong(f"{path}.ipam", conf.get("ipam"), expected)


def _joined(networks: Iterable[Network]) -> str:
    return ", ".join(map(str, networks))


def _enable_ipv6(
    top: _Section, ipam: IpamConfig, pod_cidrs: Sequence[Network], delegating: bool
) -> bool:
    """As said, or else as the ranges are; to say one and do the other is a mistake."""
    networks = [range_.subnet for ranges in ipam.range_sets for range_ in ranges] or pod_cidrs
    sixes = [network for network in networks if network.version == 6]
    enabled = top.flag("enable_ipv6", bool(sixes))
    known = ipam.type in _OWN_IPAM and bool(networks) and not delegating
    if known and enabled and not sixes:
        top.wrong("enable_ipv6", True, "an IPv6 range in pod_cidr or ipam beside it")
    if known and not enabled and sixes:
        top.wrong("enable_ipv6", False, f"true, as there is an IPv6 range: {_joined(sixes)}")
    return enabled


def _mtu(top: _Section, settings: subnet_env.SubnetEnv, enable_ipv6: bool) -> int:
    low = 1280 if enable_ipv6 else 576
    mtu = top.number("mtu", settings.mtu or 1280, low, 65535)
    if mtu < low:
        top.wrong("mtu", mtu, f"a number from {low} to 65535, as IPv6 needs it")
    return mtu


def _delegate_timeout(top: _Section) -> float:
    value = top.get("delegate_timeout")
    if value is None:
        return NetworkConfig.delegate_timeout
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 3600:
        return float(value)
    top.wrong("delegate_timeout", value, "seconds, more than 0 and at most 3600")
    return NetworkConfig.delegate_timeout


def _delegates(top: _Section) -> tuple[Mapping[str, Any], ...]:
    one, chain = top.get("delegate"), top.get("plugins")
    if one is not None and chain is not None:
        top.wrong("delegate", one, "either delegate or plugins, not both")
    if chain is not None and chain == []:
        top.wrong("plugins", chain, "a list of at least one plugin")
    listed = [("delegate", one)] if one is not None else []
    listed += top.items("plugins", "a list of plugins")
    found = []
    for path, conf in listed:
        if not isinstance(conf, Mapping):
            top.wrong(path, conf, "an object with the type of a plugin")
            continue
        delegate = _Section(conf, path, top.found)
        kind = delegate.text("type", None, lambda v: bool(v) and "/" not in v, _EXPECTED_TYPE)
        if conf.get("name") not in (None, top.get("name")):
            delegate.wrong("name", conf["name"], "no name: a delegate has that of the network")
        _check_capabilities(delegate.section("capabilities"))
        delegate.section("ipam")
        if kind:
            found.append(conf)
    return tuple(found)


def _dns(top: _Section, runtime: _Section) -> Dns:
    """The runtime's word over MagicDNS over the static section, each for what it names."""
    magic, static, given = top.section("magic_dns"), top.section("dns"), runtime.section("dns")
    magic.only(("enable", "base_domain", "nameservers", "search_domains"))
    static.only(("nameservers", "domain", "search", "options"))
    if magic.values and magic.get("enable") is None:
        magic.wrong("enable", None, "true or false")
    domain = magic.text("base_domain", "", _is_domain, "a domain name")
    servers = magic.texts("nameservers", _is_address, "an IP address")
    search = magic.texts("search_domains", _is_domain, "a domain name")
    if not magic.flag("enable", False):
        domain, servers, search = "", (), ()
    elif not (magic.get("base_domain") or magic.get("nameservers") or magic.get("search_domains")):
        magic.wrong("enable", True, "base_domain, nameservers or search_domains beside it")
    fixed = static.texts("nameservers", _is_address, "an IP address")
    fixed_domain = static.text("domain", "", _is_domain, "a domain name")
    fixed_search = static.texts("search", _is_domain, "a domain name")
    options = static.texts("options", _is_word, "a resolver option")
    return Dns(
        nameservers=given.texts("servers", _is_word, "an address") or servers or fixed,
        domain=domain or fixed_domain,
        search=given.texts("searches", _is_word, "a domain") or search or fixed_search,
        options=given.texts("options", _is_word, "a resolver option") or options,
    )


def _is_word(text: str) -> bool:
    """What a runtime hands on from a node's resolv.conf need not please us: "." or fe80::1%eth0."""
    return bool(re.match(r"\S+\Z", text))


def _is_address(text: str) -> bool:
    return parse_address(text) is not None


def _mac(top: _Section, args: _Section, runtime: _Section, cni_env: Mapping[str, str]) -> str:
    """The last word is the runtime's, then args.cni's, then CNI_ARGS's, as with bridge."""
    chosen = ""
    for section, key in (
        (top, "mac"),
        (_Section(cni_env, "CNI_ARGS", top.found), "MAC"),
        (args.section("cni"), "mac"),
        (runtime, "mac"),
    ):
        chosen = section.text(key, "", _is_mac, "the MAC address of one station") or chosen
    digits = re.sub(r"[^0-9a-f]", "", chosen.lower())
    return ":".join(digits[at : at + 2] for at in range(0, 12, 2)) if digits else ""


def _is_mac(text: str) -> bool:
    if not re.match(_MAC, text.lower()):
        return False
    digits = re.sub(r"[^0-9a-f]", "", text.lower())
    return not int(digits[:2], 16) & 1 and digits != "0" * 12


def _port_mappings(runtime: _Section) -> tuple[PortMapping, ...]:
    found: list[PortMapping] = []
    same_number: dict[tuple[int, str], list[tuple[str, PortMapping]]] = {}
    for path, item in runtime.items("portMappings", "a list of port mappings"):
        if not isinstance(item, Mapping):
            runtime.wrong(path, item, "an object with hostPort and containerPort")
            continue
        before = len(runtime.found)
        entry = _Section(item, runtime.at(path), runtime.found)
        for key in ("hostPort", "containerPort"):
            if entry.get(key) is None:
                entry.wrong(key, None, "a number from 1 to 65535")
        mapping = PortMapping(
            host_port=entry.number("hostPort", 0, 1, 65535),
            container_port=entry.number("containerPort", 0, 1, 65535),
            protocol=_protocol(entry),
            host_ip=_host_ip(entry),
        )
        if len(runtime.found) > before:
            continue
        others = same_number.setdefault((mapping.host_port, mapping.protocol), [])
        taken = next((where for where, other in others if _same_port(mapping, other)), "")
        if taken:  # not kept: a list of one port over and over is compared with one entry only
            entry.wrong("hostPort", mapping.host_port, f"a port that {taken} has not taken")
            continue
        others.append((runtime.at(path), mapping))
        found.append(mapping)
    return tuple(found)


def _reserved_ports(top: _Section) -> tuple[PortRange, ...]:
    if top.get("reserved_ports") is None:
        return NetworkConfig.reserved_ports
    found = []
    for path, item in top.items("reserved_ports", "a list of ports"):
        try:
            found.append(port_ranges.parse(item))
        except ValueError as problem:
            top.wrong(path, item, str(problem))
    return tuple(found)


def _protocol(entry: _Section) -> str:
    known = ("tcp", "udp", "sctp")
    value = entry.text("protocol", "tcp", lambda v: v.lower() in known, " or ".join(known))
    return value.lower()


def _host_ip(entry: _Section) -> Address | None:
    text = entry.text("hostIP", "", _is_address, "an IP address")
    return parse_address(text) if text else None


def _same_port(one: PortMapping, other: PortMapping) -> bool:
    """Whether two mappings of one port number and protocol answer on the same address."""
    if one.host_ip is None or other.host_ip is None:
        return True
    if one.host_ip.version != other.host_ip.version:
        return False
    unspecified = one.host_ip.is_unspecified or other.host_ip.is_unspecified
    return unspecified or one.host_ip == other.host_ip


def _bandwidth(runtime: _Section) -> Bandwidth:
    """As the bandwidth plugin has it: a rate wants a burst, and a burst a rate."""
    section = runtime.section("bandwidth")
    section.only(("ingressRate", "ingressBurst", "egressRate", "egressBurst"))
    limits = []
    for way in ("ingress", "egress"):
        rate = section.number(f"{way}Rate", 0, 0, 2**63 - 1)
        burst = section.number(f"{way}Burst", 0, 0, _LARGEST_BURST - 1)
        given = section.get(f"{way}Rate"), section.get(f"{way}Burst")
        if rate and not given[1]:
            section.wrong(f"{way}Burst", given[1], f"bits of burst, as {way}Rate is given")
        if burst and not given[0]:
            section.wrong(f"{way}Rate", given[0], f"bits per second, as {way}Burst is given")
        limits += [rate, burst]
    return Bandwidth(*limits)


def _checked_cni_args(env: Mapping[str, str], found: list[Problem]) -> dict[str, str]:
    text = env.get("CNI_ARGS", "")
    args = {key: value for key, value in split_cni_args(text).items() if key}
    for pair in filter(None, map(str.strip, text.split(";"))):
        if not pair.partition("=")[0].strip() or "=" not in pair:
            found.append(Problem("CNI_ARGS", pair, "pairs KEY=VALUE, separated by semicolons"))
    ignore = args.get("IgnoreUnknown", "").lower()
    if ignore not in ("", "0", "1", "false", "true"):
        found.append(Problem("CNI_ARGS.IgnoreUnknown", ignore, "1 or 0"))
    if ignore not in ("1", "true"):
        _Section(args, "CNI_ARGS", found).only(_CNI_ARGS)
    return args
