"""The pools' free space, kept as intervals in the store. Everything here runs in a transaction.

Invariant: for each range of each network, free = usable - allocated - held back, with as few
intervals as possible. Networks may share a subnet (see `_refuse_overlaps`). So an address is taken
from every range that has it, and returned to every such range.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_network

from ..errors import INVALID_CONFIG, CniError
from ..model import Range
from ..record import TYPE_CHECKING, NamedTuple
from .pool import Interval, describe, gateways, usable, without

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence
    from typing import TypeAlias

Db: TypeAlias = "sqlite3.Connection"
RangeSets: TypeAlias = "Sequence[Sequence[Range]]"

# The kinds of span.
USABLE = "usable"
FREE = "free"


class Pool(NamedTuple):
    """A range of a network. It is also a `FreeSpace`, according to the present store."""

    db: Db
    id: int
    width: int
    bounds: Interval
    cursor: int | None

    def at_or_after(self, point: int) -> Interval | None:
        if point > self.bounds[1]:
            return None
        row = _at_or_after(self.db, FREE, self.id, point.to_bytes(self.width, "big"))
        return (_number(row[0]), _number(row[1])) if row else None

    def may_hand_out(self, address: bytes) -> bool:
        return _has(self.db, USABLE, self.id, address)

    def remember_last(self, number: int) -> None:
        self.db.execute(
            "UPDATE pool SET cursor = ? WHERE id = ?",
            (number.to_bytes(self.width, "big"), self.id),
        )


def prepare(db: Db, network: str, range_sets: RangeSets) -> list[list[Pool]]:
    """The network's pools as configured. Missing ones are built from the allocations."""
    wanted = describe(range_sets)
    row = db.execute("SELECT ranges FROM network WHERE name = ?", (network,)).fetchone()
    if row is None or row[0] != wanted:
        _refuse_overlaps(db, network, range_sets)
        _build(db, network, range_sets)
        db.execute("INSERT OR REPLACE INTO network VALUES (?, ?)", (network, wanted))
    pools: list[list[Pool]] = [[] for _unused in range_sets]
    for id_, set_index, first, last, cursor in db.execute(
        "SELECT id, set_index, first, last, cursor FROM pool WHERE network = ?"
        " ORDER BY set_index, range_index",
        (network,),
    ).fetchall():
        last_one = None if cursor is None else _number(cursor)
        bounds = (_number(first), _number(last))
        pools[set_index].append(Pool(db, id_, len(first), bounds, last_one))
    return pools


def take(db: Db, address: bytes) -> None:
    """Remove the address from the free addresses of all ranges."""
    for pool in _ranges_with(db, address):
        row = _at_or_after(db, FREE, pool, address)
        if row is None or row[0] > address:
            continue
        first, last = row
        if last == address:
            _remove_free(db, pool, last)
        else:
            db.execute(
                "UPDATE span SET first = ? WHERE pool = ? AND kind = ? AND last = ?",
                (_next(address), pool, FREE, last),
            )
        if first < address:
            _insert_free(db, pool, first, _previous(address))


def give(db: Db, address: bytes) -> None:
    """Make the address free again in every range in which it is usable."""
    for pool in _ranges_with(db, address):
        if not _has(db, USABLE, pool, address):
            continue
        first = last = address
        above = _at_or_after(db, FREE, pool, address)
        if above and above[0] <= address:
            continue
        below = _at_or_after(db, FREE, pool, _previous(address)) if any(address) else None
        if below and below[1] < address:
            first = below[0]
            _remove_free(db, pool, below[1])
        if above and _number(above[0]) == _number(address) + 1:
            last = above[1]
            _remove_free(db, pool, last)
        _insert_free(db, pool, first, last)


def hold_back(db: Db, address: bytes, until: float) -> None:
    """Hold back an address for a while that is in use, but has no owner in the store."""
    take(db, address)
    db.execute("INSERT OR REPLACE INTO conflict VALUES (?, ?)", (address, until))


def end_hold(db: Db, address: bytes) -> None:
    if db.execute("DELETE FROM conflict WHERE address = ?", (address,)).rowcount:
        give(db, address)


def end_holds(db: Db, now: float) -> None:
    """Free the addresses that were held back long enough."""
    for (address,) in db.execute(
        "SELECT address FROM conflict WHERE until <= ?", (now,)
    ).fetchall():
        end_hold(db, address)


def count_within(db: Db, intervals: Iterable[Interval], width: int) -> tuple[int, int]:
    """The number of allocated addresses in the intervals, and the number of those held back."""
    allocated = held_back = 0
    for first, last in intervals:
        ends = (first.to_bytes(width, "big"), last.to_bytes(width, "big"), width)
        allocated += db.execute(
            "SELECT count(*) FROM allocation WHERE address BETWEEN ? AND ? AND length(address) = ?",
            ends,
        ).fetchone()[0]
        held_back += db.execute(
            "SELECT count(*) FROM conflict WHERE address BETWEEN ? AND ? AND length(address) = ?",
            ends,
        ).fetchone()[0]
    return allocated, held_back


def width_of(range_: Range) -> int:
    return range_.subnet.max_prefixlen // 8


