"""The links of a network namespace, and their addresses."""

from __future__ import annotations

import _socket as socket  # without what `socket` imports
import struct
from ipaddress import ip_address

from ..record import NamedTuple
from . import rtnl
from .netlink import Netlink, Request, attributes

RTM_GETLINK, RTM_GETADDR = 18, 22
LINK = struct.Struct("=BxHiII")
ADDRESS = struct.Struct("=BBBBi")


class Link(NamedTuple):
    number: int
    up: bool
    master: int = 0


def links(kernel: Netlink) -> dict[str, Link]:
    found = {}
    question = Request(RTM_GETLINK, 0, LINK.pack(0, 0, 0, 0, 0), "list the links")
    for body in kernel.dump(question):
        _unused, _unused, index, flags, _unused = LINK.unpack_from(body)
        have = dict(attributes(body[LINK.size :]))
        name = have.get(rtnl.IFLA_IFNAME, b"").rstrip(b"\0").decode(errors="replace")
        (master,) = struct.unpack("=I", have.get(rtnl.IFLA_MASTER, bytes(4)))
        found[name] = Link(index, bool(flags & rtnl.IFF_UP), master)
    return found


def addresses(kernel: Netlink) -> dict[int, list[str]]:
    """The addresses of each link, with their prefix lengths, in the kernel's order."""
    found: dict[int, list[str]] = {}
    question = Request(RTM_GETADDR, 0, ADDRESS.pack(0, 0, 0, 0, 0), "list the addresses")
    for body in kernel.dump(question):
        family, prefix, _unused, _unused, index = ADDRESS.unpack_from(body)
        have = dict(attributes(body[ADDRESS.size :]))
        packed = have.get(rtnl.IFA_LOCAL) or have.get(rtnl.IFA_ADDRESS)
        if packed and family in (socket.AF_INET, socket.AF_INET6):
            found.setdefault(index, []).append(f"{ip_address(packed)}/{prefix}")
    return found
