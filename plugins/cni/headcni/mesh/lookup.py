"""What the kernel does with a packet: its own answer, and the rules that lead to it."""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import NamedTuple, Union

from ..datapath.netlink import KernelError, Netlink, Request, attribute, attributes, u32
from ..datapath.rtnl import (
    RT_TABLE_MAIN,
    RTA_DST,
    RTA_GATEWAY,
    RTA_METRICS,
    RTA_OIF,
    RTA_TABLE,
    RTAX_MTU,
    RTN_UNICAST,
    RTPROT_HEADCNI,
)
from ..model import Address
from .kernel_routes import ROUTE, RTM_GETROUTE, RTN_UNREACHABLE, RULE
from .prefix import Prefix

RTM_GETRULE = 34
RTA_SRC, RTA_IIF = 2, 3
RTM_F_LOOKUP_TABLE, RTM_F_FIB_MATCH = 0x1000, 0x2000
RTN_LOCAL = 2
FRA_DST, FRA_SRC, FRA_IIF, FRA_PRIORITY, FRA_MARK = 1, 2, 3, 6, 10
FRA_TABLE, FRA_MASK, FRA_OIF, FRA_PROTOCOL = 15, 16, 17, 21
# Conditions on the transport protocol and its ports, the tunnel and the user.
_OTHER_CONDITIONS = frozenset((12, 20, 22, 23, 24))
_INVERTED = 2
_LOCAL_RULE = 0  # the priority of the rule that looks up the node's own addresses
ACTIONS = {1: "lookup", 2: "goto", 3: "nop", 6: "blackhole", 7: "unreachable", 8: "prohibit"}
PASSING = ("goto", "nop")
_NAMES = {253: "default", 254: "main", 255: "local"}
_WHY = {
    errno.EHOSTUNREACH: "the kernel refuses it (unreachable, or it does not forward)",
    errno.ENETUNREACH: "there is no route",
    errno.EXDEV: "rp_filter drops it: the way back leads to another interface",
    errno.EACCES: "a rule or route prohibits it",
    errno.EINVAL: "a rule or route drops it",
}


class Decision(NamedTuple):
    """The route that the kernel uses. `problem` says why there is none."""

    table: int = 0
    kind: int = RTN_UNICAST
    link: int = 0
    gateway: bytes = b""
    prefix: str = ""
    mtu: int = 0
    problem: str = ""

    @property
    def is_local(self) -> bool:
        return self.kind == RTN_LOCAL

    @property
    def is_refused(self) -> bool:
        return bool(self.problem) or self.kind not in (RTN_UNICAST, RTN_LOCAL)


