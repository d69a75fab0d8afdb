"""The route-netlink requests that make up a pod's network, as data."""

from __future__ import annotations

import _socket as socket  # without what `socket` imports
import errno
import struct
from collections.abc import Iterable

from ..model import Address, Bandwidth, Network
from ..record import TYPE_CHECKING
from . import netlink
from .netlink import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    Request,
    attribute,
    attributes,
    nested,
    text,
    u8,
    u32,
)

if TYPE_CHECKING:
    from typing import Optional

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
RTM_NEWADDR, RTM_NEWROUTE, RTM_GETROUTE, RTM_NEWQDISC = 20, 24, 26, 36
RTM_NEWTFILTER, RTM_DELTFILTER, RTM_GETTFILTER = 44, 45, 46

IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_MASTER, IFLA_LINKINFO = 1, 3, 4, 10, 18
IFLA_IFALIAS, IFLA_AF_SPEC, IFLA_GROUP, IFLA_NET_NS_FD = 20, 26, 27, 28
IFLA_INFO_KIND, IFLA_INFO_DATA, IFLA_INFO_SLAVE_KIND, IFLA_INFO_SLAVE_DATA = 1, 2, 4, 5
VETH_INFO_PEER = 1
IFLA_BRPORT_MODE = 4  # hairpin
_FILTERS = IFLA_BR_NF_CALL_IPTABLES, IFLA_BR_NF_CALL_IP6TABLES = 36, 37
IFLA_INET6_ADDR_GEN_MODE, ADDR_GEN_NONE = 8, 1
IFF_UP, IFF_PROMISC = 0x1, 0x100

IFA_ADDRESS, IFA_LOCAL, IFA_F_NODAD = 1, 2, 0x02

RTA_DST, RTA_OIF, RTA_GATEWAY, RTA_PRIORITY, RTA_PREFSRC, RTA_METRICS, RTA_TABLE = (
    1,
    4,
    5,
    6,
    7,
    8,
    15,
)
RTAX_MTU, RTAX_ADVMSS = 2, 8
RTN_UNICAST, RTN_UNREACHABLE = 1, 7
RT_SCOPE_UNIVERSE, RT_SCOPE_LINK = 0, 253
RT_TABLE_MAIN, RT_TABLE_LOCAL = 254, 255
DEFAULT_METRIC6 = 1024  # what the kernel gives an IPv6 route that names none
RTPROT_STATIC = 4
LAST_RESORT = 0x7FFFFFFF
RTPROT_HEADCNI = 72  # marks every route of ours in the host's namespace
DEAD_LINKS = 0x48434E49  # a group for links to delete; only they are ever put into it

TCA_KIND, TCA_OPTIONS = 1, 2
TCA_TBF_PARMS, TCA_TBF_RATE64, TCA_TBF_BURST = 1, 4, 6
TC_H_ROOT = 0xFFFFFFFF
TC_H_INGRESS, INGRESS_HANDLE = 0xFFFFFFF1, 0xFFFF0000
TC_LINKLAYER_ETHERNET = 1
TCA_U32_SEL, TCA_U32_ACT, TC_U32_TERMINAL = 5, 7, 1
TCA_ACT_KIND, TCA_ACT_OPTIONS, TCA_MIRRED_PARMS = 1, 2, 2
TC_ACT_STOLEN, TCA_EGRESS_REDIR = 4, 1
TCA_BPF_OPS_LEN, TCA_BPF_OPS, TCA_BPF_FLAGS, TCA_BPF_FLAG_ACT_DIRECT = 4, 5, 8, 1
ETH_P_ALL = 3
CHECK_FRAMES, REDIRECT = 16, 32  # preferences of filters: the lower is asked first
OF_FILTERS = (RTM_NEWQDISC, RTM_NEWTFILTER)
TBF_HANDLE = 1 << 16
TBF_LATENCY_SECONDS = 0.025


def _link(index: int = 0, flags: int = 0, change: int = 0, family: int = 0) -> bytes:
    return struct.pack("=BxHiII", family, 0, index, flags, change)


def family(address: Address | Network) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6


def _mac(mac: str) -> bytes:
    return attribute(IFLA_ADDRESS, bytes.fromhex(mac.replace(":", "")))


def new_veth(
    host: str, pod: str, netns_fd: int, mtu: int, host_mac: str, pod_mac: str, bridge: int = 0
) -> Request:
    """Both ends in one request: the host's in its bridge, the pod's in its namespace. Both are
    down, so that nothing passes before it can be checked."""
    peer = _link() + text(IFLA_IFNAME, pod) + u32(IFLA_MTU, mtu)
    peer += u32(IFLA_NET_NS_FD, netns_fd) + _mac(pod_mac)
    body = _link() + text(IFLA_IFNAME, host) + u32(IFLA_MTU, mtu) + _mac(host_mac)
    if bridge:
        body += u32(IFLA_MASTER, bridge)
    body += nested(
        IFLA_LINKINFO,
        text(IFLA_INFO_KIND, "veth"),
        nested(IFLA_INFO_DATA, attribute(VETH_INFO_PEER, peer)),
    )
    flags = NLM_F_CREATE | NLM_F_EXCL
    return Request(RTM_NEWLINK, flags, body, f"create the veth pair {host} and {pod}")


