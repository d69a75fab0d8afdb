"""The kernel's announcements of changed links, addresses, routes and rules."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from ..datapath.netlink import NETLINK_ROUTE, attributes
from ..datapath.rtnl import (
    IFA_ADDRESS,
    IFA_LOCAL,
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
