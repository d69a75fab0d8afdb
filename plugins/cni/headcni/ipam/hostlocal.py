"""Imports the addresses that host-local has leased, so that they stay leased.

host-local has a directory for each network, with a file for each address (the container's id, CR
LF, the interface), `last_reserved_ip.N` for each range set, and `lock`. The files are only read, so
a node can go back to host-local.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..errors import IO_FAILURE, CniError
from ..model import Address, Lease, LeasedAddress, Owner, Range
from ..shared.filelock import lock
from ..store import Store, insert_allocations, lease_of_owner
from . import space
from .config import parse_address

DATA_DIR = "/var/lib/cni/networks"
LAST = "last_reserved_ip."
# Before 0.7, host-local did not record the interface. Runtimes named it this, then and now.
INTERFACE = "eth0"


class Imported(NamedTuple):
    """The imported addresses, and those that already had another owner in the store."""

    leases: tuple[Lease, ...] = ()
    held_by_others: tuple[Address, ...] = ()


class _Found(NamedTuple):
    leases: list[Lease]
    last: dict[int, Address]


def import_on_request(
    store: Store,
    network: str,
    section: Mapping[str, Any],
    range_sets: Sequence[tuple[Range, ...]],
) -> None:
    """The directory of `ipam.importHostLocal`; true means host-local's default."""
    wanted = section.get("importHostLocal")
    if not wanted:
        return
    data_dir = section.get("dataDir")
    directory = os.path.join(data_dir, network) if isinstance(data_dir, str) else ""
    if isinstance(wanted, str):
        directory = wanted
    import_host_local(store, network, directory, range_sets)


def import_host_local(
    store: Store,
    network: str,
    directory: str = "",
    range_sets: Sequence[Sequence[Range]] = (),
) -> Imported:
    """Import host-local's leases of the network. A second import changes nothing.

    All entries are imported. host-local is known to leak some, but they look like those of running
    pods. GC frees those that are not in the runtime's list, and so does a reboot.
    """
    directory = directory or os.path.join(DATA_DIR, network)
    if not os.path.isdir(directory):
        return Imported()
    if store.read(lambda db: _is_recorded(db, network, directory)):
        return Imported()
    try:
        with _host_local_lock(directory):
            found = _read(network, directory, range_sets)
            return store.atomically(lambda db: _take(db, network, directory, found, range_sets))
    except OSError as problem:
        raise CniError(
            IO_FAILURE, f"cannot import host-local's addresses of {network}", str(problem)
        ) from problem


def _is_recorded(db: sqlite3.Connection, network: str, directory: str) -> bool:
    query = "SELECT 1 FROM imported WHERE network = ? AND directory = ?"
    return db.execute(query, (network, directory)).fetchone() is not None


@contextmanager
def _host_local_lock(directory: str) -> Iterator[None]:
    path = os.path.join(directory, "lock")
    handle = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        lock(handle, path)
        yield
    finally:
        os.close(handle)


def _read(network: str, directory: str, range_sets: Sequence[Sequence[Range]]) -> _Found:
    leases: dict[Owner, list[LeasedAddress]] = {}
    last: dict[int, Address] = {}
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if name.startswith(LAST):
            number, address = name[len(LAST) :], parse_address(_text(path))
            if number.isdigit() and address is not None:
                last[int(number)] = address
            continue
        address = parse_address(name.replace("_", ":"))
        lines = _text(path).split() if address is not None else []
        if address is None or not lines:
            continue
        owner = Owner(network, lines[0], lines[1] if len(lines) > 1 else INTERFACE)
        leases.setdefault(owner, []).append(_leased(address, range_sets))
    return _Found([Lease(owner, "", tuple(held)) for owner, held in leases.items()], last)


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def _leased(address: Address, range_sets: Sequence[Sequence[Range]]) -> LeasedAddress:
    for ranges in range_sets:
        for range_ in ranges:
            if address in range_.subnet:
                return LeasedAddress(address, range_.subnet.prefixlen, range_.gateway)
    return LeasedAddress(address, address.max_prefixlen, None)


def _take(
    db: sqlite3.Connection,
    network: str,
    directory: str,
    found: _Found,
    range_sets: Sequence[Sequence[Range]],
) -> Imported:
    if _is_recorded(db, network, directory):  # by another process, while we waited for the lock
        return Imported()
    taken: list[Lease] = []
    refused: list[Address] = []
    for lease in found.leases:
        # First those of the pool's sets, in their order, so that the lease looks like ours.
        order = sorted(lease.addresses, key=lambda leased: _set_of(leased.address, range_sets))
        held = insert_allocations(db, lease.owner, "", order)
        for leased in held:
            space.end_hold(db, leased.address.packed)
            space.take(db, leased.address.packed)
        if held:
            taken.append(Lease(lease.owner, "", held))
        known = lease_of_owner(db, lease.owner)
        ours = {leased.address for leased in known.addresses} if known else set()
        refused.extend(leased.address for leased in order if leased.address not in ours)
    _go_on_after(db, network, found.last, range_sets)
    db.execute(
        "INSERT INTO imported VALUES (?, ?, ?, ?)",
        (network, directory, sum(len(lease.addresses) for lease in taken), time.time()),
    )
    return Imported(tuple(taken), tuple(refused))


def _go_on_after(
    db: sqlite3.Connection,
    network: str,
    last: dict[int, Address],
    range_sets: Sequence[Sequence[Range]],
) -> None:
    """Continue each range set after the address that host-local leased last."""
    try:
        pools = space.prepare(db, network, range_sets) if range_sets else []
    except CniError:
        return  # the next ADD reports mistakes in the ranges; a DEL does not need them
    for set_index, address in last.items():
        for pool in pools[set_index] if set_index < len(pools) else []:
            same_family = pool.width * 8 == address.max_prefixlen
            if same_family and pool.bounds[0] <= int(address) <= pool.bounds[1]:
                pool.remember_last(int(address))


def _set_of(address: Address, range_sets: Sequence[Sequence[Range]]) -> int:
    for index, ranges in enumerate(range_sets):
        if any(address in range_.subnet for range_ in ranges):
            return index
    return len(range_sets)