def finish_host_end(name: str, alias: str, hairpin: Optional[bool]) -> Request:
    """What a link cannot be given while it is made. `hairpin` is for a bridge's port, which needs
    no IPv6 address of its own; None for a routed link."""
    body = _link() + text(IFLA_IFNAME, name) + text(IFLA_IFALIAS, alias)
    if hairpin is not None:
        body += nested(
            IFLA_LINKINFO,
            text(IFLA_INFO_SLAVE_KIND, "bridge"),
            nested(IFLA_INFO_SLAVE_DATA, u8(IFLA_BRPORT_MODE, int(hairpin))),
        )
        body += _no_link_local()
    return Request(RTM_NEWLINK, 0, body, f"set up {name}")


def _no_link_local() -> bytes:
    mode = u8(IFLA_INET6_ADDR_GEN_MODE, ADDR_GEN_NONE)
    return nested(IFLA_AF_SPEC, nested(socket.AF_INET6, mode))


def address_generation(kernel: netlink.Netlink, index: int) -> Optional[int]:
    """How a link gets its link-local address; None without IPv6. Reading the sysctl addr_gen_mode
    instead would keep a processor busy while another thread changes a link: the kernel does not
    wait for that, but begins the system call again and again."""
    answer = kernel.ask(Request(RTM_GETLINK, 0, _link(index), f"look at link {index}")) or b""
    for kind in (IFLA_AF_SPEC, socket.AF_INET6, IFLA_INET6_ADDR_GEN_MODE):
        answer = dict(attributes(answer[16:] if kind == IFLA_AF_SPEC else answer)).get(kind, b"")
    return answer[0] if answer else None


def new_bridge(name: str, mtu: int, mac: str) -> Request:
    """With a MAC of its own, or it would change whenever a port comes or goes."""
    body = _link(flags=IFF_UP, change=IFF_UP | IFF_PROMISC) + text(IFLA_IFNAME, name)
    body += u32(IFLA_MTU, mtu) + _mac(mac) + nested(IFLA_LINKINFO, text(IFLA_INFO_KIND, "bridge"))
    flags = NLM_F_CREATE | NLM_F_EXCL
    return Request(RTM_NEWLINK, flags, body, f"create the bridge {name}", fine=(errno.EEXIST,))


def filter_bridged(name: str) -> Request:
    """Have the packets between this bridge's ports pass the node's rules for forwarding, whatever
    net.bridge.bridge-nf-call-iptables says for other bridges."""
    flags = u8(IFLA_BR_NF_CALL_IPTABLES, 1) + u8(IFLA_BR_NF_CALL_IP6TABLES, 1)
    kind = text(IFLA_INFO_KIND, "bridge") + nested(IFLA_INFO_DATA, flags)
    body = _link() + text(IFLA_IFNAME, name) + nested(IFLA_LINKINFO, kind)
    return Request(RTM_NEWLINK, 0, body, f"filter packets between the ports of {name}")


def is_bridge_filtered(kernel: netlink.Netlink, name: str) -> bool:
    body = _link() + text(IFLA_IFNAME, name)
    answer = kernel.ask(Request(RTM_GETLINK, 0, body, f"look at {name}")) or b""
    info = dict(netlink.attributes(dict(netlink.attributes(answer[16:])).get(IFLA_LINKINFO, b"")))
    flags = dict(netlink.attributes(info.get(IFLA_INFO_DATA, b"")))
    return all(flags.get(one) == b"\1" for one in _FILTERS)


def link_up(name: str) -> Request:
    body = _link(flags=IFF_UP, change=IFF_UP) + text(IFLA_IFNAME, name)
    return Request(RTM_NEWLINK, 0, body, f"bring {name} up")


def link_down(name: str) -> Request:
    body = _link(change=IFF_UP) + text(IFLA_IFNAME, name)
    return Request(RTM_NEWLINK, 0, body, f"take {name} down", fine=(errno.ENODEV,))


def delete_link(name: str) -> Request:
    body = _link() + text(IFLA_IFNAME, name)
    return Request(RTM_DELLINK, 0, body, f"delete {name}", fine=(errno.ENODEV,))


def delete_link_of(index: int) -> Request:
    return Request(RTM_DELLINK, 0, _link(index), f"delete link {index}", fine=(errno.ENODEV,))


