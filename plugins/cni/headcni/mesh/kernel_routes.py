"""The kernel's side of the mesh: our table and rules as they stand, many changes in one send, and
the events that say that something moved."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, Optional

from ..datapath.netlink import (
    NETLINK_ROUTE,
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    NLMSG_ERROR,
    SOL_NETLINK,
    KernelError,
    Netlink,
    Request,
    attribute,
    attributes,
    nested,
    text,
    u8,
    u32,
)
from ..datapath.rtnl import (
    IFA_ADDRESS,
    IFA_LOCAL,
    IFF_UP,
    IFLA_IFNAME,
    RT_SCOPE_LINK,
    RT_SCOPE_UNIVERSE,
    RTA_DST,
    RTA_GATEWAY,
    RTA_METRICS,
    RTA_OIF,
    RTA_PREFSRC,
    RTA_PRIORITY,
    RTA_TABLE,
    RTAX_MTU,
    RTM_NEWADDR,
    RTM_NEWLINK,
    RTM_NEWROUTE,
    RTN_UNICAST,
    RTPROT_HEADCNI,
)

RTM_DELLINK, RTM_GETLINK, RTM_DELADDR = 17, 18, 21
RTM_DELROUTE, RTM_GETROUTE = 25, 26
RTM_NEWRULE, RTM_DELRULE, RTM_GETRULE = 32, 33, 34
FRA_DST, FRA_PRIORITY, FRA_SUPPRESS_PREFIXLEN, FRA_TABLE, FRA_PROTOCOL = 1, 6, 14, 15, 21
FR_ACT_TO_TBL = 1
RTN_LOCAL, RTN_UNREACHABLE = 2, 7
LOOPBACK = 1  # the number of `lo` in every network namespace
IP6_METRIC = 1024  # what IPv6 makes of a route that was given none
NETLINK_GET_STRICT_CHK = 12
SO_RCVBUFFORCE = 33
# Bits of the groups LINK, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE, IPV6_RULE.
GROUPS = sum(1 << (group - 1) for group in (1, 5, 7, 8, 9, 11, 19))

# A send of this size is some thousand routes. The kernel works through it before it returns, and
# the answers of even the worst send (each message refused) must have room meanwhile.
SEND_BYTES = 96 * 1024
RECEIVE_BYTES = 4 * 1024 * 1024
REMEMBERED = 8192

_ROUTE = struct.Struct("=BBBBBBBBI")
_RULE = struct.Struct("=BBBBBBBBI")


class Prefix(NamedTuple):
    """A network, small and quick to compare: there may be thousands, read every half minute."""

    family: int
    address: bytes
    length: int

    @classmethod
    def parse(cls, cidr: str) -> Prefix:
        address, _unused, length = cidr.partition("/")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        packed = socket.inet_pton(family, address)
        return cls(family, packed, int(length) if length else len(packed) * 8)

    def covers(self, other: Prefix) -> bool:
        if self.family != other.family or self.length > other.length:
            return False
        whole, bits = divmod(self.length, 8)
        if self.address[:whole] != other.address[:whole]:
            return False
        return not bits or (self.address[whole] ^ other.address[whole]) >> (8 - bits) == 0

    def overlaps(self, other: Prefix) -> bool:
        return self.covers(other) or other.covers(self)

    def shortened(self, length: int) -> Prefix:
        """The network of this length that it lies in; of its own length, without host bits."""
        host_bits = len(self.address) * 8 - length
        number = int.from_bytes(self.address, "big") >> host_bits << host_bits
        return Prefix(self.family, number.to_bytes(len(self.address), "big"), length)

    def __str__(self) -> str:
        return f"{socket.inet_ntop(self.family, self.address)}/{self.length}"


class Route(NamedTuple):
    """A route of our table. Addresses are packed, b"" where there is none; 0 is no MTU."""

    dst: Prefix
    link: int
    gateway: bytes = b""
    source: bytes = b""
    mtu: int = 0
    metric: int = 0
    scope: int = RT_SCOPE_UNIVERSE
    kind: int = RTN_UNICAST
    protocol: int = RTPROT_HEADCNI

    @property
    def key(self) -> tuple[Prefix, int]:
        """What the kernel tells routes of one table apart by."""
        return self.dst, self.metric

    def __str__(self) -> str:
        return str(self.dst)


class Rule(NamedTuple):
    """`to dst lookup table suppress_prefixlength suppress`. Routes with a prefix of at most
    `suppress` bits are passed over; -1 passes over none."""

    priority: int
    dst: Prefix
    table: int
    action: int = FR_ACT_TO_TBL
    protocol: int = RTPROT_HEADCNI
    suppress: int = -1

    def __str__(self) -> str:
        return f"rule {self.priority} to {self.dst}"


class Link(NamedTuple):
    number: int
    name: str
    up: bool


def tunnel_route(dst: Prefix, link: int, gateway: bytes, source: bytes, mtu: int) -> Route:
    """A route as the kernel will show it once it has it."""
    four = dst.family == socket.AF_INET
    return Route(
        dst,
        link,
        gateway,
        source,
        mtu,
        metric=0 if four else IP6_METRIC,
        scope=RT_SCOPE_LINK if four and not gateway else RT_SCOPE_UNIVERSE,
    )


def unreachable_route(dst: Prefix) -> Route:
    """A route that refuses packets, as the kernel will show it once it has it."""
    four = dst.family == socket.AF_INET
    return Route(
        dst,
        0 if four else LOOPBACK,
        metric=0 if four else IP6_METRIC,
        kind=RTN_UNREACHABLE,
    )


def put_route(route: Route, table: int) -> Request:
    """In place of one with the same key, if there is one: no packet finds neither."""
    flags = NLM_F_CREATE | NLM_F_REPLACE
    return Request(RTM_NEWROUTE, flags, _route_body(route, table), f"route {route.dst}")


def delete_route(route: Route, table: int) -> Request:
    body = _route_body(route, table)
    return Request(
        RTM_DELROUTE, 0, body, f"delete the route {route.dst}", fine=(errno.ESRCH, errno.ENODEV)
    )


def _route_body(route: Route, table: int) -> bytes:
    dst = route.dst
    body = _ROUTE.pack(
        dst.family, dst.length, 0, 0, 0, route.protocol, route.scope, route.kind, 0
    ) + u32(RTA_TABLE, table)
    if dst.length:
        body += attribute(RTA_DST, dst.address)
    if route.link:
        body += u32(RTA_OIF, route.link)
    if route.gateway:
        body += attribute(RTA_GATEWAY, route.gateway)
    if route.source:
        body += attribute(RTA_PREFSRC, route.source)
    if route.metric:
        body += u32(RTA_PRIORITY, route.metric)
    if route.mtu:
        body += nested(RTA_METRICS, u32(RTAX_MTU, route.mtu))
    return body


def add_rule(rule: Rule) -> Request:
    flags = NLM_F_CREATE | NLM_F_EXCL
    return Request(RTM_NEWRULE, flags, _rule_body(rule), f"add the {rule}", fine=(errno.EEXIST,))


def delete_rule(rule: Rule) -> Request:
    return Request(
        RTM_DELRULE, 0, _rule_body(rule), f"delete the {rule}", fine=(errno.ENOENT, errno.ESRCH)
    )


def _rule_body(rule: Rule) -> bytes:
    body = _RULE.pack(rule.dst.family, rule.dst.length, 0, 0, 0, 0, 0, rule.action, 0)
    body += u32(FRA_PRIORITY, rule.priority) + u32(FRA_TABLE, rule.table)
    body += u8(FRA_PROTOCOL, rule.protocol)
    if rule.dst.length:
        body += attribute(FRA_DST, rule.dst.address)
    if rule.suppress >= 0:
        body += u32(FRA_SUPPRESS_PREFIXLEN, rule.suppress)
    return body


class RouteSocket(Netlink):
    """Route netlink in the namespace that the calling thread is in when it begins."""

    def __init__(self) -> None:
        super().__init__(NETLINK_ROUTE)
        self._socket.setsockopt(SOL_NETLINK, NETLINK_GET_STRICT_CHK, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BYTES)
        self._socket.bind((0, 0))
        self.port: int = self._socket.getsockname()[0]

    def send(self, requests: Sequence[Request]) -> list[KernelError]:
        """All of them, whatever becomes of some; those that the kernel refused.

        Only the last of a send is acknowledged, for refusals are told in any case: thousands of
        acknowledgements would fill the socket's buffer while the kernel is still at work.
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
        """What the table has, of both families."""
        return [read_route(body) for body in self.table(table)]

    def table(self, table: int) -> list[bytes]:
        """The same, as the kernel spells it: two tables that are spelled alike are alike."""
        found: list[bytes] = []
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0) + u32(RTA_TABLE, table)
            answers = self.dump(Request(RTM_GETROUTE, 0, body, f"list table {table}"))
            found += [answer for answer in answers if answer[0] == family]
        return found

    def rules(self) -> list[Rule]:
        """Those with HeadCNI's mark, of both families."""
        found = []
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _RULE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)
            for answer in self.dump(Request(RTM_GETRULE, 0, body, "list the rules")):
                rule = _rule(answer) if answer[0] == family else None
                if rule is not None and rule.protocol == RTPROT_HEADCNI:
                    found.append(rule)
        return found

    def link(self, name: str = "", index: int = 0) -> Optional[Link]:
        """By name, or by index."""
        body = struct.pack("=BxHiII", 0, 0, index, 0, 0)
        if name:
            body += text(IFLA_IFNAME, name)
        answer = self.ask(Request(RTM_GETLINK, 0, body, f"look at {name or index}"))
        return None if answer is None else _link(answer)

    def is_local(self, address: bytes) -> bool:
        """True if the node has the address itself."""
        family = socket.AF_INET if len(address) == 4 else socket.AF_INET6
        body = _ROUTE.pack(family, len(address) * 8, 0, 0, 0, 0, 0, 0, 0)
        body += attribute(RTA_DST, address)
        try:
            answer = self.ask(Request(RTM_GETROUTE, 0, body, "look up an address"))
        except KernelError:
            return False  # no route to it at all
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


