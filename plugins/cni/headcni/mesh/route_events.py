"""The kernel's announcements of changed links, addresses, routes and rules.

Each ADD makes a dozen of them. A filter in the kernel drops those about pods' links, because the
thread that reads them would take Python's lock from the threads that serve pods.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from ..datapath.netlink import NETLINK_ROUTE, attributes
from ..datapath.rtnl import (
    IFA_ADDRESS,
    IFA_LOCAL,
    IFLA_IFNAME,
    RT_TABLE_LOCAL,
    RTA_TABLE,
    RTM_NEWADDR,
    RTM_NEWLINK,
    RTM_NEWROUTE,
)
from .kernel_routes import ROUTE, RTM_DELROUTE, RTM_DELRULE, RTM_NEWRULE, read_link, read_rule
from .route_socket import RECEIVE_BYTES, SO_RCVBUFFORCE

RTM_DELLINK, RTM_DELADDR = 17, 21
# Bits of the groups LINK, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE, IPV6_RULE.
GROUPS = sum(1 << (group - 1) for group in (1, 5, 7, 8, 9, 11, 19))

SO_ATTACH_FILTER = 26
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE, _IF_EQUAL, _RETURN = 0x20, 0x28, 0x30, 0x15, 0x06
_KIND, _TABLE, _FIRST_ATTRIBUTE, _NAME = 4, 16 + 4, 16 + 16, 16 + 16 + 4  # in a message


def _loaded(form: str, *values: int) -> int:
    """As a classic BPF program sees these numbers: it loads them in network byte order."""
    return int.from_bytes(struct.pack(f"={form}", *values), "big")


def _name_of(length: int) -> int:
    """The header of an attribute with a name of that length."""
    return _loaded("HH", 4 + length + 1, IFLA_IFNAME)


# Operation, places to skip if equal and if not, operand. Pods' links are named by `link.host_name`
# and `link.limiter_of`; a new link also makes a route in the local table.
_FILTER = (
    (_LOAD_HALF, 0, 0, _KIND),
    (_IF_EQUAL, 3, 0, _loaded("H", RTM_NEWLINK)),
    (_IF_EQUAL, 2, 0, _loaded("H", RTM_DELLINK)),
    (_IF_EQUAL, 6, 0, _loaded("H", RTM_NEWROUTE)),
    (_IF_EQUAL, 5, 7, _loaded("H", RTM_DELROUTE)),
    (_LOAD_WORD, 0, 0, _FIRST_ATTRIBUTE),
    (_IF_EQUAL, 1, 0, _name_of(13)),
    (_IF_EQUAL, 0, 4, _name_of(14)),
    (_LOAD_HALF, 0, 0, _NAME),
    (_IF_EQUAL, 3, 2, int.from_bytes(b"hc", "big")),
    (_LOAD_BYTE, 0, 0, _TABLE),
    (_IF_EQUAL, 1, 0, RT_TABLE_LOCAL),
    (_RETURN, 0, 0, 0xFFFFFFFF),  # all of the message
    (_RETURN, 0, 0, 0),
)


class Interest(NamedTuple):
    """Which events matter. Pods' links come and go all day, and do not matter."""

    table: int
    priorities: frozenset[int]
    interface: str
    link: int
    addresses: frozenset[bytes]
    own_port: int  # of our own socket: our own changes are not news


class RouteEvents:
    """A socket that receives these announcements."""

    def __init__(self) -> None:
        self._socket = socket.socket(
            socket.AF_NETLINK,
            socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK,
            NETLINK_ROUTE,
        )
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BYTES)
        _leave_out_pods(self._socket)
        self._socket.bind((0, GROUPS))

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def matter(self, interest: Interest) -> bool:
        """Read all events that have arrived. True if any of them matters, or if events were lost
        because the buffer was full."""
        found = False
        while True:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                return found
            except OSError as problem:
                if problem.errno != errno.ENOBUFS:
                    raise
                found = True
                continue
            found = found or any(
                _matters(kind, body, interest) for kind, body in _news(data, interest)
            )


def _leave_out_pods(listener: socket.socket) -> None:
    """Without the filter these events are read, and do not matter either."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in _FILTER)
    program = ctypes.create_string_buffer(code, len(code))
    where = struct.pack("HP", len(_FILTER), ctypes.addressof(program))
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, where)


def _news(data: bytes, interest: Interest) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 16 <= len(data):
        length, kind, _unused, _unused, port = struct.unpack_from("=LHHLL", data, at)
        if length < 16:
            return
        if port != interest.own_port:
            yield kind, data[at + 16 : at + length]
        at += (length + 3) & ~3


def _matters(kind: int, body: bytes, interest: Interest) -> bool:
    if kind in (RTM_NEWLINK, RTM_DELLINK):
        link = read_link(body)
        return link.name == interest.interface or link.number == interest.link
    if kind in (RTM_NEWROUTE, RTM_DELROUTE):
        wanted = RTA_TABLE, interest.table
        return any(
            (attr, struct.unpack("=I", value)[0]) == wanted
            for attr, value in attributes(body[ROUTE.size :])
            if attr == RTA_TABLE
        )
    if kind in (RTM_NEWRULE, RTM_DELRULE):
        return read_rule(body).priority in interest.priorities
    if kind in (RTM_NEWADDR, RTM_DELADDR):
        return any(
            attr in (IFA_ADDRESS, IFA_LOCAL) and value in interest.addresses
            for attr, value in attributes(body[8:])
        )
    return False
