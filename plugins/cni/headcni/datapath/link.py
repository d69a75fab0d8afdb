"""A pod's cable: a veth pair, on the bridge or routed, with its addresses and routes."""

from __future__ import annotations

import _socket as socket  # without what `socket` imports
import errno
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_network

from ..errors import INTERNAL, KERNEL_LACKS, CniError
from ..model import Address, LeasedAddress, Network, NetworkConfig, Owner, Route
from ..record import TYPE_CHECKING, dataclass, replace
from ..sha import sha256
from . import netns, rtnl
from .netlink import KernelError, Netlink, Request, attribute, attributes

if TYPE_CHECKING:
    from typing import Optional, TypeAlias

SYSFS = "/sys/class/net"
RTM_F_FIB_MATCH = 0x2000
RTN_LOCAL = 2
LONGEST_ALIAS = 255  # the kernel's IFALIASZ less its final NUL
LIMITER = "hci"
AT_ONCE = 64  # links in one request: more acknowledgements than that might not fit its socket
STABLE_SECRET, RANDOM_SECRET = 2, 3  # ways to make a link-local address without the MAC
_ROUTE = struct.Struct("=BBBBBBBBI")
_OF_LIMITS = (rtnl.RTM_NEWQDISC, rtnl.RTM_NEWTFILTER, rtnl.RTM_NEWLINK)
_SETTINGS_OF_LINKS = "/proc/sys/net/ipv4/conf"
_HEX = frozenset("0123456789abcdef")
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)


class InterfaceTaken(CniError):
    """The pod has an interface of that name already."""


@dataclass(frozen=True)
class Cable:
    """Both ends of a pod's veth pair, as they are wired up."""

    host: str
    host_mac: str
    alias: str
    pod: str
    pod_mac: str
    addresses: tuple[LeasedAddress, ...]
    routes: tuple[Route, ...]
    default_routes: tuple[Route, ...] = ()  # unless another interface of the pod has some


def host_name(owner: Owner) -> str:
    """The host's end, named after its owner: a DEL that knows nothing else still finds it."""
    return f"hc{_digest(owner)[:11]}"


def limiter_of(host: str) -> str:
    """The ifb that limits what the pod behind this link sends."""
    return f"{LIMITER}{host[2:]}"


def alias_of(owner: Owner) -> str:
    """What `ip link` shows beside the host's end, and by which GC knows whose it is. The kernel
    limits its length, so that of an owner with long names has three words: no container and no
    interface, and if need be not even the network's name in full."""
    alias = f"headcni {owner.network} {owner.container_id} {owner.ifname}"
    return alias if len(alias) <= LONGEST_ALIAS else f"{_short_alias(owner.network)} long-names"


def _short_alias(network: str) -> str:
    alias = f"headcni {network}"
    if len(alias) < LONGEST_ALIAS - 20:
        return alias
    return f"headcni {network[:100]}#{sha256(network.encode()).hexdigest()[:32]}"


def links_of(network: str) -> dict[str, Owner]:
    """The host's ends of a network's pods, by name, as the kernel has them."""
    return {
        name: Owner(*words[1:])
        for name, words in _aliases()
        if len(words) == 4 and words[:2] == ["headcni", network]
    }


def pod_link_names() -> list[str]:
    """The host's ends of all pods' links in the network namespace that the calling thread is in,
    which /sys does not always show."""
    return [name for name in os.listdir(_SETTINGS_OF_LINKS) if _is_pod_link(name)]


def _is_pod_link(name: str) -> bool:
    return len(name) == 13 and name.startswith("hc") and _HEX.issuperset(name[2:])


def links_without_owner(network: str) -> list[str]:
    """Those whose alias has no room for the owner; their own names are still made from it."""
    wanted = f"{_short_alias(network)} long-names".split()
    return [name for name, words in _aliases() if words == wanted]


def _aliases() -> Iterator[tuple[str, list[str]]]:
    """An ifb counts as the link that it is for: it may have outlived it."""
    for name in os.listdir(SYSFS):
        if name.startswith("hc"):
            with suppress(OSError), open(f"{SYSFS}/{name}/ifalias", encoding="utf-8") as file:
                host = f"hc{name[len(LIMITER) :]}" if name.startswith(LIMITER) else name
                yield host, file.read().split()


def _digest(owner: Owner) -> str:
    text = "\0".join((owner.network, owner.container_id, owner.ifname))
    return sha256(text.encode()).hexdigest()


def mac_of(address: Address) -> str:
    """Made from the address: a neighbour that remembers a pod's predecessor is still right."""
    packed = address.packed
    tail = packed if len(packed) == 4 else sha256(packed).digest()[:4]
    return ":".join(f"{byte:02x}" for byte in b"\x0a\x58" + tail)