def decide(
    kernel: Netlink, dst: Address, src: Union[Address, None] = None, came_by: int = 0
) -> Decision:
    """What happens to a packet in the current network namespace. With `came_by`, the index of a
    link, it is one that arrived there; without, one that the node sends."""
    family, bits = _family(dst), dst.max_prefixlen
    source = src is not None and src.version == dst.version
    flags = RTM_F_LOOKUP_TABLE | RTM_F_FIB_MATCH
    body = ROUTE.pack(family, bits, bits if source else 0, 0, 0, 0, 0, 0, flags)
    body += attribute(RTA_DST, dst.packed)
    if source and src is not None:
        body += attribute(RTA_SRC, src.packed)
    if came_by:
        body += u32(RTA_IIF, came_by)
    try:
        answer = kernel.ask(Request(RTM_GETROUTE, 0, body, f"look up {dst}"))
    except KernelError as problem:
        said = _WHY.get(problem.errno, os.strerror(problem.errno))
        return Decision(kind=RTN_UNREACHABLE, problem=said)
    if answer is None:
        return Decision(kind=RTN_UNREACHABLE, problem="there is no route")
    _unused, length, _unused, _unused, table, _unused, _unused, kind, _unused = ROUTE.unpack_from(
        answer
    )
    have = dict(attributes(answer[ROUTE.size :]))
    address = have.get(RTA_DST, bytes(bits // 8))
    metrics = dict(attributes(have.get(RTA_METRICS, b"")))
    return Decision(
        _number(have.get(RTA_TABLE), table),
        kind,
        _number(have.get(RTA_OIF), 0),
        have.get(RTA_GATEWAY, b""),
        str(Prefix(family, address, length)),
        _number(metrics.get(RTAX_MTU), 0),
    )


class AnyRule(NamedTuple):
    """A routing rule of any program. Empty prefixes and names match everything."""

    priority: int
    family: int
    src: str
    dst: str
    came_by: str
    goes_by: str
    mark: int
    mask: int
    table: int
    action: str
    inverted: bool
    limited: bool  # by conditions that are not looked at here
    ours: bool

    def may_match(self, dst: Address, src: Union[Address, None], came_by: str) -> bool:
        """Whether a packet without a mark matches, if the conditions that are not looked at do."""
        if self.family != _family(dst) or (self.mark & self.mask):
            return False
        fits = (
            _covers(self.dst, dst)
            and (not self.src or (src is not None and _covers(self.src, src)))
            and self.came_by in ("", came_by)
            and not self.goes_by
        )
        return fits is not self.inverted

    def command(self, verb: str = "del") -> str:
        """The command that adds or deletes this rule."""
        words = ["ip", *(["-6"] if self.family == socket.AF_INET6 else []), "rule", verb]
        words += ["not"] if self.inverted else []
        words += ["pref", str(self.priority)]
        for name, value in (
            ("from", self.src),
            ("to", self.dst),
            ("iif", self.came_by),
            ("oif", self.goes_by),
        ):
            words += [name, value] if value else []
        if self.mark or self.mask:
            words += ["fwmark", f"{self.mark:#x}/{self.mask:#x}"]
        table = _NAMES.get(self.table, str(self.table))
        words += ["lookup", table] if self.action == "lookup" else [self.action]
        return " ".join(words)


def rules(kernel: Netlink) -> list[AnyRule]:
    """All rules of both families, in the order in which the kernel asks them."""
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        body = RULE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)
        for answer in kernel.dump(Request(RTM_GETRULE, 0, body, "list the rules")):
            if answer[0] == family:
                found.append(_rule(answer))
    return sorted(found, key=lambda rule: rule.priority)


def above(
    kernel: Netlink, dst: Address, src: Union[Address, None], came_by: str, priority: int
) -> list[AnyRule]:
    """The rules of others that the kernel asks before ours and that may decide on this packet."""
    return [
        rule
        for rule in rules(kernel)
        if _LOCAL_RULE < rule.priority < priority
        and not rule.ours
        and rule.action not in PASSING
        and rule.may_match(dst, src, came_by)
    ]


def _rule(body: bytes) -> AnyRule:
    family, to, of, _unused, table, _unused, _unused, action, flags = RULE.unpack_from(body)
    have = dict(attributes(body[RULE.size :]))
    mark = _number(have.get(FRA_MARK), 0)
    return AnyRule(
        priority=_number(have.get(FRA_PRIORITY), 0),
        family=family,
        src=str(Prefix(family, have[FRA_SRC], of)) if FRA_SRC in have else "",
        dst=str(Prefix(family, have[FRA_DST], to)) if FRA_DST in have else "",
        came_by=_text(have.get(FRA_IIF)),
        goes_by=_text(have.get(FRA_OIF)),
        mark=mark,
        mask=_number(have.get(FRA_MASK), 0xFFFFFFFF if mark else 0),
        table=_number(have.get(FRA_TABLE), table),
        action=ACTIONS.get(action, str(action)),
        inverted=bool(flags & _INVERTED),
        limited=not _OTHER_CONDITIONS.isdisjoint(have),
        ours=have.get(FRA_PROTOCOL, b"\0")[0] == RTPROT_HEADCNI,
    )


def table_name(number: int) -> str:
    return _NAMES.get(number or RT_TABLE_MAIN, str(number))


def _covers(prefix: str, address: Address) -> bool:
    return not prefix or Prefix.parse(prefix).covers(Prefix.parse(str(address)))


def _family(address: Address) -> int:
    return int(socket.AF_INET if address.version == 4 else socket.AF_INET6)


def _number(value: Union[bytes, None], missing: int) -> int:
    return missing if value is None or len(value) != 4 else int(struct.unpack("=I", value)[0])


def _text(value: Union[bytes, None]) -> str:
    return (value or b"").rstrip(b"\0").decode(errors="replace")
