"""netconf + environment + subnet.env → one NetworkConfig, or every mistake at once.

A key that is null counts as not given, as in Go. Keys with a dot or a slash belong to others
(cni.dev/…), and keys that start with an underscore are comments: both are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from . import light_json as json
from . import subnet_env
from .errors import INCOMPATIBLE_VERSION, UNDECODABLE, CniError
from .ipam.config import ANNOTATIONS, parse_ipam
from .model import IpamConfig, Network, NetworkConfig, PortRange
from .problems import Problem, Section, error, tolerated, warn
from .range_checks import check_pod_cidrs, check_ranges, joined
from .record import TYPE_CHECKING, NamedTuple
from .runtime_config import (
    as_specified,
    bandwidth,
    checked_cni_args,
    dns,
    mac,
    port_mappings,
)
from .shared.cidr import unfit_for_pods
from .skel import EXPECTED_NAME, VALID_ATTACHMENTS, VERSIONS, is_interface_name, is_name

if TYPE_CHECKING:
    from typing import Any

TYPE = "headcni"

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
# The spelling of other plugins.
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
_OWN_IPAM = ("headcni-ipam", "host-local")
_RESERVED_LINKS = ("lo", "all", "default", "tailscale0", "headcni01")

_WHICH_POD = tuple(
    f"K8S_POD_{what}=" for what in ("NAMESPACE", "NAME", "INFRA_CONTAINER_ID", "UID")
)

KEPT = 64  # parsed configurations; the pods of a node have few different ones
LONGEST_KEPT = 16 << 10  # bytes; a larger one has annotations that no other pod has
_ONCE = frozenset(("prevResult", "cni.dev/valid-attachments"))  # they differ in each call


_EXPECTED_LINK = "an interface name of at most 15 characters that is not the system's"
_EXPECTED_PODS = "namespace/name of pods, where * and ? stand for any characters"
EXPECTED_ADDRESSES = (
    "ipam.subnet or ipam.ranges, or else pod_cidr, HEADCNI_SUBNET or a subnet.env, "
    "to take addresses from"
)


class _Known(NamedTuple):
    network: NetworkConfig
    subnet_file: str  # "" if it was not needed
    seen: tuple[int, ...]


_known: dict[tuple[bytes, bool, tuple[tuple[str, ...], ...]], _Known] = {}


def parse(stdin: bytes, env: Mapping[str, str], forgiving: bool = False) -> NetworkConfig:
    """The netconf on stdin, checked and complete. One CniError names all mistakes.

    ``forgiving`` is for DEL, which must work although the configuration may have become invalid
    since the ADD: invalid values get their defaults.
    """
    asked = (stdin, forgiving, _what_counts(env))
    known = _known.get(asked)
    if known is not None and known.seen == _state_of(known.subnet_file):
        return known.network
    conf, found = decode(stdin)
    refuse_version(conf)
    subnet_file = _subnet_file(_top(conf, []), env)
    seen = _state_of(subnet_file)  # before reading it: a change meanwhile must not stay unnoticed
    network = complete(conf, env, found)
    if forgiving:
        found = [problem for problem in found if problem.path == "name"]
    else:
        found = tolerated(found)
    if found:
        raise error(found)
    for doubt in () if forgiving else doubts_of(network):
        warn(doubt)
    if len(stdin) <= LONGEST_KEPT and not _ONCE.intersection(conf):
        if len(_known) >= KEPT:
            _known.clear()
        _known[asked] = _Known(network, subnet_file, seen)
    return network


def _state_of(path: str) -> tuple[int, ...]:
    """Values that differ if the file was replaced or changed; empty if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _what_counts(env: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """The variables that a NetworkConfig depends on. It does not depend on the pod's name, which is
    often the only difference between two calls of a runtime."""
    pairs = env.get("CNI_ARGS", "").split(";")
    return (
        tuple(pair for pair in pairs if not pair.startswith(_WHICH_POD)),
        *(item for item in env.items() if item[0].startswith("HEADCNI_")),
    )


def doubts_of(network: NetworkConfig) -> Iterator[str]:
    if network.ip_masq and network.ipam.type and not (network.cluster_cidrs or network.delegates):
        yield (
            "cluster_cidr is not known, neither here nor from subnet.env: pods of other nodes see"
            " the node's address in place of the pod's; set cluster_cidr to the cluster's range"
        )


def decode(stdin: bytes) -> tuple[dict[str, Any], list[Problem]]:
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


def refuse_version(conf: Mapping[str, Any]) -> None:
    version = conf.get("cniVersion")
    if version not in VERSIONS:
        shown = "none" if version is None else json.dumps(version)
        raise CniError(
            INCOMPATIBLE_VERSION,
            "incompatible CNI versions",
            f"cniVersion is {shown}; HeadCNI speaks {', '.join(VERSIONS)}",
        )


def _top(conf: Mapping[str, Any], found: list[Problem]) -> Section:
    missing = {key: alias for key, alias in _ALIASES.items() if conf.get(key) is None}
    return Section(conf, "", found, {k: alias for k, alias in missing.items() if alias in conf})


def complete(
    conf: Mapping[str, Any], env: Mapping[str, str], found: list[Problem]
) -> NetworkConfig:
    """The configuration. Mistakes are added to `found`, and such values get their defaults."""
    if isinstance(conf.get("runtimeConfig"), Mapping):
        conf = {**conf, "runtimeConfig": as_specified(conf["runtimeConfig"])}
    top = _top(conf, found)
    for key, alias in _ALIASES.items():
        if conf.get(key) is not None and conf.get(alias) not in (None, conf[key]):
            top.wrong(alias, conf[alias], f"the same as {key}, which is {json.dumps(conf[key])}")
    top.only((*_KEYS, *_ALIASES.values()))
    name = top.text("name", None, is_name, EXPECTED_NAME)
    top.text("type", None, lambda v: v == TYPE, TYPE)
    for key in ("disableCheck", "disableGC"):
        top.flag(key, False)
    _check_attachments(top)
    check_capabilities(top.section("capabilities"))
    args, cni_env = top.section("args"), checked_cni_args(env, found)
    runtime = top.section("runtimeConfig")

    delegates = _delegates(top)
    settings = _subnet_settings(top, env)
    pod_cidrs = _pod_cidrs(top, settings)
    ipam = _ipam(top, args, runtime, cni_env, pod_cidrs, bool(delegates))
    datapath = top.choice("datapath", "bridge", "routed")
    service_cidrs = top.networks("service_cidr")
    cluster_cidrs = top.networks("cluster_cidr")
    check_pod_cidrs(top, pod_cidrs, cluster_cidrs, service_cidrs)
    if ipam.type in _OWN_IPAM:
        check_ranges(top, ipam, runtime, pod_cidrs, service_cidrs, datapath)
    if delegates and not ipam.range_sets and ipam.type in _OWN_IPAM:
        from .delegates import check_addresses

        check_addresses(top, delegates)
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
        dns=dns(top, runtime),
        mac=mac(top, args, runtime, cni_env),
        port_mappings=port_mappings(runtime),
        reserved_ports=_reserved_ports(top),
        host_ports_over_listeners=top.flag("host_ports_over_listeners", False),
        bandwidth=bandwidth(runtime),
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


def _is_gateway(top: Section, datapath: str) -> bool:
    """Whether the node is the pods' gateway, which it must be to route for them."""
    is_gateway = top.flag("is_gateway", True)
    if not is_gateway and datapath == "routed":
        top.wrong("is_gateway", False, "true with datapath routed")
    if not is_gateway and top.get("default_route") is True:
        expected = f"false beside {top.at('is_gateway')} false, or a route in ipam.routes instead"
        top.wrong("default_route", True, expected)
    return is_gateway


def _is_url(text: str) -> bool:
    import re  # few configurations have it

    return bool(re.match(r"https?://[^\s/@?#]+(?:/[^\s@]*)?\Z", text))


def check_capabilities(section: Section) -> None:
    for key in section.values:
        section.flag(key, False)
    section.only(_CAPABILITIES, similar_only=True)


def _delegates(top: Section) -> tuple[Mapping[str, Any], ...]:
    if top.get("delegate") is None and top.get("plugins") is None:
        return ()
    from .delegates import read  # few networks have delegates

    return read(top)


def _delegate_timeout(top: Section) -> float:
    value = top.get("delegate_timeout")
    if value is None:
        return NetworkConfig.delegate_timeout
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 3600:
        return float(value)
    top.wrong("delegate_timeout", value, "seconds, more than 0 and at most 3600")
    return NetworkConfig.delegate_timeout


def _check_attachments(top: Section) -> None:
    for key in VALID_ATTACHMENTS:
        for path, item in top.items(key, "a list of attachments"):
            if not isinstance(item, Mapping) or not all(
                isinstance(item.get(part), str) for part in ("containerID", "ifname")
            ):
                top.wrong(path, item, "an object with containerID and ifname")


def _subnet_settings(top: Section, env: Mapping[str, str]) -> subnet_env.SubnetEnv:
    """The values of subnet.env and its variables, if the netconf leaves any value open."""
    path = _subnet_file(top, env)
    if not path:
        return subnet_env.SubnetEnv()
    named = path == (top.get("subnet_file") or env.get("HEADCNI_SUBNET_FILE"))
    wanted = named and not _has_addresses(top) and not env.get("HEADCNI_SUBNET")
    return subnet_env.load(env, path, top.found, wanted)


def _subnet_file(top: Section, env: Mapping[str, str]) -> str:
    """Its path; "" if the netconf has all values that it could have."""
    path = top.path_name("subnet_file", env.get("HEADCNI_SUBNET_FILE") or subnet_env.DEFAULT_FILE)
    others = top.get("mtu"), top.get("cluster_cidr"), top.get("ip_masq") is not None
    return "" if _has_addresses(top) and all(others) else path


def _has_addresses(top: Section) -> bool:
    return bool(top.get("pod_cidr")) or _has_ranges(top.get("ipam"))


def _has_ranges(section: Any) -> bool:
    return isinstance(section, Mapping) and bool(section.get("subnet") or section.get("ranges"))


def _pod_cidrs(top: Section, settings: subnet_env.SubnetEnv) -> tuple[Network, ...]:
    """The node's own ranges, from the netconf or else from subnet.env, without invalid ones."""
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
    top: Section,
    args: Section,
    runtime: Section,
    cni_env: Mapping[str, str],
    pod_cidrs: Sequence[Network],
    delegating: bool,
) -> IpamConfig:
    """The section. If it has no ranges, the pod CIDRs are its ranges."""
    given = top.section("ipam").values
    if top.get("ipam") == {} and not delegating:
        return IpamConfig(type="")  # as with the bridge plugin: a link without addresses
    section = {key: value for key, value in given.items() if not key.startswith("_")}
    kind = section.setdefault("type", "host-local" if delegating else _OWN_IPAM[0])
    if isinstance(kind, str) and kind not in _OWN_IPAM:
        return IpamConfig(type=kind, raw=section)  # another plugin reads its keys
    if not _has_ranges(section) and not runtime.values.get("ipRanges"):
        if not pod_cidrs:
            said = any(p.path.startswith(("pod_cidr", "subnet_file")) for p in top.found)
            if not delegating and not said:
                top.wrong("ipam", top.get("ipam"), EXPECTED_ADDRESSES)
            return IpamConfig(type=str(kind), raw=given)
        section["subnet"] = str(pod_cidrs[0])
        if pod_cidrs[1:]:
            section["ranges"] = [[{"subnet": str(cidr)}] for cidr in pod_cidrs[1:]]
    return parse_ipam(section, "ipam", top.found, runtime.values, cni_env, args.values)


