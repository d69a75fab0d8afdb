"""Allocates, releases and collects addresses, each in one transaction."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from ..database import is_unverified
from ..errors import ADDRESS_TAKEN, INTERNAL, INVALID_CONFIG, STORE, TRY_AGAIN, CniError
from ..model import Address, IpamConfig, Lease, LeasedAddress, Owner, Range
from ..record import TYPE_CHECKING, NamedTuple
from ..store import (
    Store,
    Tombstone,
    drop_tombstone,
    holder_of,
    insert_allocations,
    lease_of_owner,
    leases_of_network,
    owners_buried,
)
from . import space
from .pool import STRATEGIES, Below, gateways, size, system_below, usable

if TYPE_CHECKING:
    import sqlite3
    from typing import Callable, TypeAlias, Union

ATTEMPTS = 3
HOLD_SECONDS = 300.0
OLD_SECONDS = 86400.0
NAMED_HOLDERS = 5

Db: TypeAlias = "sqlite3.Connection"
# An Owner, or the (container id, ifname) of the spec's valid attachments.
OwnerLike: TypeAlias = "Union[Owner, tuple[str, str]]"


class Usage(NamedTuple):
    """How full a range set of a network is, for metrics. All networks' addresses in it count."""

    network: str
    set_index: int
    subnets: tuple[str, ...]
    total: int
    leased: int
    held_back: int

    @property
    def free(self) -> int:
        return self.total - self.leased - self.held_back


class _Full(Exception):
    """No range of the set has room."""

    def __init__(self, set_index: int) -> None:
        super().__init__(set_index)
        self.set_index = set_index


class _Lost(CniError):
    """The store does not know which addresses are in use, so it cannot give any."""


def _since_boot() -> float:
    # Not the time of day: on a node without a clock it changes by decades when NTP answers.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _reconstruct(store: Store) -> None:
    from ..recover import recover  # rarely needed, and in a higher layer

    recover(store)


