"""Deferred deletion of links.

The kernel needs 15 to 20 ms to delete a link. So DEL in the daemon takes the link down, which ends
all traffic of the pod, writes a tombstone into the store and answers. The daemon deletes the link
after that (daemon/cni/links.py), and then the address is free. If the daemon was killed in between,
the next call deletes the link.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import unrecorded
from .datapath import link
from .datapath.netlink import Netlink
from .errors import ADDRESS_TAKEN, TRY_AGAIN, CniError
from .ipam.allocate import Ipam
from .model import Lease, Owner
from .record import TYPE_CHECKING
from .store import Store, Tombstone

if TYPE_CHECKING:
    from typing import Callable, Optional, TypeVar

    T = TypeVar("T")

# How often an ADD tries a step again because a link that awaits deletion holds the address or name.
TRIES = 3


def defer(store: Store, owner: Owner, index: int) -> None:
    """Replace the owner's attachment by a tombstone of its link, which has been taken down."""
    store.bury(Tombstone(owner, index))


def finish(store: Store, kernel: Netlink) -> int:
    """Delete the links that have a tombstone and free their addresses; returns their number. Before
    that, record the DELs that could not be recorded earlier.

    Several threads and processes may do this at the same time. A link is identified by its name and
    index, so a new link with the same name is safe. Only the one that removes a tombstone frees the
    address.
    """
    unsettled: Optional[CniError] = None
    try:
        unrecorded.settle(store)
    except CniError as problem:
        unsettled = problem
    tombstones = {link.host_name(one.owner): one for one in store.tombstones()}
    ipam = Ipam(store)
    try:
        link.delete(kernel, {name: one.link for name, one in tombstones.items()})
    finally:  # even if some links could not be deleted, the others are gone
        gone = [one for name, one in tombstones.items() if kernel.index(name) != one.link]
        forget_connections(filter(None, (ipam.lease(one.owner) for one in gone)))
        ipam.release_buried(gone)
    if unsettled is not None:  # only now, because the links do not depend on it
        raise unsettled
    return len(tombstones)


def try_to_finish(store: Store, kernel: Netlink) -> int:
    """The number of deleted links; 0 if one of them cannot be deleted."""
    try:
        return finish(store, kernel)
    except CniError:
        return 0


def prepare(
    store: Store, kernel: Netlink, owner: Owner, pending: Sequence[Tombstone], deletes_later: bool
) -> None:
    """Before an ADD. The link of the owner's previous pod must be gone. The links of other pods are
    deleted only if nobody does it later, and a failure there does not concern this pod."""
    if any(tombstone.owner == owner for tombstone in pending):
        try:
            finish(store, kernel)
        except CniError:
            if any(tombstone.owner == owner for tombstone in store.tombstones()):
                raise
    elif pending and not deletes_later:
        try_to_finish(store, kernel)


def retried(
    store: Store, kernel: Netlink, pending: Sequence[Tombstone], step: Callable[[], T]
) -> T:
    """Do a step of an ADD. Retry it after a deletion while a link that awaits deletion may hold the
    pod's address or the name of its interface. The links `pending` may have been deleted since."""
    for _unused in range(TRIES):
        try:
            return step()
        except CniError as problem:
            in_the_way = isinstance(problem, link.InterfaceTaken)
            if not in_the_way and problem.code not in (ADDRESS_TAKEN, TRY_AGAIN):
                raise
            if not try_to_finish(store, kernel) and not pending:
                raise
            pending = ()
    return step()


def forget_connections(leases: Iterable[Lease]) -> None:
    """Remove the addresses from connection tracking before other pods get them: otherwise those
    would get packets for the previous pods."""
    addresses = [leased.address for lease in leases for leased in lease.addresses]
    if addresses:
        from .datapath import conntrack

        conntrack.forget_addresses(addresses)