def delete_links(indexes: Iterable[int]) -> list[Request]:
    """Several in one grace period of the kernel, which only a whole group of links can share."""
    requests = [
        Request(
            RTM_NEWLINK,
            0,
            _link(index) + u32(IFLA_GROUP, DEAD_LINKS),
            f"mark link {index} as dead",
            fine=(errno.ENODEV,),
        )
        for index in indexes
    ]
    group = _link() + u32(IFLA_GROUP, DEAD_LINKS)
    return [*requests, Request(RTM_DELLINK, 0, group, "delete links", fine=(errno.ENODEV,))]


def new_address(index: int, address: Address, prefixlen: int, where: str) -> Request:
    """Usable at once: nobody else can have a pod's IPv6 address, so it is not probed for."""
    body = struct.pack("=BBBBi", family(address), prefixlen, IFA_F_NODAD, 0, index)
    body += attribute(IFA_LOCAL, address.packed) + attribute(IFA_ADDRESS, address.packed)
    what = f"give {address}/{prefixlen} to {where}"
    return Request(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, body, what, fine=(errno.EEXIST,))


def new_route(
    dst: Network,
    index: int,
    gateway: Optional[Address] = None,
    *,
    source: Optional[Address] = None,
    mtu: Optional[int] = None,
    advmss: Optional[int] = None,
    priority: Optional[int] = None,
    table: int = RT_TABLE_MAIN,
    scope: Optional[int] = None,
    protocol: int = RTPROT_HEADCNI,
) -> Request:
    if scope is None:
        scope = RT_SCOPE_LINK if gateway is None and dst.version == 4 else RT_SCOPE_UNIVERSE
    body = struct.pack(
        "=BBBBBBBBI",
        family(dst),
        dst.prefixlen,
        0,
        0,
        table if table < 256 else 0,
        protocol,
        scope,
        RTN_UNICAST,
        0,
    )
    if dst.prefixlen:
        body += attribute(RTA_DST, dst.network_address.packed)
    body += u32(RTA_OIF, index)
    if gateway is not None:
        body += attribute(RTA_GATEWAY, gateway.packed)
    if source is not None:
        body += attribute(RTA_PREFSRC, source.packed)
    if priority is not None:
        body += u32(RTA_PRIORITY, priority)
    if table > 255:
        body += u32(RTA_TABLE, table)
    metrics = [
        u32(kind, value) for kind, value in ((RTAX_MTU, mtu), (RTAX_ADVMSS, advmss)) if value
    ]
    if metrics:
        body += nested(RTA_METRICS, *metrics)
    via = f" via {gateway}" if gateway is not None else ""
    return Request(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, body, f"route {dst}{via}")


def unreachable(dst: Network) -> Request:
    """Ends what no pod's own route takes: addresses of the node's range that nobody has.

    With the worst of metrics: a bridge with the same range, from before or later, comes first.
    """
    body = struct.pack(
        "=BBBBBBBBI",
        family(dst),
        dst.prefixlen,
        0,
        0,
        RT_TABLE_MAIN,
        RTPROT_HEADCNI,
        RT_SCOPE_UNIVERSE,
        RTN_UNREACHABLE,
        0,
    )
    body += attribute(RTA_DST, dst.network_address.packed) + u32(RTA_PRIORITY, LAST_RESORT)
    flags = NLM_F_CREATE | NLM_F_REPLACE
    return Request(RTM_NEWROUTE, flags, body, f"mark {dst} as unreachable elsewhere")


def token_bucket(index: int, rate: int, burst: int, what: str) -> Request:
    """A tbf of `rate` bits per second that lets `burst` bits through at once."""
    bytes_per_second, bucket = rate // 8, burst // 8
    limit = int(bytes_per_second * TBF_LATENCY_SECONDS) + bucket
    rates = struct.pack(
        "=BBHhHI", 0, TC_LINKLAYER_ETHERNET, 0, 0, 0, min(bytes_per_second, 0xFFFFFFFF)
    )
    parameters = rates + bytes(12) + struct.pack("=III", min(limit, 0xFFFFFFFF), 0, 0)
    options = [attribute(TCA_TBF_PARMS, parameters), u32(TCA_TBF_BURST, bucket)]
    if bytes_per_second > 0xFFFFFFFF:
        options.append(netlink.u64(TCA_TBF_RATE64, bytes_per_second))
    body = struct.pack("=BxxxiIII", 0, index, TBF_HANDLE, TC_H_ROOT, 0)
    body += text(TCA_KIND, "tbf") + nested(TCA_OPTIONS, *options)
    return Request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_REPLACE, body, what)


