"""The kernel's side of the policies: one nft table, changed in transactions.

While the daemon runs, the table belongs to its socket: nobody else can change or flush it. When the
daemon ends, however it ends, the table stays with all its rules, and processes of ADD and DEL can
change it. That needs Linux 6.9; older kernels have an ordinary table, which the daemon restores
when somebody else has changed it.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Optional

from ..datapath import nft_objects as nft
from ..datapath.netlink import NETLINK_NETFILTER, KernelError, Netlink, Request, attributes
from .desired import Change, Desired
from .layout import COMMENT, LINKS, TABLE, link_key

LARGEST = 256 << 20  # bytes of one transaction
_MOST_NAMED = 5

_NO_FLAGS = (errno.EOPNOTSUPP, errno.EINVAL)


class PolicyTable:
    """One conversation with nftables, and the table if it belongs to us."""

    def __init__(self) -> None:
        self.netlink = Netlink(NETLINK_NETFILTER)
        self.netlink.send_up_to(LARGEST)
        self._flags = nft.OWNER | nft.PERSIST

    def close(self) -> None:
        self.netlink.close()

    @property
    def port(self) -> int:
        return self.netlink.port

    def seen(self) -> Optional[nft.TableSeen]:
        return seen(self.netlink)

    def adopt(self) -> bool:
        """Make a table that nobody owns ours; whether it is."""
        found = self.seen()
        if found is not None and found.flags & nft.PERSIST and not found.flags & nft.OWNER:
            with suppress(KernelError):
                self._commit([nft.new_table(TABLE, COMMENT, nft.OWNER | nft.PERSIST)])
                found = self.seen()
        return found is not None and bool(found.owner) and found.owner == self.port

    def replace(self, desired: Desired) -> Change:
        """All of the table in one transaction: packets meet the old rules or the new ones."""
        filled = desired.everything(TABLE)
        gone = [nft.delete_table(TABLE)] if self.seen() is not None else []
        try:
            self._commit([*gone, nft.new_table(TABLE, COMMENT, self._flags), *filled.requests])
        except KernelError as problem:
            if not self._flags or problem.errno not in _NO_FLAGS:
                raise
            self._flags = 0
            self._commit([*gone, nft.new_table(TABLE, COMMENT), *filled.requests])
        desired.taken()
        return filled

    def apply(self, desired: Desired) -> Change:
        """What has changed, in one transaction."""
        change = desired.changes(TABLE)
        if change.requests:
            self._commit(change.requests)
        desired.taken()
        return change

    def delete(self) -> bool:
        if self.seen() is None:
            return False
        self._commit([nft.delete_table(TABLE)])
        return True

    def links(self) -> list[str]:
        """The links in the table, some perhaps of ADDs in other processes."""
        found = nft.elements_seen(self.netlink.dump(nft.list_elements(TABLE, LINKS)), False)
        return [_text(key) for key in found if isinstance(key, bytes)]

    def denied(self) -> dict[str, int]:
        """Packets by the name of the counter."""
        listed = map(nft.counter_seen, self.netlink.dump(nft.list_counters(TABLE)))
        return {name: packets for table, name, packets in listed if table == TABLE}

    def differences(self, desired: Desired) -> list[str]:
        """What the kernel has differently, in words; the first of each kind."""
        found = self.seen()
        if found is None:
            return [f"the nft table inet {TABLE} was gone"]
        if found.comment != COMMENT:
            return [f"the nft table inet {TABLE} was another one"]
        return [
            *self._chains(desired),
            *self._sets(desired),
        ]

    def _chains(self, desired: Desired) -> list[str]:
        listed = map(nft.chain_seen, self.netlink.dump(nft.list_chains()))
        have: dict[str, list[tuple[str, ...]]] = {
            name: [] for table, name in listed if table == TABLE
        }
        for body in self.netlink.dump(nft.list_rules(TABLE)):
            table, chain, names = nft.rule_seen(body)
            if table == TABLE:
                have.setdefault(chain, []).append(names)
        wanted = {
            name: [nft.expression_names(rule) for rule in chain.rules]
            for name, chain in desired.chains.items()
        }
        return _compared("the nft chain", have, wanted)

    def _sets(self, desired: Desired) -> list[str]:
        listed = map(nft.set_seen, self.netlink.dump(nft.list_sets(TABLE)))
        have: dict[str, nft.Elements] = {}
        for table, name in listed:
            if table == TABLE:
                interval = name in desired.sets and desired.sets[name].interval
                bodies = self.netlink.dump(nft.list_elements(TABLE, name))
                have[name] = nft.elements_seen(bodies, interval)
        return _compared("the nft set", have, desired.elements)

    def _commit(self, requests: Sequence[Request]) -> None:
        self.netlink.commit(nft.SUBSYSTEM, requests)


def _compared(what: str, have: Mapping[str, object], wanted: Mapping[str, object]) -> list[str]:
    names = sorted(name for name in {*have, *wanted} if have.get(name) != wanted.get(name))
    said = []
    for name in names[:_MOST_NAMED]:
        state = "was gone" if name not in have else "was changed"
        said.append(f"{what} {name} {state if name in wanted else 'was not ours'}")
    if len(names) > _MOST_NAMED:
        said.append(f"{what}s: {len(names) - _MOST_NAMED} more")
    return said


def _text(key: bytes) -> str:
    return key.rstrip(b"\0").decode(errors="replace")


def seen(kernel: Netlink) -> Optional[nft.TableSeen]:
    answer = kernel.ask(nft.get_table(TABLE))
    return nft.table_seen(answer) if answer is not None else None


def has_link(kernel: Netlink, name: str) -> bool:
    """Whether addresses behind the link are closed unless they are known."""
    return kernel.ask(nft.get_element(TABLE, LINKS, link_key(name))) is not None


_MESSAGE = struct.Struct("=IHHII")


def is_foreign(messages: bytes, port: int) -> bool:
    """Whether any of these notices of nftables is about our table, and not of our making."""
    at = 0
    while at + _MESSAGE.size <= len(messages):
        length, kind, _unused, _unused, sender = _MESSAGE.unpack_from(messages, at)
        if kind >> 8 == nft.SUBSYSTEM and sender != port and kind & 0xFF != nft.NEWGEN:
            body = messages[at + _MESSAGE.size + 4 : at + length]
            first = next(attributes(body), (0, b""))
            if first[0] == 1 and _text(first[1]) == TABLE:
                return True
        at += max(length + 3 & ~3, _MESSAGE.size)
    return False