def plan(
    network: NetworkConfig,
    owner: Owner,
    leased: Sequence[LeasedAddress],
    routes: Sequence[Route],
) -> Cable:
    """What the pod will have, from its configuration and what the IPAM gave it."""
    routed = network.datapath == "routed"
    addresses = tuple(
        LeasedAddress(one.address, one.address.max_prefixlen, one.gateway) if routed else one
        for one in leased
    )
    digest = _digest(owner)
    host_mac = ":".join(("0e", *(digest[i : i + 2] for i in range(11, 21, 2))))
    pod_mac = mac_of(leased[0].address) if leased else f"0a:58:{host_mac[3:14]}"
    explicit, default = _routes(network, leased, routes)
    return Cable(
        host=host_name(owner),
        host_mac=host_mac,
        alias=alias_of(owner),
        pod=owner.ifname,
        pod_mac=network.mac or pod_mac,
        addresses=addresses,
        routes=explicit,
        default_routes=default,
    )


def _routes(
    network: NetworkConfig, leased: Sequence[LeasedAddress], given: Sequence[Route]
) -> tuple[tuple[Route, ...], tuple[Route, ...]]:
    """The IPAM's routes with their gateways filled in, and a default route for each family that
    has none among them."""
    gateways = {one.address.version: one.gateway for one in leased if one.gateway is not None}
    found = []
    for route in given:
        gateway = route.gateway or gateways.get(route.dst.version)
        if any(one.address.version == route.dst.version for one in leased):
            found.append(replace(route, gateway=gateway))
    main = [route for route in found if route.table in (None, 0, rtnl.RT_TABLE_MAIN)]
    have = {route.dst.version for route in main if route.dst.prefixlen == 0}
    default = [
        Route(ip_network("0.0.0.0/0" if version == 4 else "::/0"), gateway)
        for version, gateway in gateways.items()
        if network.default_route and version not in have
    ]
    return tuple(found), tuple(default)


Filters: TypeAlias = "Callable[[int], Sequence[Request]]"  # for the link with this index


def connect(
    kernel: Netlink, network: NetworkConfig, cable: Cable, pod_netns: int, filters: Filters
) -> Cable:
    """Make it so, and return it with the routes that the pod has got. The filters are there before
    the pod can send. On failure nothing of the pair is left; the bridge stays, others use it."""
    prepare_host(kernel, network, cable)
    disconnect(kernel, cable.host)  # an ADD that was killed may have left it
    bridge = 0 if network.datapath == "routed" else kernel.index(network.bridge)
    try:
        kernel.do([_pair(network, cable, pod_netns, bridge)])
        index = kernel.index(cable.host)
        hairpin = network.hairpin if bridge else None
        labelled = rtnl.finish_host_end(cable.host, cable.alias, hairpin)
        kernel.do([*filters(index), labelled, rtnl.link_up(cable.host)])
    except KernelError as problem:
        kernel.do([rtnl.delete_link(cable.host)])
        if problem.errno == errno.EEXIST:
            raise InterfaceTaken(
                INTERNAL,
                f"the pod has an interface {cable.pod} already, which HeadCNI did not make",
                "choose another CNI_IFNAME, or remove it",
            ) from None
        raise
    try:
        finish_host(kernel, network, cable)
        with netns.entered(pod_netns), Netlink() as inside:
            return finish_pod(inside, network, cable)
    except BaseException:
        disconnect(kernel, cable.host)
        raise


def disconnect(kernel: Netlink, host: str) -> None:
    """Delete the host's end and its ifb; the pod's end, its routes and its qdiscs go with it."""
    index, limiter = kernel.index(host), kernel.index(limiter_of(host))
    if limiter:
        kernel.do(rtnl.delete_links(filter(None, (index, limiter))))
    elif index:
        kernel.do([rtnl.delete_link(host)])


def cut(kernel: Netlink, host: str) -> int:
    """Take the host's end down: from now on the pod neither sends nor hears, and the node's routes
    to it are gone. This takes no time, unlike to delete it. Its index, 0 if it is not there."""
    index = kernel.index(host)
    if index:
        kernel.do([rtnl.link_down(host)])
    return index


def delete(kernel: Netlink, links: Mapping[str, int]) -> None:
    """Delete links by name and index, those that have both, and the ifbs of links that are gone.
    Of a group the kernel deletes all or none, so if it refuses, each link is tried by itself; the
    first failure is raised at the end."""
    there = []
    for name, index in links.items():
        found, limiter = kernel.index(name), kernel.index(limiter_of(name))
        if found == index:
            there.append(index)
        if limiter and found in (0, index):
            there.append(limiter)
    failures = []
    for start in range(0, len(there), AT_ONCE):
        group = there[start : start + AT_ONCE]
        try:
            kernel.do(rtnl.delete_links(group))
        except KernelError:
            for index in group:
                try:
                    kernel.do([rtnl.delete_link_of(index)])
                except KernelError as problem:
                    failures.append(problem)
    if failures:
        raise failures[0]