def new_ifb(name: str, alias: str) -> list[Request]:
    body = _link(flags=IFF_UP, change=IFF_UP) + text(IFLA_IFNAME, name)
    body += nested(IFLA_LINKINFO, text(IFLA_INFO_KIND, "ifb"))
    flags = NLM_F_CREATE | NLM_F_EXCL
    made = Request(RTM_NEWLINK, flags, body, f"create the ifb {name}", fine=(errno.EEXIST,))
    labelled = _link() + text(IFLA_IFNAME, name) + text(IFLA_IFALIAS, alias) + _no_link_local()
    return [made, Request(RTM_NEWLINK, 0, labelled, f"set up {name}")]


def redirect(index: int, to: int) -> list[Request]:
    """All that comes in on one link goes out of another, and from there on as if it had come in. A
    redirection to another link is replaced."""
    former = struct.pack("=BxxxiIII", 0, index, 0, INGRESS_HANDLE, _filter_info(REDIRECT))
    absent = errno.ENOENT, errno.EINVAL
    return [
        ingress(index),
        Request(RTM_DELTFILTER, 0, former, "delete the former redirection", fine=absent),
        _redirecting_filter(index, to),
    ]


def _filter_info(preference: int) -> int:
    return preference << 16 | socket.htons(ETH_P_ALL)


def _redirecting_filter(index: int, to: int) -> Request:
    """u32, which every kernel with a shaper has, with one key that matches any packet."""
    selector = struct.pack("=BBBxHHhhI", TC_U32_TERMINAL, 0, 1, 0, 0, 0, 0, 0) + bytes(16)
    mirred = struct.pack("=IIiiiiI", 0, 0, TC_ACT_STOLEN, 0, 0, TCA_EGRESS_REDIR, to)
    action = text(TCA_ACT_KIND, "mirred") + nested(
        TCA_ACT_OPTIONS, attribute(TCA_MIRRED_PARMS, mirred)
    )
    options = attribute(TCA_U32_SEL, selector) + nested(TCA_U32_ACT, nested(1, action))
    body = struct.pack("=BxxxiIII", 0, index, 0, INGRESS_HANDLE, _filter_info(REDIRECT))
    body += text(TCA_KIND, "u32") + nested(TCA_OPTIONS, options)
    flags = NLM_F_CREATE | NLM_F_EXCL
    return Request(RTM_NEWTFILTER, flags, body, "redirect what the pod sends (u32, mirred)")


def ingress(index: int) -> Request:
    """A place for filters of what comes in on a link."""
    body = struct.pack("=BxxxiIII", 0, index, INGRESS_HANDLE, TC_H_INGRESS, 0)
    body += text(TCA_KIND, "ingress")
    what = "add an ingress qdisc"
    return Request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, body, what, fine=(errno.EEXIST,))


def filters(index: int) -> Request:
    """To be dumped: what is asked of packets that come in on a link."""
    body = struct.pack("=BxxxiIII", 0, index, 0, INGRESS_HANDLE, 0)
    return Request(RTM_GETTFILTER, 0, body, "list the filters of a link")


def program_among(filters: Iterable[bytes]) -> bytes:
    """The program that checks a pod's frames; nothing if no filter has it."""
    for body in filters:
        (info,) = struct.unpack_from("=I", body, 16)
        if info >> 16 == CHECK_FRAMES:
            options = dict(attributes(body[20:])).get(TCA_OPTIONS, b"")
            program = dict(attributes(options)).get(TCA_BPF_OPS, b"")
            if program:  # the first answer about a filter is about its kind only
                return program
    return b""


def check_frames(index: int, program: bytes) -> Request:
    """Run a classic BPF program for each frame that comes in on the link. Its result is the
    verdict, so that no module for an action is needed. Another program is replaced at once."""
    options = attribute(TCA_BPF_OPS_LEN, struct.pack("=H", len(program) // 8))
    options += attribute(TCA_BPF_OPS, program) + u32(TCA_BPF_FLAGS, TCA_BPF_FLAG_ACT_DIRECT)
    body = struct.pack("=BxxxiIII", 0, index, 1, INGRESS_HANDLE, _filter_info(CHECK_FRAMES))
    body += text(TCA_KIND, "bpf") + nested(TCA_OPTIONS, options)
    return Request(RTM_NEWTFILTER, NLM_F_CREATE, body, "check what the pod sends (cls_bpf)")


def shaping(bandwidth: Bandwidth, index: int, direction: str) -> list[Request]:
    """The bucket of one direction, if it has one: into the pod on the host's end of the veth,
    out of the pod on an ifb, where no pod can delete it."""
    rate, burst = (
        (bandwidth.ingress_rate, bandwidth.ingress_burst)
        if direction == "ingress"
        else (bandwidth.egress_rate, bandwidth.egress_burst)
    )
    if not rate:
        return []
    return [token_bucket(index, rate, burst, f"limit the pod's {direction} to {rate} bit/s (tbf)")]
