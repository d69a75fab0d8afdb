"""Reads the `ipam` section: host-local's keys and ours. All mistakes are reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv6Address, ip_address, ip_network
from itertools import combinations

from ..errors import INVALID_CONFIG, CniError
from ..model import Address, IpamConfig, Network, Range, Route
from ..problems import Problem, unknown_keys
from ..record import TYPE_CHECKING
from .pool import STRATEGIES, gateways, reserved, size, usable

if TYPE_CHECKING:
    from typing import Any

TYPE = "headcni-ipam"
RANGE_KEYS = ("subnet", "rangeStart", "rangeEnd", "gateway", "exclude")
KEYS = (
    *("type", *RANGE_KEYS, "ranges", "routes", "resolvConf", "dataDir"),
    *("strategy", "importHostLocal", "annotationNamespaces"),
)
ROUTE_KEYS = ("dst", "gw", "mtu", "advmss", "priority", "table", "scope")
# The key of the pod's annotations in containerd and CRI-O, and the one that requests addresses.
ANNOTATIONS = "io.kubernetes.cri.pod-annotations"
IP_ANNOTATION = "headcni.dev/ip"
POD_LABELS = "HEADCNI_POD_LABELS"  # in CNI_ARGS

# Limits for data of the author of a pod, or of a network that pods can use.
MOST_REQUESTED = 16  # addresses, from each source
LONGEST_REQUEST = 1024  # characters
MOST_RANGES = 64


Span = tuple[Address, Address]
_LIST = (list, tuple)


def parse_ipam(
    section: Mapping[str, Any],
    path: str,
    problems: list[Problem],
    runtime_config: Mapping[str, Any] | None = None,
    cni_args: Mapping[str, str] | None = None,
    args: Mapping[str, Any] | None = None,
) -> IpamConfig:
    """The section as a value. Mistakes are added to `problems`, and their values are left out.

    `runtime_config` and `args` are keys of the netconf. `cni_args` is CNI_ARGS as a mapping.
    """
    runtime_config = runtime_config or {}
    if not isinstance(section, Mapping):
        problems.append(Problem(path, section, "an object"))
        return IpamConfig(type=TYPE)
    unknown_keys(section, KEYS, path, problems)
    exclude = _exclude(section.get("exclude"), f"{path}.exclude", problems)
    _paths(section, path, problems)
    return IpamConfig(
        type=_type(section.get("type"), f"{path}.type", problems),
        range_sets=_range_sets(section, path, runtime_config, exclude, problems),
        strategy=_strategy(section.get("strategy"), f"{path}.strategy", problems),
        routes=_routes(section.get("routes"), f"{path}.routes", problems),
        requested=_requested(runtime_config, cni_args or {}, args or {}, problems),
        annotated=_is_annotated(runtime_config.get(ANNOTATIONS)),
        annotation_namespaces=_patterns(
            section.get("annotationNamespaces"), f"{path}.annotationNamespaces", problems
        ),
        raw=section,
    )


def ensure_may_ask(config: IpamConfig, namespace: str) -> None:
    """CniError if the pod has the annotation, but its namespace may not use it. `parse_ipam` cannot
    check this, because many pods use the same parsed configuration."""
    if not config.annotated:
        return
    from fnmatch import fnmatchcase  # rarely needed

    if not any(fnmatchcase(namespace, pattern) for pattern in config.annotation_namespaces):
        raise CniError(
            INVALID_CONFIG,
            f"pods of the namespace {namespace!r} may not ask for an address by the annotation"
            f" {IP_ANNOTATION}",
            "take the annotation away, or have the node's operator add the namespace to"
            " ipam.annotationNamespaces (headcni_node_ip_annotation_namespaces)",
        )


def parse_address(value: object) -> Address | None:
    """An address of a configuration. ::ffff:10.1.2.3 means 10.1.2.3."""
    if not isinstance(value, str) or "%" in value:
        return None
    try:
        address = ip_address(value.strip())
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _type(value: object, path: str, problems: list[Problem]) -> str:
    if value is None:
        return TYPE
    if not isinstance(value, str) or not value:
        problems.append(Problem(path, value, f"the name of an IPAM plugin, such as {TYPE}"))
        return TYPE
    return value


def _strategy(value: object, path: str, problems: list[Problem]) -> str:
    if value is None:
        return "sequential"
    if not isinstance(value, str) or value not in STRATEGIES:
        problems.append(Problem(path, value, f"one of {', '.join(STRATEGIES)}"))
        return "sequential"
    return value


def _paths(section: Mapping[str, Any], path: str, problems: list[Problem]) -> None:
    for key in ("resolvConf", "dataDir"):
        value = section.get(key)
        # For host-local, "" means "not set".
        if value not in (None, "") and not _absolute(value):
            problems.append(Problem(f"{path}.{key}", value, "an absolute path"))
    value = section.get("importHostLocal")
    if value is not None and not isinstance(value, bool) and not _absolute(value):
        problems.append(
            Problem(f"{path}.importHostLocal", value, "true, false or a directory's absolute path")
        )


def _absolute(value: object) -> bool:
    return isinstance(value, str) and value.startswith("/")


def _range_sets(
    section: Mapping[str, Any],
    path: str,
    runtime_config: Mapping[str, Any],
    exclude: Sequence[Span],
    problems: list[Problem],
) -> tuple[tuple[Range, ...], ...]:
    """In the order of host-local: the runtime's, then `subnet`, then `ranges`."""
    before = len(problems)
    path_of_theirs, theirs = "runtimeConfig.ipRanges", runtime_config.get("ipRanges")
    if _count_ranges(theirs) > MOST_RANGES:
        problems.append(Problem(path_of_theirs, theirs, f"at most {MOST_RANGES} ranges"))
        theirs = None
    found = _sets_of(theirs, path_of_theirs, exclude, problems)
    if section.get("subnet") is not None:
        alone = {key: section.get(key) for key in RANGE_KEYS if key != "exclude"}
        range_ = _range(alone, path, exclude, problems)
        found += [(path, (range_,))] if range_ else []
    else:
        for key in ("rangeStart", "rangeEnd", "gateway"):
            if section.get(key) is not None:
                problems.append(Problem(f"{path}.{key}", section[key], f"{path}.subnet beside it"))
    found += _sets_of(section.get("ranges"), f"{path}.ranges", exclude, problems)
    if not found and len(problems) == before:
        problems.append(Problem(f"{path}.subnet", None, "a subnet to allocate from, or ranges"))
    _check_apart(found, problems)
    sets = tuple(ranges for _unused, ranges in found)
    every_gateway = gateways(sets)
    for where, ranges in found:
        if size(span for range_ in ranges for span in usable(range_, every_gateway)) == 0:
            spans = ", ".join(f"{range_.start}-{range_.end}" for range_ in ranges)
            problems.append(
                Problem(where, spans, "at least one address besides the gateway and exclusions")
            )
    return sets