class Ipam:
    """The addresses of this node's pods."""

    def __init__(
        self,
        store: Store,
        *,
        below: Below = system_below,
        clock: Callable[[], float] = _since_boot,
        recover: Callable[[Store], object] = _reconstruct,
    ) -> None:
        """`recover` writes the addresses in use into the store after a loss of the store."""
        self.store = store
        self._recover = recover
        self._below = below
        self._clock = clock

    def allocate(
        self,
        owner: Owner,
        config: IpamConfig,
        pod: str,
        in_use: Callable[[Address], bool],
    ) -> Lease:
        """One address of each range set, or the addresses that the owner already has.

        The addresses are reserved first. Then `in_use` asks the kernel about them, while nothing is
        locked. An address that is in use is held back for some minutes, and others are tried.
        """
        if config.strategy not in STRATEGIES or not config.range_sets:
            raise CniError(INVALID_CONFIG, f"nothing to allocate from for network {owner.network}")
        wanted = _wanted_per_set(config)
        for _unused in range(ATTEMPTS):
            try:
                lease, known = self._reserve(owner, config, pod, wanted)
            except _Full as full:
                raise self._exhausted(owner.network, config, full.set_index) from None
            if known:
                return _as_requested(lease, config)
            taken = self._ask(lease, in_use)
            if not taken:
                return lease
            for address in taken:
                if address in wanted:
                    raise CniError(
                        ADDRESS_TAKEN,
                        f"{address} was asked for but is in use on this node",
                        "HeadCNI did not give it to anybody; see: ip route get "
                        f"{address} and ip address show to {address}",
                    )
        raise CniError(
            TRY_AGAIN,
            f"{ATTEMPTS} addresses of network {owner.network} in a row are in use on this node",
            f"the last was {taken[0]}, which HeadCNI gave to nobody; they are held back for"
            f" {HOLD_SECONDS:.0f} s; is the range used by something else, too?",
        )

    def note(self, owner: Owner, pod: str, addresses: Iterable[LeasedAddress]) -> bool:
        """Record addresses that another IPAM gave to the owner, so that no other owner gets them
        before they are released. If another owner holds one of them here, which the other IPAM does
        not know, nothing is recorded and the result is False."""
        given = tuple(addresses)

        def work(db: Db) -> bool:
            if any(holder_of(db, leased.address) not in (None, owner) for leased in given):
                return False
            for leased in insert_allocations(db, owner, pod, given):
                space.end_hold(db, leased.address.packed)
                space.take(db, leased.address.packed)
            return True

        return self.store.atomically(work)

    def release(self, owner: Owner) -> Lease | None:
        """Free the owner's addresses; None if it has none."""

        def work(db: Db) -> Lease | None:
            lease = lease_of_owner(db, owner)
            if lease is not None:
                _free(db, lease)
            return lease

        return self.store.atomically(work)

    def release_buried(self, tombstones: Iterable[Tombstone]) -> None:
        """Free the addresses of tombstones whose links are deleted."""
        gone = tuple(tombstones)

        def work(db: Db) -> None:
            for tombstone in gone:
                if drop_tombstone(db, tombstone):
                    lease = lease_of_owner(db, tombstone.owner)
                    if lease is not None:
                        _free(db, lease)

        if gone:
            self.store.atomically(work)

    def lease(self, owner: Owner) -> Lease | None:
        return self.store.read(lambda db: lease_of_owner(db, owner))

    def leases(self, network: str) -> list[Lease]:
        return self.store.read(lambda db: leases_of_network(db, network))

    def collect(self, network: str, valid: Iterable[OwnerLike]) -> list[Lease]:
        """Free the network's addresses whose owner is not valid, and return their leases. The
        address of a tombstone is freed with its link."""
        keep = {(v.container_id, v.ifname) if isinstance(v, Owner) else tuple(v) for v in valid}

        def work(db: Db) -> list[Lease]:
            buried = owners_buried(db, network)
            dead = [
                lease
                for lease in leases_of_network(db, network)
                if (lease.owner.container_id, lease.owner.ifname) not in keep
                and lease.owner not in buried
            ]
            for lease in dead:
                _free(db, lease)
            return dead

        return self.store.atomically(work)

    def usage(self, network: str) -> tuple[Usage, ...]:
        """Usage of each range set; empty before the network's first allocation of this boot."""

        def work(db: Db) -> tuple[Usage, ...]:
            sets: dict[int, list[tuple[int, str]]] = {}
            for id_, set_index, subnet in db.execute(
                "SELECT id, set_index, subnet FROM pool JOIN network ON name = network"
                " WHERE network = ? AND ranges != '' ORDER BY set_index, range_index",
                (network,),
            ).fetchall():
                sets.setdefault(set_index, []).append((id_, subnet))
            found = []
            for set_index, pools in sets.items():
                total = leased = held_back = 0
                for id_, _unused in pools:
                    rows = db.execute(
                        "SELECT first, last FROM span WHERE pool = ? AND kind = ?",
                        (id_, space.USABLE),
                    ).fetchall()
                    spans = [(int.from_bytes(a, "big"), int.from_bytes(b, "big")) for a, b in rows]
                    width = len(rows[0][0]) if rows else 0
                    total += size(spans)
                    counts = space.count_within(db, spans, width)
                    leased, held_back = leased + counts[0], held_back + counts[1]
                subnets = tuple(dict.fromkeys(subnet for _unused, subnet in pools))
                found.append(Usage(network, set_index, subnets, total, leased, held_back))
            return tuple(found)

        return self.store.read(work)

    def _reserve(
        self, owner: Owner, config: IpamConfig, pod: str, wanted: Sequence[Address | None]
    ) -> tuple[Lease, bool]:
        """The lease, and whether the owner already had it."""

        def work(db: Db) -> tuple[Lease, bool]:
            return self._take(db, owner, config, pod, wanted)

        try:
            return self.store.atomically(work)
        except _Lost:
            self._recover(self.store)
            self.store.recovered()
            return self.store.atomically(work)

    def _take(
        self,
        db: Db,
        owner: Owner,
        config: IpamConfig,
        pod: str,
        wanted: Sequence[Address | None],
    ) -> tuple[Lease, bool]:
        known = lease_of_owner(db, owner)
        if known is not None:
            return known, True
        if is_unverified(db):
            raise _Lost(STORE, "the allocation store was lost again and again")
        space.end_holds(db, self._clock())
        leased = []
        for position, pools in enumerate(space.prepare(db, owner.network, config.range_sets)):
            ranges, asked = config.range_sets[position], wanted[position]
            if asked is not None:
                address, range_ = asked, _range_with(ranges, asked)
                _claim(db, pools[ranges.index(range_)], asked, pod)
            else:
                address, range_ = self._pick(config.strategy, pools, ranges, position)
            leased.append(LeasedAddress(address, range_.subnet.prefixlen, range_.gateway))
            space.take(db, address.packed)
        if len(insert_allocations(db, owner, pod, leased)) < len(leased):
            raise CniError(INTERNAL, "an address was free and has a holder: a bug in HeadCNI")
        return Lease(owner, pod, tuple(leased)), False

    def _pick(
        self, strategy: str, pools: Sequence[space.Pool], ranges: Sequence[Range], position: int
    ) -> tuple[Address, Range]:
        for pool, range_ in zip(pools, ranges):
            number = STRATEGIES[strategy](pool, pool.bounds, pool.cursor, self._below)
            if number is not None:
                if strategy == "sequential":
                    pool.remember_last(number)
                return ip_address(number.to_bytes(pool.width, "big")), range_
        raise _Full(position)

    def _ask(self, lease: Lease, in_use: Callable[[Address], bool]) -> list[Address]:
        """The addresses that are in use. If there are any, or in doubt, none stays reserved."""
        taken: list[Address] = []

        def withdraw(db: Db) -> None:
            freed = _free(db, lease)  # GC may have freed the address, and another owner may have it
            for address in taken:
                if address in freed:
                    space.hold_back(db, address.packed, self._clock() + HOLD_SECONDS)

        try:
            taken = [leased.address for leased in lease.addresses if in_use(leased.address)]
        except BaseException:
            self.store.atomically(withdraw)
            raise
        if taken:
            self.store.atomically(withdraw)
        return taken

    def _exhausted(self, network: str, config: IpamConfig, set_index: int) -> CniError:
        ranges = config.range_sets[set_index]
        width = space.width_of(ranges[0])
        all_gateways = gateways(config.range_sets)
        spans = [span for range_ in ranges for span in usable(range_, all_gateways)]

        def work(db: Db) -> tuple[int, int, int, dict[str, int]]:
            old, holders = 0, dict[str, int]()
            for first, last in spans:
                for holder, count, of_them_old in db.execute(
                    "SELECT CASE WHEN network != ? THEN 'network ' || network"
                    " WHEN instr(pod, '/') THEN 'namespace ' || substr(pod, 1, instr(pod, '/') - 1)"
                    " ELSE 'unnamed pods' END, count(*), sum(created < ?) FROM allocation"
                    " WHERE address BETWEEN ? AND ? AND length(address) = ? GROUP BY 1",
                    (
                        *(network, time.time() - OLD_SECONDS),
                        *(first.to_bytes(width, "big"), last.to_bytes(width, "big"), width),
                    ),
                ).fetchall():
                    holders[holder] = holders.get(holder, 0) + count
                    old += of_them_old
            return *space.count_within(db, spans, width), old, holders

        leased, held_back, old, holders = self.store.read(work)
        subnets = ", ".join(dict.fromkeys(str(range_.subnet) for range_ in ranges))
        ranked = sorted(holders.items(), key=lambda item: (-item[1], item[0]))
        by = [f"{holder} {count}" for holder, count in ranked[:NAMED_HOLDERS]]
        if len(ranked) > NAMED_HOLDERS:
            by.append(f"others {sum(count for _unused, count in ranked[NAMED_HOLDERS:])}")
        held = f", {held_back} held back as they were seen in use" if held_back else ""
        return CniError(
            TRY_AGAIN,
            f"network {network} has no free address in {subnets}:"
            f" {leased} of {size(spans)} are in use{held}",
            f"by {', '.join(by) or 'nobody'}; {old} of them for more than a day;"
            " delete pods, have the runtime collect leaked ones (GC), or give it a larger range",
        )