def prepare_host(kernel: Netlink, network: NetworkConfig, cable: Cable) -> None:
    """What all pods of the node share. Each part is made if it is missing, so the first pod's ADD
    and any later one are the same code."""
    netns.write_sysctl("net/ipv4/ip_forward", "1")
    if any(one.address.version == 6 for one in cable.addresses):
        if not netns.has_ipv6():
            raise CniError(
                KERNEL_LACKS,
                "the pod is to have an IPv6 address, but this kernel has no IPv6",
                "boot without ipv6.disable=1, or take the IPv6 range out of the configuration",
            )
        netns.forward_ipv6()
    if network.datapath == "routed":
        kernel.do(rtnl.unreachable(cidr) for cidr in network.pod_cidrs)
        return
    index = kernel.index(network.bridge)
    if not index:
        kernel.do([rtnl.new_bridge(network.bridge, network.mtu, _bridge_mac(network, cable))])
        netns.write_sysctl(f"net/ipv6/conf/{network.bridge}/accept_ra", "0")
        index = kernel.index(network.bridge)
    kernel.do(
        [rtnl.link_up(network.bridge)]
        + [
            rtnl.new_address(index, one.gateway, one.prefixlen, network.bridge)
            for one in cable.addresses
            if one.gateway is not None and network.is_gateway
        ]
    )


def _bridge_mac(network: NetworkConfig, cable: Cable) -> str:
    gateways = [one.gateway for one in cable.addresses if one.gateway is not None]
    if gateways:
        return mac_of(gateways[0])
    digest = sha256(network.bridge.encode()).digest()
    return ":".join(f"{byte:02x}" for byte in b"\x0a\x58" + digest[:4])


def _pair(network: NetworkConfig, cable: Cable, pod_netns: int, bridge: int) -> Request:
    return rtnl.new_veth(
        cable.host, cable.pod, pod_netns, network.mtu, cable.host_mac, cable.pod_mac, bridge
    )


def finish_host(kernel: Netlink, network: NetworkConfig, cable: Cable) -> None:
    requests: list[Request] = []
    shaped = bool(network.bandwidth.ingress_rate or network.bandwidth.egress_rate)
    index = kernel.index(cable.host) if shaped or network.datapath == "routed" else 0
    if network.datapath == "routed":
        netns.write_sysctl(f"net/ipv6/conf/{cable.host}/accept_ra", "0")
        for one in cable.addresses:
            gateway = one.gateway
            if gateway is not None:
                requests.append(rtnl.new_address(index, gateway, gateway.max_prefixlen, cable.host))
            requests.append(rtnl.new_route(ip_network(one.address), index, source=gateway))
    requests += rtnl.shaping(network.bandwidth, index, "ingress")
    _do(kernel, requests)
    if network.bandwidth.egress_rate:
        _limit_egress(kernel, network, cable, index)


def _limit_egress(kernel: Netlink, network: NetworkConfig, cable: Cable, index: int) -> None:
    name = limiter_of(cable.host)
    _do(kernel, rtnl.new_ifb(name, cable.alias))
    limiter = kernel.index(name)
    bucket = rtnl.shaping(network.bandwidth, limiter, "egress")
    _do(kernel, [*bucket, *rtnl.redirect(index, limiter)])


def finish_pod(inside: Netlink, network: NetworkConfig, cable: Cable) -> Cable:
    # No router speaks on a pod's link; a neighbour that pretends to be one is not listened to.
    netns.write_sysctl(f"net/ipv6/conf/{cable.pod}/accept_ra", "0")
    if any(one.address.version == 6 for one in cable.addresses):
        netns.write_sysctl(f"net/ipv6/conf/{cable.pod}/disable_ipv6", "0")
    index = inside.index(cable.pod)
    if rtnl.address_generation(inside, index) in (STABLE_SECRET, RANDOM_SECRET):
        # Anti-spoofing knows the address that the MAC makes.
        netns.write_sysctl(f"net/ipv6/conf/{cable.pod}/addr_gen_mode", "0")
    others = routes_of_others(inside, index)
    cable = replace(cable, routes=_allowed(cable, others), default_routes=())
    requests = [rtnl.link_up("lo"), rtnl.link_up(cable.pod)]
    requests += [
        rtnl.new_address(index, one.address, one.prefixlen, cable.pod) for one in cable.addresses
    ]
    if network.datapath == "routed":
        gateways = {one.gateway for one in cable.addresses if one.gateway is not None}
        requests += [_route_to_gateway(gateway, index, others) for gateway in gateways]
    requests += [
        rtnl.new_route(
            route.dst,
            index,
            route.gateway,
            mtu=route.mtu,
            advmss=route.advmss,
            priority=route.priority,
            table=route.table or rtnl.RT_TABLE_MAIN,
            scope=route.scope,
            protocol=rtnl.RTPROT_STATIC,
        )
        for route in cable.routes
    ]
    _do(inside, requests)
    return cable


