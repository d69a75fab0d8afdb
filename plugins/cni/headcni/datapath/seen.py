"""What the kernel shows of pods: their links, and the addresses at the other ends.

For when the store was lost. Nothing here is on the way of an ADD.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, ip_address
from typing import NamedTuple

from ..errors import CniError
from ..model import Address
from . import guard, rtnl
from .link import LIMITER
from .netlink import Netlink, Request, attribute, attributes

RTM_GETLINK, RTM_GETADDR, RTM_GETROUTE, RTM_GETNEIGH, RTM_GETNSID = 18, 22, 26, 30, 90
IFLA_LINK, IFLA_LINK_NETNSID, IFA_TARGET_NETNSID = 5, 37, 10
NDA_LLADDR = 2
NETNSA_NSID, NETNSA_FD = 1, 3
AF_BRIDGE = 7
NUD_PERMANENT = 0x80
POD_MAC = b"\x0a\x58"  # followed by the pod's IPv4 address; see link.mac_of
NETNS_FOLDERS = ("/run/netns", "/var/run/netns")
MOST_NAMESPACES = 16384
MOST_CLAIMED = 64  # addresses of one pod
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBi")
_ROUTE = struct.Struct("=BBBBBBBBI")
_NEIGHBOUR = struct.Struct("=BBHiHBB")


class PodLink(NamedTuple):
    """The host's end of a pod's cable."""

    name: str
    number: int
    alias: str
    master: int
    peer: int  # the other end's index in its namespace
    netns: int  # which this namespace knows by this number; -1 if by none


def pod_links(kernel: Netlink) -> list[PodLink]:
    found = []
    question = Request(RTM_GETLINK, 0, _LINK.pack(0, 0, 0, 0, 0), "list the links")
    for body in kernel.dump(question):
        index = _LINK.unpack_from(body)[2]
        have = dict(attributes(body[_LINK.size :]))
        name = _text(have.get(rtnl.IFLA_IFNAME))
        if name.startswith("hc") and not name.startswith(LIMITER):  # an ifb has no other end
            found.append(
                PodLink(
                    name,
                    index,
                    _text(have.get(rtnl.IFLA_IFALIAS)),
                    _number(have.get(rtnl.IFLA_MASTER), 0),
                    _number(have.get(IFLA_LINK), 0),
                    _number(have.get(IFLA_LINK_NETNSID), -1),
                )
            )
    return found


def addresses(netns: int = -1) -> dict[int, list[tuple[Address, int]]]:
    """The addresses of each link, with their prefix lengths, in a namespace that is known by a
    number; in this one without. None of the link-local ones."""
    body = _ADDRESS.pack(0, 0, 0, 0, 0)
    if netns >= 0:
        body += attribute(IFA_TARGET_NETNSID, struct.pack("=i", netns))
    found: dict[int, list[tuple[Address, int]]] = {}
    with Netlink(strict=netns >= 0) as kernel:
        for answer in kernel.dump(Request(RTM_GETADDR, 0, body, "list the addresses")):
            _unused, prefix, _unused, _unused, index = _ADDRESS.unpack_from(answer)
            have = dict(attributes(answer[_ADDRESS.size :]))
            packed = have.get(rtnl.IFA_LOCAL) or have.get(rtnl.IFA_ADDRESS)
            if packed and len(packed) in (4, 16):
                address = ip_address(packed)
                if not address.is_link_local and not address.is_loopback:
                    found.setdefault(index, []).append((address, prefix))
    return found


def given(links: Iterable[PodLink], kernel: Netlink) -> dict[str, tuple[Address, ...]]:
    """The addresses that we gave to the pods behind these links, as far as the node itself shows
    it: by what anti-spoofing lets a pod send, or by the node's routes."""
    checked, routes = guard.stations(kernel), routed(kernel)
    found = {
        one.name: checked[one.name].addresses
        if one.name in checked
        else tuple(routes.get(one.number, ()))
        for one in links
    }
    return {name: those for name, those in found.items() if those}


def claimed(one: PodLink, kernel: Netlink) -> list[tuple[Address, int]]:
    """The addresses that a pod has, as it says itself: whoever has NET_ADMIN in it can add any."""
    inside = []
    if one.netns >= 0:
        with suppress(CniError):  # an old kernel, or the pod has just ended
            inside = addresses(one.netns).get(one.peer, [])
    if not inside:
        learnt = bridged(kernel).get(one.number, ())
        inside = [(address, address.max_prefixlen) for address in learnt]
    return inside[:MOST_CLAIMED]


def routed(kernel: Netlink) -> dict[int, list[Address]]:
    """Our routes to single addresses, by the link that they lead to."""
    found: dict[int, list[Address]] = {}
    question = Request(RTM_GETROUTE, 0, _ROUTE.pack(0, 0, 0, 0, 0, 0, 0, 0, 0), "list the routes")
    for body in kernel.dump(question):
        _unused, length, _unused, _unused, _unused, protocol, *_unused2 = _ROUTE.unpack_from(body)
        have = dict(attributes(body[_ROUTE.size :]))
        packed = have.get(rtnl.RTA_DST, b"")
        if protocol == rtnl.RTPROT_HEADCNI and packed and length == 8 * len(packed):
            found.setdefault(_number(have.get(rtnl.RTA_OIF), 0), []).append(ip_address(packed))
    return found


def bridged(kernel: Netlink) -> dict[int, list[Address]]:
    """What bridges have learnt of pods, by port: a pod's MAC is made from its address."""
    found: dict[int, list[Address]] = {}
    question = Request(
        RTM_GETNEIGH, 0, _NEIGHBOUR.pack(AF_BRIDGE, 0, 0, 0, 0, 0, 0), "list the bridges' entries"
    )
    for body in kernel.dump(question):
        _unused, _unused, index, state, *_unused2 = _NEIGHBOUR.unpack_from(body)
        if state & NUD_PERMANENT:
            continue  # the bridge's own address, or a port's
        mac = dict(attributes(body[_NEIGHBOUR.size :])).get(NDA_LLADDR, b"")
        if len(mac) == 6 and mac.startswith(POD_MAC):
            found.setdefault(index, []).append(IPv4Address(mac[2:]))
    return found


def namespaces() -> dict[int, str]:
    """The paths of named namespaces, by the numbers that this one knows them by."""
    found: dict[int, str] = {}
    with Netlink() as kernel:
        for path in _namespace_files():
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                body = b"\0\0\0\0" + attribute(NETNSA_FD, struct.pack("=I", fd))
                answer = kernel.ask(Request(RTM_GETNSID, 0, body, f"look at {path}"))
            except CniError:
                continue  # no namespace is mounted on it
            finally:
                os.close(fd)
            have = dict(attributes(answer[4:])) if answer is not None else {}
            number = _number(have.get(NETNSA_NSID), -1)
            if number >= 0:
                found.setdefault(number, path)
    return found


def _namespace_files() -> Iterator[str]:
    seen = set()
    for folder in NETNS_FOLDERS:
        real = os.path.realpath(folder)
        if real in seen or not os.path.isdir(real):
            continue
        seen.add(real)
        for name in sorted(os.listdir(real))[:MOST_NAMESPACES]:
            yield os.path.join(folder, name)


def _text(value: bytes | None) -> str:
    return (value or b"").rstrip(b"\0").decode(errors="replace")


def _number(value: bytes | None, missing: int) -> int:
    return missing if value is None or len(value) != 4 else int(struct.unpack("=i", value)[0])