@lru_cache(maxsize=REMEMBERED)
def read_route(body: bytes) -> Route:
    """Of a table of thousands, most read as they did the last time."""
    family, length, _unused, _unused, _unused, protocol, scope, kind, _unused = _ROUTE.unpack_from(
        body
    )
    address = bytes(4 if family == socket.AF_INET else 16)
    gateway = source = b""
    index = mtu = metric = 0
    for attr, value in attributes(body[_ROUTE.size :]):
        if attr == RTA_DST:
            address = value
        elif attr == RTA_OIF:
            (index,) = struct.unpack("=I", value)
        elif attr == RTA_GATEWAY:
            gateway = value
        elif attr == RTA_PREFSRC:
            source = value
        elif attr == RTA_PRIORITY:
            (metric,) = struct.unpack("=I", value)
        elif attr == RTA_METRICS:
            for name, number in attributes(value):
                if name == RTAX_MTU:
                    (mtu,) = struct.unpack("=I", number)
    dst = Prefix(family, address, length)
    return Route(dst, index, gateway, source, mtu, metric, scope, kind, protocol)


def _rule(body: bytes) -> Rule:
    family, length, _unused, _unused, table, _unused, _unused, action, _unused = _RULE.unpack_from(
        body
    )
    address = bytes(4 if family == socket.AF_INET else 16)
    priority = protocol = 0
    suppress = -1
    for attr, value in attributes(body[_RULE.size :]):
        if attr == FRA_DST:
            address = value
        elif attr == FRA_PRIORITY:
            (priority,) = struct.unpack("=I", value)
        elif attr == FRA_TABLE:
            (table,) = struct.unpack("=I", value)
        elif attr == FRA_PROTOCOL:
            protocol = value[0]
        elif attr == FRA_SUPPRESS_PREFIXLEN:
            (suppress,) = struct.unpack("=i", value)
    return Rule(priority, Prefix(family, address, length), table, action, protocol, suppress)


