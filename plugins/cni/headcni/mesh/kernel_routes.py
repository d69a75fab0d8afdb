"""Routes, rules and links as the kernel has them, and the netlink messages that change them."""

from __future__ import annotations

import errno
import socket
import struct
from functools import lru_cache
from typing import NamedTuple

from ..datapath.netlink import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    Request,
    attribute,
    attributes,
    nested,
    u8,
    u32,
)
from ..datapath.rtnl import (
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
    RTM_NEWROUTE,
    RTN_UNICAST,
    RTPROT_HEADCNI,
)
from .prefix import Prefix

RTM_DELROUTE, RTM_GETROUTE = 25, 26
RTM_NEWRULE, RTM_DELRULE = 32, 33
FRA_DST, FRA_PRIORITY, FRA_SUPPRESS_PREFIXLEN, FRA_TABLE, FRA_PROTOCOL = 1, 6, 14, 15, 21
FR_ACT_TO_TBL = 1
RTN_UNREACHABLE = 7
LOOPBACK = 1  # the index of `lo` in every network namespace
IP6_METRIC = 1024  # the metric that the kernel gives to an IPv6 route without one
REMEMBERED = 8192

ROUTE = struct.Struct("=BBBBBBBBI")
RULE = struct.Struct("=BBBBBBBBI")


class Route(NamedTuple):
    """A route of our table. Addresses are packed; b"" means none, and an MTU of 0 too."""

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
        """What identifies a route within a table."""
        return self.dst, self.metric

    def __str__(self) -> str:
        return str(self.dst)


class Rule(NamedTuple):
    """`to dst lookup table suppress_prefixlength suppress`. Routes with a prefix of at most
    `suppress` bits are ignored; -1 ignores none."""

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
    """A route into the tunnel, exactly as the kernel shows it afterwards."""
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
    """A route that refuses packets, exactly as the kernel shows it afterwards."""
    four = dst.family == socket.AF_INET
    return Route(
        dst,
        0 if four else LOOPBACK,
        metric=0 if four else IP6_METRIC,
        kind=RTN_UNREACHABLE,
    )


def put_route(route: Route, table: int) -> Request:
    """Add a route or replace the one with the same key, so that there is always a route."""
    flags = NLM_F_CREATE | NLM_F_REPLACE
    return Request(RTM_NEWROUTE, flags, _route_body(route, table), f"route {route.dst}")


def delete_route(route: Route, table: int) -> Request:
    body = _route_body(route, table)
    return Request(
        RTM_DELROUTE, 0, body, f"delete the route {route.dst}", fine=(errno.ESRCH, errno.ENODEV)
    )


def _route_body(route: Route, table: int) -> bytes:
    dst = route.dst
    body = ROUTE.pack(
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
    body = RULE.pack(rule.dst.family, rule.dst.length, 0, 0, 0, 0, 0, rule.action, 0)
    body += u32(FRA_PRIORITY, rule.priority) + u32(FRA_TABLE, rule.table)
    body += u8(FRA_PROTOCOL, rule.protocol)
    if rule.dst.length:
        body += attribute(FRA_DST, rule.dst.address)
    if rule.suppress >= 0:
        body += u32(FRA_SUPPRESS_PREFIXLEN, rule.suppress)
    return body


@lru_cache(maxsize=REMEMBERED)
def read_route(body: bytes) -> Route:
    """Cached, because most routes of a large table are the same as the last time."""
    family, length, _unused, _unused, _unused, protocol, scope, kind, _unused = ROUTE.unpack_from(
        body
    )
    address = bytes(4 if family == socket.AF_INET else 16)
    gateway = source = b""
    index = mtu = metric = 0
    for attr, value in attributes(body[ROUTE.size :]):
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


def read_rule(body: bytes) -> Rule:
    family, length, _unused, _unused, table, _unused, _unused, action, _unused = RULE.unpack_from(
        body
    )
    address = bytes(4 if family == socket.AF_INET else 16)
    priority = protocol = 0
    suppress = -1
    for attr, value in attributes(body[RULE.size :]):
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


def read_link(body: bytes) -> Link:
    _unused, _unused, index, flags, _unused = struct.unpack_from("=BxHiII", body)
    name = b""
    for attr, value in attributes(body[16:]):
        if attr == IFLA_IFNAME:
            name = value
            break  # it is the first of some sixty
    return Link(index, name.rstrip(b"\0").decode(errors="replace"), bool(flags & IFF_UP))