def _claim(db: Db, pool: space.Pool, address: Address, pod: str) -> None:
    """CniError if this address cannot be taken. It names the holder only to pods of the same
    namespace: others could search for the addresses of foreign pods."""
    if not pool.may_hand_out(address.packed):
        raise CniError(
            INVALID_CONFIG,
            f"{address} was asked for but is never handed out",
            "it is the gateway, excluded, or the subnet's network or broadcast address",
        )
    row = db.execute(
        "SELECT pod, container_id, ifname, network FROM allocation WHERE address = ?",
        (address.packed,),
    ).fetchone()
    if row is not None:
        same = pod.partition("/")[0] == row[0].partition("/")[0]
        holder = row[0] or f"container {row[1]}"
        raise CniError(
            ADDRESS_TAKEN,
            f"{address} was asked for but belongs to {holder if same else 'another pod'}",
            f"container {row[1]}, interface {row[2]}, network {row[3]}"
            if same
            else "choose another; the node's operator sees who has it by: headcnictl pods",
        )
    space.end_hold(db, address.packed)  # the kernel will be asked again


def _wanted_per_set(config: IpamConfig) -> list[Address | None]:
    """The requested addresses by range set."""
    wanted: list[Address | None] = [None] * len(config.range_sets)
    for address in config.requested:
        places = [
            index
            for index, ranges in enumerate(config.range_sets)
            if any(_within(range_, address) for range_ in ranges)
        ]
        if not places:
            spans = (f"{r.start}-{r.end}" for ranges in config.range_sets for r in ranges)
            raise CniError(
                INVALID_CONFIG,
                f"{address} was asked for but is in no range of the network",
                f"the ranges are {', '.join(spans)}",
            )
        if wanted[places[0]] not in (None, address):
            raise CniError(
                INVALID_CONFIG,
                f"{wanted[places[0]]} and {address} were asked for from one range set",
                "a pod gets one address of each range set",
            )
        wanted[places[0]] = address
    return wanted