def _enable_ipv6(
    top: Section, ipam: IpamConfig, pod_cidrs: Sequence[Network], delegating: bool
) -> bool:
    """The value of enable_ipv6, or else whether there are IPv6 ranges. Both must agree."""
    networks = [range_.subnet for ranges in ipam.range_sets for range_ in ranges] or pod_cidrs
    sixes = [network for network in networks if network.version == 6]
    enabled = top.flag("enable_ipv6", bool(sixes))
    known = ipam.type in _OWN_IPAM and bool(networks) and not delegating
    if known and enabled and not sixes:
        top.wrong("enable_ipv6", True, "an IPv6 range in pod_cidr or ipam beside it")
    if known and not enabled and sixes:
        top.wrong("enable_ipv6", False, f"true, as there is an IPv6 range: {joined(sixes)}")
    return enabled


def _mtu(top: Section, settings: subnet_env.SubnetEnv, enable_ipv6: bool) -> int:
    low = 1280 if enable_ipv6 else 576
    mtu = top.number("mtu", settings.mtu or 1280, low, 65535)
    if mtu < low:
        top.wrong("mtu", mtu, f"a number from {low} to 65535, as IPv6 needs it")
    return mtu


def _reserved_ports(top: Section) -> tuple[PortRange, ...]:
    if top.get("reserved_ports") is None:
        return NetworkConfig.reserved_ports
    from . import port_ranges  # rarely given

    found = []
    for path, item in top.items("reserved_ports", "a list of ports"):
        try:
            found.append(port_ranges.parse(item))
        except ValueError as problem:
            top.wrong(path, item, str(problem))
    return tuple(found)
