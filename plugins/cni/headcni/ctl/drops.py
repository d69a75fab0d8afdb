"""Which rule drops a packet: nftables' own tracing tells it, so conditions need not be interpreted.

A rule of ours marks the packets between two addresses for a moment. The older iptables
(iptables-legacy) does not take part in this.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Callable, NamedTuple, Optional

from ..datapath import nft
from ..datapath.host_firewall.chains import FAMILIES
from ..datapath.netlink import NETLINK_NETFILTER, attributes
from ..errors import CniError
from ..model import Address
from .finding import Finding

TABLE = "headcni-trace"
MOST_MESSAGES = 10_000
_SOL_NETLINK, _ADD_MEMBERSHIP, _NFNLGRP_NFTRACE = 270, 1, 9
_TRACE = nft.NFNL_SUBSYS_NFTABLES << 8 | 17
_TABLE, _CHAIN, _HANDLE, _TYPE, _VERDICT, _POLICY = 1, 2, 3, 4, 5, 17
_BY_POLICY, _BY_RULE, _NF_DROP = 1, 3, 0
_HEADER = struct.Struct("=IHHII")


class Dropped(NamedTuple):
    """Where a packet ended. A handle of 0 stands for the policy of the chain."""

    chain: str  # family, table and name
    handle: int

    def __str__(self) -> str:
        what = f"the rule with handle {self.handle}" if self.handle else "the policy"
        return f"{what} of the nft chain {self.chain}"

    @property
    def command(self) -> str:
        if self.chain.split()[1].startswith("headcni"):
            return ""  # our own rules follow from policies and settings
        if self.handle:
            return f"nft delete rule {self.chain} handle {self.handle}"
        return f"nft chain {self.chain} '{{ policy accept; }}'"

    def finding(self, whose: str) -> Finding:
        return Finding(
            "dropped-by-rule",
            f"{self} drops {whose}",
            "the packets do not pass. If that is not what the rule is for, the command removes it: "
            "find the program that adds it",
            self.command,
        )


@contextmanager
def watched(src: Address, dst: Address) -> Iterator[Callable[[], Optional[Dropped]]]:
    """While it lasts, the kernel traces the packets between two addresses that arrive at the node's
    network namespace. The function returns where one of them was dropped."""
    family = "ip" if src.version == 4 else "ip6"
    add = f"add rule inet {TABLE} chosen"
    rules = "\n".join(
        f"{add} {family} saddr {one} {family} daddr {other} meta nftrace set 1"
        for one, other in ((src, dst), (dst, src))
    )
    hook = "{ type filter hook prerouting priority -450; }"
    listener = socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER
    )
    with closing(listener):
        listener.bind((0, 0))
        listener.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _NFNLGRP_NFTRACE)
        listener.setblocking(False)
        nft.run(f"add table inet {TABLE}\nadd chain inet {TABLE} chosen {hook}\n{rules}")
        try:
            yield lambda: _first(listener)
        finally:
            with suppress(CniError):  # another headcnictl has just deleted it
                nft.run(f"delete table inet {TABLE}")


def _first(listener: socket.socket) -> Optional[Dropped]:
    for _unused in range(MOST_MESSAGES):
        try:
            data = listener.recv(65536)
        except BlockingIOError:
            return None
        except OSError:  # more than the buffer holds; the rest is still there
            continue
        at = 0
        while at + _HEADER.size <= len(data):
            length, kind, *_rest = _HEADER.unpack_from(data, at)
            if kind == _TRACE and (found := _dropped(data[at + _HEADER.size : at + length])):
                return found
            at += max(length + 3 & ~3, _HEADER.size)
    return None


def _dropped(body: bytes) -> Optional[Dropped]:
    have = dict(attributes(body[4:]))
    kind = int.from_bytes(have.get(_TYPE, b""), "big")
    if kind == _BY_RULE:
        verdict = dict(attributes(have.get(_VERDICT, b"")))
        drops = int.from_bytes(verdict.get(1, b"\1"), "big") & 0xFF == _NF_DROP
    elif kind == _BY_POLICY:
        drops = int.from_bytes(have.get(_POLICY, b"\1"), "big") == _NF_DROP
    else:
        return None
    if not drops:
        return None
    table, chain = (have.get(key, b"").rstrip(b"\0").decode() for key in (_TABLE, _CHAIN))
    handle = int.from_bytes(have.get(_HANDLE, b""), "big") if kind == _BY_RULE else 0
    return Dropped(f"{FAMILIES.get(body[0], 'inet')} {table} {chain}", handle)