def _as_requested(lease: Lease, config: IpamConfig) -> Lease:
    """A repeated ADD gets the same addresses. It is an error if it requests other ones."""
    held = [leased.address for leased in lease.addresses]
    for address in config.requested:
        if address not in held:
            raise CniError(
                ADDRESS_TAKEN,
                f"{address} was asked for but the container holds {', '.join(map(str, held))}",
                "the runtime has to DEL it before an ADD with another address",
            )
    return lease


def _within(range_: Range, address: Address) -> bool:
    return range_.subnet.version == address.version and (
        int(range_.start) <= int(address) <= int(range_.end)
    )


def _range_with(ranges: Sequence[Range], address: Address) -> Range:
    return next(range_ for range_ in ranges if _within(range_, address))


def _free(db: Db, lease: Lease) -> list[Address]:
    """Free the lease's addresses; returns those that were still the owner's."""
    owner, freed = lease.owner, []
    for leased in lease.addresses:
        # The owner is part of the condition, so addresses of other owners stay.
        if db.execute(
            "DELETE FROM allocation"
            " WHERE address = ? AND network = ? AND container_id = ? AND ifname = ?",
            (leased.address.packed, owner.network, owner.container_id, owner.ifname),
        ).rowcount:
            space.give(db, leased.address.packed)
            freed.append(leased.address)
    return freed
