"""Checks that the ranges of a configuration fit together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .ipam.config import parse_address
from .model import Address, IpamConfig, Network
from .problems import Section, overlapping, parsed_cidr
from .record import TYPE_CHECKING
from .shared.cidr import unfit_for_pods

if TYPE_CHECKING:
    from typing import Any


def check_pod_cidrs(
    top: Section,
    pod_cidrs: Sequence[Network],
    cluster_cidrs: Sequence[Network],
    service_cidrs: Sequence[Network],
) -> None:
    """The ranges of pods and services must not overlap. The cluster's must contain the node's."""
    for cidr in pod_cidrs:
        clash = overlapping(cidr, service_cidrs)
        if clash is not None:
            top.wrong("pod_cidr", str(cidr), f"a range apart from service_cidr {clash}")
        if not is_within(cidr, cluster_cidrs):
            within = joined(cluster_cidrs)
            top.wrong("pod_cidr", str(cidr), f"a range within cluster_cidr {within}")
    for cidr in cluster_cidrs:
        clash = overlapping(cidr, service_cidrs)
        if clash is not None:
            top.wrong("cluster_cidr", str(cidr), f"a range apart from service_cidr {clash}")


def check_ranges(
    top: Section,
    ipam: IpamConfig,
    runtime: Section,
    pod_cidrs: Sequence[Network],
    service_cidrs: Sequence[Network],
    datapath: str,
) -> None:
    """Each range must be inside the pod CIDR, or else valid as one. Its gateway must be on the
    pod's link."""
    listed = [("ipam", ipam.raw)]
    listed += _listed_ranges("ipam.ranges", ipam.raw.get("ranges"))
    listed += _listed_ranges("runtimeConfig.ipRanges", runtime.values.get("ipRanges"))
    for path, section in listed:
        subnet = parsed_cidr(section.get("subnet"))
        if subnet is None:
            continue
        if pod_cidrs:
            if not is_within(subnet, pod_cidrs):
                expected = f"a range within pod_cidr {joined(pod_cidrs)}"
                top.wrong(f"{path}.subnet", str(subnet), expected)
        elif unfit_for_pods(subnet):
            expected = f"another range: this one {unfit_for_pods(subnet)}"
            top.wrong(f"{path}.subnet", str(subnet), expected)
        else:
            clash = overlapping(subnet, service_cidrs)
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
    """Whether a pod of the subnet can have this gateway. The other family is not checked here."""
    if gateway.version != subnet.version or gateway in subnet:
        return True
    return gateway.is_link_local and (gateway.version == 6 or datapath == "routed")


def joined(networks: Iterable[Network]) -> str:
    return ", ".join(map(str, networks))


def is_within(inner: Network, outers: Iterable[Network]) -> bool:
    """Whether it is inside one of the others. If none has its family, it counts as inside."""
    same = [outer for outer in outers if outer.version == inner.version]
    return not same or any(o.prefixlen <= inner.prefixlen and o.overlaps(inner) for o in same)