def _count_ranges(sets: object) -> int:
    listed = sets if isinstance(sets, _LIST) else ()
    return sum(len(one) if isinstance(one, _LIST) else 1 for one in listed)


def _sets_of(
    value: object, path: str, exclude: Sequence[Span], problems: list[Problem]
) -> list[tuple[str, tuple[Range, ...]]]:
    """Range sets with their paths: a list of lists of ranges."""
    if value is None:
        return []
    if not isinstance(value, _LIST):
        problems.append(Problem(path, value, "a list of range sets, each a list of ranges"))
        return []
    found = []
    for index, members in enumerate(value):
        where = f"{path}[{index}]"
        if not isinstance(members, _LIST) or not members:
            problems.append(Problem(where, members, 'a list of ranges: [{"subnet": …}]'))
            continue
        ranges = [
            _range(member, f"{where}[{place}]", exclude, problems)
            for place, member in enumerate(members)
        ]
        if all(ranges):
            found.append((where, tuple(range_ for range_ in ranges if range_)))
    return found


def _range(
    section: object, path: str, exclude: Sequence[Span], problems: list[Problem]
) -> Range | None:
    if not isinstance(section, Mapping):
        problems.append(Problem(path, section, 'a range: {"subnet": …}'))
        return None
    if section.get("subnet") is None:
        problems.append(Problem(f"{path}.subnet", None, "the subnet of the range, such as a CIDR"))
        return None
    unknown_keys(section, RANGE_KEYS, path, problems)
    own = _exclude(section.get("exclude"), f"{path}.exclude", problems)
    subnet = _subnet(section["subnet"], f"{path}.subnet", problems)
    if subnet is None:
        return None
    before = len(problems)
    first, last = _ends(subnet)
    start = _inside(section, "rangeStart", path, subnet, problems) or first
    end = _inside(section, "rangeEnd", path, subnet, problems) or last
    gateway = _gateway(section.get("gateway"), f"{path}.gateway", subnet, problems)
    if int(start) > int(end):
        problems.append(Problem(f"{path}.rangeStart", str(start), f"an address up to {end}"))
    if len(problems) > before:
        return None
    hits = [
        span
        for span in (*exclude, *own)
        if span[0].version == subnet.version
        and int(span[0]) <= int(end)
        and int(span[1]) >= int(start)
    ]
    return Range(subnet, start, end, gateway, tuple(sorted(set(hits), key=_span_key)))