# The table and destination of each route, and its metric.
Metrics: TypeAlias = "Mapping[tuple[int, Network], int]"


def routes_of_others(inside: Netlink, index: int) -> Metrics:
    """The routes that a pod has through its other interfaces; the best metric of each."""
    found: dict[tuple[int, Network], int] = {}
    question = Request(rtnl.RTM_GETROUTE, 0, bytes(_ROUTE.size), "list the pod's routes")
    for body in inside.dump(question):
        family, length, _unused, _unused, table, *_unused2 = _ROUTE.unpack_from(body)
        if table == rtnl.RT_TABLE_LOCAL or family not in (socket.AF_INET, socket.AF_INET6):
            continue
        have = dict(attributes(body[_ROUTE.size :]))
        if have.get(rtnl.RTA_OIF) == struct.pack("=I", index):
            continue
        (table,) = struct.unpack("=I", have.get(rtnl.RTA_TABLE, struct.pack("=I", table)))
        (metric,) = struct.unpack("=I", have.get(rtnl.RTA_PRIORITY, bytes(4)))
        address = have.get(rtnl.RTA_DST, bytes(4 if family == socket.AF_INET else 16))
        key = table, ip_network((address, length))
        found[key] = min(metric, found.get(key, metric))
    return found


def _allowed(cable: Cable, others: Metrics) -> tuple[Route, ...]:
    """What neither replaces nor shadows a route of another interface: the first to come has it,
    unless a worse priority was asked for. A default route that nobody asked for is left out if
    another interface has one of any family: this one is the pod's second."""
    second = any(table == rtnl.RT_TABLE_MAIN and not dst.prefixlen for table, dst in others)
    found = []
    for route in cable.routes if second else (*cable.routes, *cable.default_routes):
        theirs = others.get((route.table or rtnl.RT_TABLE_MAIN, route.dst))
        usual = rtnl.DEFAULT_METRIC6 if route.dst.version == 6 else 0
        if theirs is None or (route.priority or usual) > theirs:
            found.append(route)
    return tuple(found)


def _route_to_gateway(gateway: Address, index: int, others: Metrics) -> Request:
    """Another interface may have the same gateway: each then has a route of its own to it."""
    theirs = others.get((rtnl.RT_TABLE_MAIN, ip_network(gateway)))
    priority = None if theirs is None else theirs + index
    return rtnl.new_route(
        ip_network(gateway), index, priority=priority, protocol=rtnl.RTPROT_STATIC
    )


def _do(kernel: Netlink, requests: list[Request]) -> None:
    try:
        kernel.do(requests)
    except KernelError as problem:
        if problem.errno in (errno.ENOENT, errno.EOPNOTSUPP) and problem.request.type in _OF_LIMITS:
            raise CniError(
                KERNEL_LACKS,
                "the pod's bandwidth is to be limited, but this kernel cannot do it",
                f"{problem}; modprobe sch_tbf ifb sch_ingress cls_u32 act_mirred, or take the "
                "bandwidth annotation off the pod",
            ) from None
        raise


def route_to(kernel: Netlink, address: Address) -> Optional[bytes]:
    """The rtmsg of the route that the node has to an address; None if it has none."""
    bits = address.max_prefixlen
    body = _ROUTE.pack(rtnl.family(address), bits, 0, 0, 0, 0, 0, 0, RTM_F_FIB_MATCH)
    body += attribute(rtnl.RTA_DST, address.packed)
    try:
        return kernel.ask(Request(rtnl.RTM_GETROUTE, 0, body, f"look up {address}"))
    except KernelError as problem:
        if problem.errno in _NO_ROUTE:
            return None
        raise


def address_in_use(kernel: Netlink) -> Callable[[Address], bool]:
    """Asks whether the node has an address itself or a route to just that one."""

    def asked(address: Address) -> bool:
        answer = route_to(kernel, address)
        if answer is None:
            return False
        length, kind = answer[1], answer[7]
        return kind == RTN_LOCAL or length == address.max_prefixlen

    return asked