def _link(body: bytes) -> Link:
    _unused, _unused, index, flags, _unused = struct.unpack_from("=BxHiII", body)
    name = b""
    for attr, value in attributes(body[16:]):
        if attr == IFLA_IFNAME:
            name = value
            break  # it is the first of some sixty
    return Link(index, name.rstrip(b"\0").decode(errors="replace"), bool(flags & IFF_UP))


class Interest(NamedTuple):
    """Which events matter. Pods' links come and go all day, and are not among them."""

    table: int
    priorities: frozenset[int]
    interface: str
    link: int
    addresses: frozenset[bytes]
    own_port: int  # what we changed ourselves is no news


class RouteEvents:
    """The kernel's announcements of links, addresses, routes and rules."""

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
        """Take all that has come in; True if any of it is of interest. Where events were lost for
        want of room, one of them may have been."""
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
        link = _link(body)
        return link.name == interest.interface or link.number == interest.link
    if kind in (RTM_NEWROUTE, RTM_DELROUTE):
        wanted = RTA_TABLE, interest.table
        return any(
            (attr, struct.unpack("=I", value)[0]) == wanted
            for attr, value in attributes(body[_ROUTE.size :])
            if attr == RTA_TABLE
        )
    if kind in (RTM_NEWRULE, RTM_DELRULE):
        return _rule(body).priority in interest.priorities
    if kind in (RTM_NEWADDR, RTM_DELADDR):
        return any(
            attr in (IFA_ADDRESS, IFA_LOCAL) and value in interest.addresses
            for attr, value in attributes(body[8:])
        )
    return False


def packed(addresses: Iterable[object]) -> dict[int, bytes]:
    """One address for each family."""
    found = {}
    for address in addresses:
        one = Prefix.parse(str(address))
        found[one.family] = one.address
    return found
