"""CHECK: compares the pod's network with what ADD set up.

The kernel is read with pyroute2, which shares no code with what wrote it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from ipaddress import ip_address, ip_interface, ip_network
from typing import TYPE_CHECKING, Any, Optional

from pyroute2 import IPRoute

from ... import comparison, repair, result
from ...address_sources import source_of
from ...datapath import firewall, guard, link, netns
from ...datapath.interfaces import Link
from ...datapath.rtnl import IFF_PROMISC, IFF_UP, INGRESS_HANDLE, REDIRECT, RT_TABLE_MAIN
from ...errors import CHECK_FAILED, UNKNOWN_CONTAINER, CniError
from ...model import Address, NetworkConfig, Owner, Route
from ...policy import admission
from ...skel import Call
from ...store import Attachment

if TYPE_CHECKING:
    from .node import Node


def check(node: Node, network: NetworkConfig, call: Call) -> None:
    if network.raw.get("disableCheck") is True:
        return
    owner = call.owner(network.name)
    if network.delegates:
        from ... import chain  # few networks have delegates

        chain.check(network, call.env, owner, node.store)
        return
    found = differences(node, network, owner, call)
    source_of(network).check(call.env)
    if found:
        raise CniError(
            CHECK_FAILED,
            f"the pod's network differs from what was set up, in {len(found)} "
            + ("place" if len(found) == 1 else "places"),
            "; ".join(found),
        )


def differences(node: Node, network: NetworkConfig, owner: Owner, call: Call) -> list[str]:
    """Each difference in words. For a container that was never added, there is an error code."""
    known = node.store.attachment(owner)
    if known is None:
        raise CniError(
            UNKNOWN_CONTAINER,
            f"container {owner.container_id} has no {owner.ifname} on network {owner.network}",
            "ADD it first; a reboot or a DEL ends an attachment",
        )
    found = list(_result(known, network))
    network = _as_added(known, network, call)
    found += comparison.lease(node.ipam, network, known)
    with IPRoute() as kernel:
        reader = Reader(kernel)
        found += [*comparison.host(reader, network, known), *_host(reader, network, known)]
    try:
        with netns.opened(call.netns, call.netns_fd) as fd, netns.entered(fd), IPRoute() as kernel:
            reader = Reader(kernel)
            found += [*comparison.pod(reader, known), *_pod(reader, network, known)]
    except CniError as problem:
        found.append(f"network namespace: {problem}")
    station = guard.station_of_attachment(known)
    if station is not None:
        found += filter(None, [guard.difference(node.kernel, station)])
    found += admission.differences(node.kernel, known)
    if known.result.get("ips") and firewall.concerns(node.store, network):
        found += firewall.differences(node.store, owner, shared=True)
    return found


class Reader:
    """Reads a network namespace with pyroute2."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def named(self, name: str) -> Any:
        """All that the kernel says of a link, or None."""
        links = self.kernel.get_links()
        return next((one for one in links if one.get("IFLA_IFNAME") == name), None)

    def link(self, name: str) -> Optional[Link]:
        one = self.named(name)
        if one is None:
            return None
        up = bool(one["flags"] & IFF_UP)
        return Link(one["index"], up, one.get("IFLA_MASTER") or 0)

    def addresses(self, index: int) -> set[str]:
        listed = self.kernel.get_addr(index=index)
        return {f"{one.get('IFA_ADDRESS')}/{one['prefixlen']}" for one in listed}

    def has_route(self, address: Address, index: int) -> bool:
        return any(route.dst == ip_network(address) for route in self.routes(index))

    def routes(self, index: int, table: int = RT_TABLE_MAIN) -> list[Route]:
        found = []
        for family, bits in ((socket.AF_INET, 32), (socket.AF_INET6, 128)):
            for one in self.kernel.get_routes(family=family, table=table, oif=index):
                anywhere = ip_address(bytes(bits // 8))
                dst = ip_network(f"{one.get('RTA_DST') or anywhere}/{one['dst_len']}")
                gateway = one.get("RTA_GATEWAY")
                found.append(Route(dst, ip_interface(gateway).ip if gateway else None))
        return found


def _as_added(known: Attachment, network: NetworkConfig, call: Call) -> NetworkConfig:
    """The configuration of this pod: it may have changed for later pods."""
    try:
        return repair.network_of(known, call.env)
    except CniError:
        return network  # the store was damaged


def _result(known: Attachment, network: NetworkConfig) -> Iterator[str]:
    """The result that the runtime remembers must be the one that we remember."""
    if network.prev_result is None:
        yield "prevResult: missing from the configuration, as CHECK must have it"
        return
    given = result.read(network.prev_result, network.cni_version)
    for key in ("ips", "routes"):
        ours = result.read(result.shape(known.result, network.cni_version), network.cni_version)
        missing = [item for item in ours.get(key, ()) if item not in given.get(key, ())]
        if missing:
            yield f"prevResult.{key}: lacks {missing}"


def _host(reader: Reader, network: NetworkConfig, known: Attachment) -> Iterator[str]:
    end = reader.named(known.host_ifname)
    if end is None:
        return
    yield from _mtu("host side", end, known.host_ifname, network.mtu)
    yield from _bucket(reader, end["index"], network.bandwidth.ingress_rate, "ingress")
    if comparison.has_limiter(known):
        yield from _limiter(reader, end["index"], known, network.bandwidth.egress_rate)
    bridge = reader.named(network.bridge) if network.datapath != "routed" else None
    if bridge is not None and bridge["flags"] & IFF_PROMISC:
        yield f"host side: bridge {network.bridge} is promiscuous"


def _pod(reader: Reader, network: NetworkConfig, known: Attachment) -> Iterator[str]:
    name = known.owner.ifname
    end = reader.named(name)
    if end is None:
        return
    if not end["flags"] & IFF_UP:
        yield f"pod: {name} is down"
    yield from _mtu("pod", end, name, network.mtu)
    mac = next((i.get("mac") for i in known.result.get("interfaces", ()) if i.get("sandbox")), None)
    if mac and end.get("IFLA_ADDRESS") != mac:
        yield f"pod: {name} has MAC {end.get('IFLA_ADDRESS')}, expected {mac}"
    for route in known.result.get("routes", ()):
        table = route.get("table") or RT_TABLE_MAIN
        if not any(_same(route, other) for other in reader.routes(end["index"], table)):
            via = f" via {route['gw']}" if "gw" in route else ""
            within = f" in table {table}" if table != RT_TABLE_MAIN else ""
            yield f"pod: no route {route['dst']}{via}{within}"
    if not comparison.has_limiter(known):
        yield from _bucket(reader, end["index"], network.bandwidth.egress_rate, "egress")


def _mtu(side: str, end: Any, name: str, mtu: int) -> Iterator[str]:
    if end.get("IFLA_MTU") != mtu:
        yield f"{side}: {name} has MTU {end.get('IFLA_MTU')}, expected {mtu}"


def _limiter(reader: Reader, host: int, known: Attachment, rate: int) -> Iterator[str]:
    name = link.limiter_of(known.host_ifname)
    ifb = reader.named(name)
    if ifb is None:
        return
    if not ifb["flags"] & IFF_UP:
        yield f"egress: {name} is down"
    yield from _bucket(reader, ifb["index"], rate, "egress")
    filters = reader.kernel.get_filters(index=host, parent=INGRESS_HANDLE)
    if REDIRECT not in {shown["info"] >> 16 for shown in filters}:
        yield f"egress: nothing leads what the pod sends to {name}"


def _bucket(reader: Reader, index: int, rate: int, direction: str) -> Iterator[str]:
    if not rate:
        return
    kinds = [q.get("TCA_KIND") for q in reader.kernel.get_qdiscs(index=index)]
    if "tbf" not in kinds:
        yield f"{direction}: no tbf limits it to {rate} bit/s"


def _same(route: dict[str, Any], other: Route) -> bool:
    gateway = str(other.gateway) if other.gateway is not None else None
    return ip_network(route["dst"]) == other.dst and route.get("gw") == gateway