def _build(db: Db, network: str, range_sets: RangeSets) -> None:
    """Write the network's pools again. Each range keeps its cursor if possible."""
    cursors = {
        (set_index, range_index): cursor
        for set_index, range_index, cursor in db.execute(
            "SELECT set_index, range_index, cursor FROM pool WHERE network = ?", (network,)
        )
    }
    drop(db, network)
    all_gateways = gateways(range_sets)
    for set_index, ranges in enumerate(range_sets):
        for range_index, range_ in enumerate(ranges):
            first, last = range_.start.packed, range_.end.packed
            cursor = cursors.get((set_index, range_index))
            if cursor is not None and not (len(cursor) == len(first) and first <= cursor <= last):
                cursor = None
            pool = db.execute(
                "INSERT INTO pool (network, set_index, range_index, subnet, first, last, cursor)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (network, set_index, range_index, str(range_.subnet), first, last, cursor),
            ).lastrowid
            width = len(first)
            intervals = usable(range_, all_gateways)
            taken = [
                _number(row[0])
                for row in db.execute(
                    "SELECT address FROM allocation"
                    " WHERE address BETWEEN :first AND :last AND length(address) = :width"
                    " UNION SELECT address FROM conflict"
                    " WHERE address BETWEEN :first AND :last AND length(address) = :width"
                    " ORDER BY 1",
                    {"first": first, "last": last, "width": width},
                )
            ]
            for kind, spans in ((USABLE, intervals), (FREE, without(intervals, taken))):
                db.executemany(
                    "INSERT INTO span (pool, kind, first, last) VALUES (?, ?, ?, ?)",
                    [
                        (pool, kind, a.to_bytes(width, "big"), b.to_bytes(width, "big"))
                        for a, b in spans
                    ],
                )


def drop(db: Db, network: str) -> None:
    """Forget a network's pools, but not the allocations from them."""
    db.execute("DELETE FROM span WHERE pool IN (SELECT id FROM pool WHERE network = ?)", (network,))
    db.execute("DELETE FROM pool WHERE network = ?", (network,))
    db.execute("DELETE FROM network WHERE name = ?", (network,))


def _refuse_overlaps(db: Db, network: str, range_sets: RangeSets) -> None:
    """Two networks may share a subnet. Subnets that differ and overlap are a mistake.

    A node has one routing table, in which an address has one meaning. So no address is leased
    twice, even on different networks. The same subnet under two names works: it is a network that
    was renamed while pods run, or two plugins on one bridge. Subnets that differ and overlap are
    routed to two places, and pods would lose their connection at random. Networks that do not meet
    in the host's routes, such as VLANs, may each have a store of their own. A network without any
    leased address is a leftover, and does not count.
    """
    subnets = {range_.subnet for ranges in range_sets for range_ in ranges}
    for other, text in db.execute(
        "SELECT DISTINCT network, subnet FROM pool WHERE network != ?", (network,)
    ).fetchall():
        theirs = ip_network(text)
        clash = [s for s in subnets if s.version == theirs.version and s.overlaps(theirs)]
        if not clash or theirs in clash:
            continue
        (held,) = db.execute(
            "SELECT count(*) FROM allocation WHERE network = ?", (other,)
        ).fetchone()
        if held == 0:
            drop(db, other)
            continue
        raise CniError(
            INVALID_CONFIG,
            f"{clash[0]} of network {network} overlaps {text} of network {other} on this node",
            f"{other} has {held} addresses in use; change one of the subnets, or, if the two never"
            " meet in the host's routes, give one network a store of its own: data_dir with type"
            " headcni, ipam.dataDir with another plugin's ipam.type headcni-ipam",
        )


def _ranges_with(db: Db, address: bytes) -> list[int]:
    # A node has few ranges, so reading all of them is cheap.
    return [
        row[0]
        for row in db.execute(
            "SELECT id FROM pool WHERE length(first) = ? AND first <= ? AND last >= ?",
            (len(address), address, address),
        ).fetchall()
    ]


def _at_or_after(db: Db, kind: str, pool: int, address: bytes) -> tuple[bytes, bytes] | None:
    row: tuple[bytes, bytes] | None = db.execute(
        "SELECT first, last FROM span WHERE pool = ? AND kind = ? AND last >= ?"
        " ORDER BY last LIMIT 1",
        (pool, kind, address),
    ).fetchone()
    return row


def _insert_free(db: Db, pool: int, first: bytes, last: bytes) -> None:
    db.execute(
        "INSERT INTO span (pool, kind, first, last) VALUES (?, ?, ?, ?)", (pool, FREE, first, last)
    )


def _remove_free(db: Db, pool: int, last: bytes) -> None:
    db.execute("DELETE FROM span WHERE pool = ? AND kind = ? AND last = ?", (pool, FREE, last))


def _has(db: Db, kind: str, pool: int, address: bytes) -> bool:
    row = _at_or_after(db, kind, pool, address)
    return row is not None and row[0] <= address


def _number(address: bytes) -> int:
    return int.from_bytes(address, "big")


def _next(address: bytes) -> bytes:
    return (_number(address) + 1).to_bytes(len(address), "big")


def _previous(address: bytes) -> bytes:
    return (_number(address) - 1).to_bytes(len(address), "big")
