"""What the runtime asks for a pod, in runtimeConfig and CNI_ARGS: host ports, DNS, MAC, bandwidth.

containerd writes HostPort, IngressRate and Servers: its Go structs have no JSON names, and Go
plugins read keys in any case. So this module does, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from .ipam.config import ANNOTATIONS, IP_ANNOTATION, POD_LABELS, parse_address
from .light_json import dumps
from .model import Address, Bandwidth, Dns, PortMapping
from .problems import Problem, Section
from .record import TYPE_CHECKING
from .skel import split_cni_args

if TYPE_CHECKING:
    from typing import Any

# Limits of what is stored of a pod's author's data, because every pass of the daemon reads it.
MOST_ANNOTATIONS = 8 << 10  # characters of all annotations
LARGEST_VALUE = 8 << 10  # characters of a value that we do not read

_LARGEST_BURST = 8 * (2**32 - 1)  # bits; tc counts it in bytes, in 32 bits
_DOMAIN = r"(?i:(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_-]{1,63}\.?)\Z"
_MAC = r"(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\Z|(?:[0-9a-f]{4}\.){2}[0-9a-f]{4}\Z"
_CNI_ARGS = (
    *("IgnoreUnknown", "IP", "MAC", "K8S_POD_NAMESPACE", "K8S_POD_NAME"),
    *("K8S_POD_INFRA_CONTAINER_ID", "K8S_POD_UID", POD_LABELS),
)

_SPELLINGS = {
    "portMappings": ("hostPort", "containerPort", "protocol", "hostIP"),
    "bandwidth": ("ingressRate", "ingressBurst", "egressRate", "egressBurst"),
    "dns": ("servers", "searches", "options"),
    "ipRanges": ("subnet", "rangeStart", "rangeEnd", "gateway"),
}


def as_specified(runtime_config: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with the known keys as the CNI conventions spell them."""
    return {
        name: _respelt(value, {key.lower(): key for key in _SPELLINGS.get(name, ())})
        for name, value in runtime_config.items()
    }


def storable(conf: Mapping[str, Any]) -> dict[str, Any]:
    """A netconf as the store keeps it: without large data that only other plugins could read. The
    runtime keeps that data, too, and hands it to their DEL."""
    kept = dict(conf)
    if "args" in conf and _size(conf["args"]) > LARGEST_VALUE:
        del kept["args"]
    given = conf.get("runtimeConfig")
    if isinstance(given, Mapping):
        kept["runtimeConfig"] = {
            name: _few(value) if name == ANNOTATIONS else value
            for name, value in given.items()
            if name in _SPELLINGS or name == ANNOTATIONS or _size(value) <= LARGEST_VALUE
        }
    return kept


def _few(annotations: Any) -> dict[str, Any]:
    """The annotation that we read, and the smallest of the others."""
    if not isinstance(annotations, Mapping):
        return {}
    sizes = {name: len(name) + _size(value) for name, value in annotations.items()}
    kept, room = set[str](), MOST_ANNOTATIONS
    for name in sorted(sizes, key=lambda name: (name != IP_ANNOTATION, sizes[name])):
        room -= sizes[name]
        if room < 0:
            break
        kept.add(name)
    return {name: value for name, value in annotations.items() if name in kept}


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else len(dumps(value))


def _respelt(value: Any, spellings: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping) and spellings:
        return {spellings.get(str(key).lower(), key): item for key, item in value.items()}
    if isinstance(value, list):
        return [_respelt(item, spellings) for item in value]
    return value


def _is_domain(text: str) -> bool:
    import re  # most calls have no such values

    return len(text) <= 253 and bool(re.match(_DOMAIN, text))


def dns(top: Section, runtime: Section) -> Dns:
    """For each value: the runtime's, or else that of MagicDNS, or else the static section's."""
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
    """Runtimes pass on unusual values of a node's resolv.conf, such as "." or fe80::1%eth0."""
    return text.split() == [text]


def _is_address(text: str) -> bool:
    return parse_address(text) is not None


def mac(top: Section, args: Section, runtime: Section, cni_env: Mapping[str, str]) -> str:
    """As the bridge plugin does: the runtime's value counts first, then args.cni, then CNI_ARGS."""
    chosen = ""
    for section, key in (
        (top, "mac"),
        (Section(cni_env, "CNI_ARGS", top.found), "MAC"),
        (args.section("cni"), "mac"),
        (runtime, "mac"),
    ):
        chosen = section.text(key, "", _is_mac, "the MAC address of one station") or chosen
    digits = _digits(chosen)
    return ":".join(digits[at : at + 2] for at in range(0, 12, 2)) if digits else ""


def _digits(mac: str) -> str:
    return "".join(one for one in mac.lower() if one in "0123456789abcdef")


def _is_mac(text: str) -> bool:
    import re  # most calls have none

    if not re.match(_MAC, text.lower()):
        return False
    digits = _digits(text)
    return not int(digits[:2], 16) & 1 and digits != "0" * 12


def port_mappings(runtime: Section) -> tuple[PortMapping, ...]:
    found: list[PortMapping] = []
    same_number: dict[tuple[int, str], list[tuple[str, PortMapping]]] = {}
    for path, item in runtime.items("portMappings", "a list of port mappings"):
        if not isinstance(item, Mapping):
            runtime.wrong(path, item, "an object with hostPort and containerPort")
            continue
        before = len(runtime.found)
        entry = Section(item, runtime.at(path), runtime.found)
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
        if taken:  # not added, so that many entries with the same port are compared with one
            entry.wrong("hostPort", mapping.host_port, f"a port that {taken} has not taken")
            continue
        others.append((runtime.at(path), mapping))
        found.append(mapping)
    return tuple(found)


def _protocol(entry: Section) -> str:
    known = ("tcp", "udp", "sctp")
    value = entry.text("protocol", "tcp", lambda v: v.lower() in known, " or ".join(known))
    return value.lower()


def _host_ip(entry: Section) -> Address | None:
    text = entry.text("hostIP", "", _is_address, "an IP address")
    return parse_address(text) if text else None


def _same_port(one: PortMapping, other: PortMapping) -> bool:
    """Whether two mappings with the same port and protocol answer on the same address."""
    if one.host_ip is None or other.host_ip is None:
        return True
    if one.host_ip.version != other.host_ip.version:
        return False
    unspecified = one.host_ip.is_unspecified or other.host_ip.is_unspecified
    return unspecified or one.host_ip == other.host_ip


def bandwidth(runtime: Section) -> Bandwidth:
    """As the bandwidth plugin does: a rate needs a burst, and a burst needs a rate."""
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


def checked_cni_args(env: Mapping[str, str], found: list[Problem]) -> dict[str, str]:
    text = env.get("CNI_ARGS", "")
    args = {key: value for key, value in split_cni_args(text).items() if key}
    for pair in filter(None, map(str.strip, text.split(";"))):
        if not pair.partition("=")[0].strip() or "=" not in pair:
            found.append(Problem("CNI_ARGS", pair, "pairs KEY=VALUE, separated by semicolons"))
    ignore = args.get("IgnoreUnknown", "").lower()
    if ignore not in ("", "0", "1", "false", "true"):
        found.append(Problem("CNI_ARGS.IgnoreUnknown", ignore, "1 or 0"))
    if ignore not in ("1", "true"):
        Section(args, "CNI_ARGS", found).only(_CNI_ARGS)
    return args
