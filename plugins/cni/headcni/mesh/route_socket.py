"""Reading our routing table and rules from the kernel, and sending many changes at once."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Optional

from ..datapath.netlink import (
    NETLINK_ROUTE,
    NLM_F_ACK,
    NLMSG_ERROR,
    SOL_NETLINK,
    KernelError,
    Netlink,
    Request,
    attribute,
    text,
    u32,
)
from ..datapath.rtnl import IFLA_IFNAME, RTA_DST, RTA_TABLE, RTPROT_HEADCNI
from .kernel_routes import (
    ROUTE,
    RTM_GETROUTE,
    RULE,
    Link,
    Route,
    Rule,
    read_link,
    read_route,
    read_rule,
)

RTM_GETLINK, RTM_GETRULE = 18, 34
RTN_LOCAL = 2
NETLINK_GET_STRICT_CHK = 12
SO_RCVBUFFORCE = 33

# A send of this size holds about a thousand routes. The kernel processes all of it before it
# returns, so the receive buffer must have room for the answers even if it refuses every message.
SEND_BYTES = 96 * 1024
RECEIVE_BYTES = 4 * 1024 * 1024


class RouteSocket(Netlink):
    """Route netlink in the network namespace in which it is opened."""

    def __init__(self) -> None:
        super().__init__(NETLINK_ROUTE)
        self._socket.setsockopt(SOL_NETLINK, NETLINK_GET_STRICT_CHK, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BYTES)
        self._socket.bind((0, 0))

    def send(self, requests: Sequence[Request]) -> list[KernelError]:
        """Send all requests, even if some fail. Returns those that the kernel refused.

        Only the last request of a send asks for an acknowledgement, because refusals are reported
        anyway: thousands of acknowledgements would fill the socket's buffer meanwhile.
        """
        failures: list[KernelError] = []
        for part in _sends(requests):
            first = self._sequence + 1
            last = part[-1]
            self._send([*part[:-1], last._replace(flags=last.flags | NLM_F_ACK)], 0)
            done = False
            while not done:
                for kind, sequence, body in self._receive():
                    if kind != NLMSG_ERROR or not first <= sequence <= self._sequence:
                        continue
                    request = part[sequence - first]
                    (number,) = struct.unpack_from("=i", body)
                    if number and -number not in request.fine:
                        failures.append(KernelError(-number, request, ""))
                    done = done or sequence == self._sequence
        return failures

    def routes(self, table: int) -> list[Route]:
        """The routes of a table, of both families."""
        return [read_route(body) for body in self.table(table)]

    def table(self, table: int) -> list[bytes]:
        """The same routes as raw messages: two tables with the same messages are the same."""
        found: list[bytes] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            body = ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0) + u32(RTA_TABLE, table)
            answers = self.dump(Request(RTM_GETROUTE, 0, body, f"list table {table}"))
            found += [answer for answer in answers if answer[0] == family]
        return found

    def rules(self) -> list[Rule]:
        """The rules with HeadCNI's protocol number, of both families."""
        found = []
        for family in (socket.AF_INET, socket.AF_INET6):
            body = RULE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)
            for answer in self.dump(Request(RTM_GETRULE, 0, body, "list the rules")):
                rule = read_rule(answer) if answer[0] == family else None
                if rule is not None and rule.protocol == RTPROT_HEADCNI:
                    found.append(rule)
        return found

    def link(self, name: str = "", index: int = 0) -> Optional[Link]:
        """By name, or by index."""
        body = struct.pack("=BxHiII", 0, 0, index, 0, 0)
        if name:
            body += text(IFLA_IFNAME, name)
        answer = self.ask(Request(RTM_GETLINK, 0, body, f"look at {name or index}"))
        return None if answer is None else read_link(answer)

    def is_local(self, address: bytes) -> bool:
        """Whether the address is an address of this node."""
        family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
        body = ROUTE.pack(family, len(address) * 8, 0, 0, 0, 0, 0, 0, 0)
        body += attribute(RTA_DST, address)
        try:
            answer = self.ask(Request(RTM_GETROUTE, 0, body, "look up an address"))
        except KernelError:
            return False  # there is no route to it
        return answer is not None and answer[7] == RTN_LOCAL


def _sends(requests: Sequence[Request]) -> Iterator[Sequence[Request]]:
    start = size = 0
    for at, request in enumerate(requests):
        if size and size + len(request.body) + 16 > SEND_BYTES:
            yield requests[start:at]
            start, size = at, 0
        size += len(request.body) + 16
    if size:
        yield requests[start:]