def _ends(subnet: Network) -> Span:
    """host-local's defaults: from the first host address to the last, without the broadcast."""
    first, last = int(subnet.network_address), int(subnet.broadcast_address)
    kept_out = {int(address) for address in reserved(subnet)}
    kind = type(subnet.network_address)
    return kind(first + (first in kept_out)), kind(last - (last in kept_out))


def _gateway(value: object, path: str, subnet: Network, problems: list[Problem]) -> Address | None:
    """The given one, which may be outside of the subnet, as fe80::1 is. Else the subnet's first
    host address. A subnet of one address has no gateway.
    """
    if value is None or value == "":
        return None if subnet.num_addresses == 1 else _ends(subnet)[0]
    gateway = parse_address(value)
    if gateway is None or gateway.version != subnet.version:
        problems.append(Problem(path, value, f"an IPv{subnet.version} address"))
        return None
    return gateway


def _subnet(value: object, path: str, problems: list[Problem]) -> Network | None:
    subnet = _cidr(value)
    if subnet is None:
        problems.append(Problem(path, value, "a subnet in CIDR form, such as 10.244.1.0/24"))
    elif subnet.network_address != parse_address(str(value).partition("/")[0]):
        problems.append(Problem(path, value, f"the network address itself: {subnet}"))
        return None
    return subnet


def _cidr(value: object) -> Network | None:
    """A network. The address may have bits outside of the prefix."""
    if not isinstance(value, str) or "/" not in value:
        return None
    try:
        return ip_network(value.strip(), strict=False)
    except ValueError:
        return None


def _inside(
    section: Mapping[str, Any], key: str, path: str, subnet: Network, problems: list[Problem]
) -> Address | None:
    value = section.get(key)
    if value is None or value == "":
        return None
    address = parse_address(value)
    if address is None or address not in subnet:
        problems.append(Problem(f"{path}.{key}", value, f"an address in {subnet}"))
        return None
    return address


def _check_apart(found: Sequence[tuple[str, tuple[Range, ...]]], problems: list[Problem]) -> None:
    """The ranges of a set must have the same family, and no address may be in two ranges."""
    for where, ranges in found:
        if len({range_.subnet.version for range_ in ranges}) > 1:
            problems.append(
                Problem(where, [str(r.subnet) for r in ranges], "ranges of one address family")
            )
    placed = [
        (where if len(ranges) == 1 else f"{where}[{place}]", range_)
        for where, ranges in found
        for place, range_ in enumerate(ranges)
    ]
    for (first_path, first), (path, range_) in combinations(placed, 2):
        if (
            first.subnet.version == range_.subnet.version
            and int(first.start) <= int(range_.end)
            and int(range_.start) <= int(first.end)
        ):
            problems.append(
                Problem(
                    path,
                    f"{range_.start}-{range_.end}",
                    f"a range apart from {first_path} ({first.start}-{first.end})",
                )
            )


def _exclude(value: object, path: str, problems: list[Problem]) -> list[Span]:
    if value is None:
        return []
    if not isinstance(value, _LIST):
        problems.append(Problem(path, value, "a list of addresses, CIDRs or ranges a-b"))
        return []
    found = []
    for index, item in enumerate(value):
        span = _span(item)
        if span is None:
            problems.append(Problem(f"{path}[{index}]", item, "an address, a CIDR or a range a-b"))
        else:
            found.append(span)
    return found


def _span(value: object) -> Span | None:
    if not isinstance(value, str):
        return None
    if "/" in value:
        block = _cidr(value)
        # 10.9.0.0/8 is probably a mistake, and would exclude all of 10.0.0.0/8.
        if block is None or block.network_address != parse_address(value.split("/")[0]):
            return None
        return block.network_address, block.broadcast_address
    first_text, dash, last_text = value.partition("-")
    first = parse_address(first_text)
    last = parse_address(last_text) if dash else first
    if first is None or last is None or first.version != last.version or int(first) > int(last):
        return None
    return first, last


def _span_key(span: Span) -> tuple[int, int]:
    return int(span[0]), int(span[1])


