"""What CHECK compares: the pod's network as the kernel has it, with what ADD set up.

The kernel is read with pyroute2, which shares no code with what wrote it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from ipaddress import ip_address, ip_interface, ip_network
from typing import TYPE_CHECKING, Any

from pyroute2 import IPRoute

from . import repair, result
from .datapath import firewall, guard, link, netns
from .datapath.rtnl import IFF_PROMISC, IFF_UP, INGRESS_HANDLE, REDIRECT, RT_TABLE_MAIN
from .errors import UNKNOWN_CONTAINER, CniError
from .ipam.config import TYPE as OUR_IPAM
from .model import NetworkConfig, Owner, Route
from .policy import admission
from .store import Attachment

if TYPE_CHECKING:
    from .call import Call
    from .verbs import Node


def differences(node: Node, network: NetworkConfig, owner: Owner, call: Call) -> list[str]:
    """Each difference in words. A container that was never added is an error of its own."""
    known = node.store.attachment(owner)
    if known is None:
        raise CniError(
            UNKNOWN_CONTAINER,
            f"container {owner.container_id} has no {owner.ifname} on network {owner.network}",
            "ADD it first; a reboot or a DEL ends an attachment",
        )
    found = list(_result(known, network))
    network = _as_added(known, network, call)
    found += [*_lease(node, network, owner, known), *_host(network, known)]
    try:
        with netns.opened(call.netns, call.netns_fd) as fd, netns.entered(fd), IPRoute() as kernel:
            found += _pod(kernel, network, known)
    except CniError as problem:
        found.append(f"network namespace: {problem}")
    station = guard.station_of_attachment(known)
    if station is not None:
        found += filter(None, [guard.difference(node.kernel, station)])
    found += admission.differences(node.kernel, known)
    if known.result.get("ips") and firewall.concerns(node.store, network):
        found += firewall.differences(node.store, owner, shared=True)
    return found


def _as_added(known: Attachment, network: NetworkConfig, call: Call) -> NetworkConfig:
    """What was configured for this pod: the configuration may have changed for later pods."""
    try:
        return repair.network_of(known, call.env)
    except CniError:
        return network  # the store was damaged


def _result(known: Attachment, network: NetworkConfig) -> Iterator[str]:
    """What the runtime remembers and what we do must be one and the same."""
    if network.prev_result is None:
        yield "prevResult: missing from the configuration, as CHECK must have it"
        return
    given = result.read(network.prev_result, network.cni_version)
    for key in ("ips", "routes"):
        ours = result.read(result.shape(known.result, network.cni_version), network.cni_version)
        missing = [item for item in ours.get(key, ()) if item not in given.get(key, ())]
        if missing:
            yield f"prevResult.{key}: lacks {missing}"


def _lease(node: Node, network: NetworkConfig, owner: Owner, known: Attachment) -> Iterator[str]:
    if network.ipam.type != OUR_IPAM:
        return
    lease = node.ipam.lease(owner)
    held = {str(one.address) for one in lease.addresses} if lease else set()
    for ip in known.result.get("ips", ()):
        address = str(ip_interface(ip["address"]).ip)
        if address not in held:
            yield f"allocation: {address} is not recorded as this pod's"


def _host(network: NetworkConfig, known: Attachment) -> Iterator[str]:
    routed = network.datapath == "routed"
    with IPRoute() as kernel:
        end = _named(kernel, known.host_ifname)
        if end is None:
            yield f"host side: {known.host_ifname} is missing"
            return
        yield from _link_differences("host side", end, known.host_ifname, network.mtu)
        yield from _bucket(kernel, end["index"], network.bandwidth.ingress_rate, "ingress")
        if _has_limiter(known):
            yield from _limiter(kernel, end["index"], known, network.bandwidth.egress_rate)
        if routed:
            have = _routes(kernel, end["index"])
            for ip in known.result.get("ips", ()):
                host = ip_network(ip_interface(ip["address"]).ip)
                if not any(route.dst == host for route in have):
                    yield f"host side: no route {host} to {known.host_ifname}"
            return
        bridge = _named(kernel, network.bridge)
        if bridge is None:
            yield f"host side: bridge {network.bridge} is missing"
            return
        if not bridge["flags"] & IFF_UP:
            yield f"host side: bridge {network.bridge} is down"
        if bridge["flags"] & IFF_PROMISC:
            yield f"host side: bridge {network.bridge} is promiscuous"
        if end.get("IFLA_MASTER") != bridge["index"]:
            yield f"host side: {known.host_ifname} is not a port of {network.bridge}"
        have_addresses = _addresses(kernel, bridge["index"])
        for ip in known.result.get("ips", ()):
            prefix = ip["address"].rpartition("/")[2]
            expected = network.is_gateway and "gateway" in ip
            if expected and f"{ip['gateway']}/{prefix}" not in have_addresses:
                yield f"host side: {network.bridge} has no address {ip['gateway']}/{prefix}"


def _pod(kernel: Any, network: NetworkConfig, known: Attachment) -> Iterator[str]:
    name = known.owner.ifname
    end = _named(kernel, name)
    if end is None:
        yield f"pod: interface {name} is missing"
        return
    yield from _link_differences("pod", end, name, network.mtu)
    mac = next((i.get("mac") for i in known.result.get("interfaces", ()) if i.get("sandbox")), None)
    if mac and end.get("IFLA_ADDRESS") != mac:
        yield f"pod: {name} has MAC {end.get('IFLA_ADDRESS')}, expected {mac}"
    have = _addresses(kernel, end["index"])
    for ip in known.result.get("ips", ()):
        if ip["address"] not in have:
            yield f"pod: {name} has no address {ip['address']}"
    for route in known.result.get("routes", ()):
        table = route.get("table") or RT_TABLE_MAIN
        if not any(_same(route, other) for other in _routes(kernel, end["index"], table)):
            via = f" via {route['gw']}" if "gw" in route else ""
            within = f" in table {table}" if table != RT_TABLE_MAIN else ""
            yield f"pod: no route {route['dst']}{via}{within}"
    if not _has_limiter(known):  # an earlier release limited it here
        yield from _bucket(kernel, end["index"], network.bandwidth.egress_rate, "egress")


def _link_differences(side: str, link_: Any, name: str, mtu: int) -> Iterator[str]:
    if not link_["flags"] & IFF_UP:
        yield f"{side}: {name} is down"
    if link_.get("IFLA_MTU") != mtu:
        yield f"{side}: {name} has MTU {link_.get('IFLA_MTU')}, expected {mtu}"


def _has_limiter(known: Attachment) -> bool:
    wanted = link.limiter_of(known.host_ifname)
    return any(one.get("name") == wanted for one in known.result.get("interfaces", ()))


def _limiter(kernel: Any, host: int, known: Attachment, rate: int) -> Iterator[str]:
    name = link.limiter_of(known.host_ifname)
    ifb = _named(kernel, name)
    if ifb is None:
        yield f"egress: {name} is missing, which limits it to {rate} bit/s"
        return
    if not ifb["flags"] & IFF_UP:
        yield f"egress: {name} is down"
    yield from _bucket(kernel, ifb["index"], rate, "egress")
    filters = kernel.get_filters(index=host, parent=INGRESS_HANDLE)
    if REDIRECT not in {shown["info"] >> 16 for shown in filters}:
        yield f"egress: nothing leads what the pod sends to {name}"


def _bucket(kernel: Any, index: int, rate: int, direction: str) -> Iterator[str]:
    if not rate:
        return
    kinds = [q.get("TCA_KIND") for q in kernel.get_qdiscs(index=index)]
    if "tbf" not in kinds:
        yield f"{direction}: no tbf limits it to {rate} bit/s"


def _named(kernel: Any, name: str) -> Any:
    return next((one for one in kernel.get_links() if one.get("IFLA_IFNAME") == name), None)


def _addresses(kernel: Any, index: int) -> set[str]:
    return {f"{one.get('IFA_ADDRESS')}/{one['prefixlen']}" for one in kernel.get_addr(index=index)}


def _routes(kernel: Any, index: int, table: int = RT_TABLE_MAIN) -> list[Route]:
    found = []
    for family, bits in ((socket.AF_INET, 32), (socket.AF_INET6, 128)):
        for one in kernel.get_routes(family=family, table=table, oif=index):
            anywhere = ip_address(bytes(bits // 8))
            dst = ip_network(f"{one.get('RTA_DST') or anywhere}/{one['dst_len']}")
            gateway = one.get("RTA_GATEWAY")
            found.append(Route(dst, ip_interface(gateway).ip if gateway else None))
    return found


def _same(route: dict[str, Any], other: Route) -> bool:
    gateway = str(other.gateway) if other.gateway is not None else None
    return ip_network(route["dst"]) == other.dst and route.get("gw") == gateway