def _routes(value: object, path: str, problems: list[Problem]) -> tuple[Route, ...]:
    if value is None:
        return ()
    if not isinstance(value, _LIST):
        problems.append(Problem(path, value, 'a list of routes: [{"dst": "0.0.0.0/0"}]'))
        return ()
    routes = [_route(item, f"{path}[{index}]", problems) for index, item in enumerate(value)]
    return tuple(route for route in routes if route is not None)


def _route(item: object, path: str, problems: list[Problem]) -> Route | None:
    if not isinstance(item, Mapping):
        problems.append(Problem(path, item, 'a route: {"dst": "0.0.0.0/0"}'))
        return None
    unknown_keys(item, ROUTE_KEYS, path, problems)
    dst = _cidr(item.get("dst"))
    if dst is None:
        problems.append(Problem(f"{path}.dst", item.get("dst"), "a destination in CIDR form"))
        return None
    gateway = None
    if item.get("gw") not in (None, ""):
        gateway = parse_address(item["gw"])
        if gateway is None or gateway.version != dst.version:
            problems.append(Problem(f"{path}.gw", item["gw"], f"an IPv{dst.version} address"))
    numbers: dict[str, int | None] = {}
    for key in ROUTE_KEYS[2:]:
        number, most = item.get(key), 255 if key == "scope" else 2**32 - 1
        if number is not None and (
            isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= most
        ):
            problems.append(Problem(f"{path}.{key}", number, f"a number from 0 to {most}"))
            number = None
        numbers[key] = number
    return Route(dst, gateway, **numbers)


def _requested(
    runtime_config: Mapping[str, Any],
    cni_args: Mapping[str, str],
    args: Mapping[str, Any],
    problems: list[Problem],
) -> tuple[Address, ...]:
    """The requested addresses: from CNI_ARGS, args.cni.ips and runtimeConfig.ips, as host-local
    reads them, and from the pod's annotation."""
    cni = args.get("cni")
    asked: list[tuple[str, object]] = []
    asked += _separated(cni_args.get("IP"), "CNI_ARGS.IP", problems)
    ips = cni.get("ips") if isinstance(cni, Mapping) else None
    asked += _listed(ips, "args.cni.ips", problems)
    asked += _listed(runtime_config.get("ips"), "runtimeConfig.ips", problems)
    asked += _annotated(runtime_config.get(ANNOTATIONS), problems)
    found = []
    for path, value in asked:
        address = parse_address(value.split("/")[0] if isinstance(value, str) else value)
        if address is None:
            problems.append(Problem(path, value, "an address, with or without a prefix length"))
        else:
            found.append(address)
    return tuple(dict.fromkeys(found))


def _annotated(annotations: object, problems: list[Problem]) -> Iterable[tuple[str, object]]:
    """An address, or two with a comma. The pod's author reads the messages about mistakes."""
    if annotations is None:
        return []
    if not isinstance(annotations, Mapping):
        problems.append(Problem(f"runtimeConfig.{ANNOTATIONS}", annotations, "an object"))
        return []
    return _separated(annotations.get(IP_ANNOTATION), f"annotation {IP_ANNOTATION}", problems)


def _is_annotated(annotations: object) -> bool:
    return isinstance(annotations, Mapping) and annotations.get(IP_ANNOTATION) not in (None, "")


def _patterns(value: object, path: str, problems: list[Problem]) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, _LIST) and all(isinstance(one, str) and one for one in value):
        return tuple(value)
    problems.append(Problem(path, value, "a list of namespaces, where * and ? stand for any"))
    return ()


def _separated(value: object, path: str, problems: list[Problem]) -> list[tuple[str, object]]:
    """Addresses, separated by commas."""
    if value in (None, ""):
        return []
    if not isinstance(value, str):
        return [(path, value)]
    if len(value) > LONGEST_REQUEST or value.count(",") >= MOST_REQUESTED:
        problems.append(Problem(path, value, f"at most {MOST_REQUESTED} addresses"))
        return []
    return [(path, part) for part in value.split(",")]


def _listed(value: object, path: str, problems: list[Problem]) -> list[tuple[str, object]]:
    if value is None:
        return []
    if not isinstance(value, _LIST):
        return [(path, value)]
    if len(value) > MOST_REQUESTED:
        problems.append(Problem(path, value, f"at most {MOST_REQUESTED} addresses"))
        return []
    return [(f"{path}[{index}]", item) for index, item in enumerate(value)]
