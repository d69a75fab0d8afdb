"""Links that outlive their pods by some milliseconds.

The kernel takes 15 to 20 of them to delete a link. So DEL in the daemon takes the link down, which
ends all that it did, leaves a tombstone in the store and answers; the daemon deletes the link
(daemon/links.py). A tombstone that it did not get to is met by whoever comes next, here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

from . import unrecorded
from .datapath import link
from .datapath.netlink import Netlink
from .errors import CniError
from .ipam.allocate import Ipam
from .model import Lease
from .store import Store


def finish(store: Store, kernel: Netlink) -> int:
    """Delete the links that have a tombstone and free their addresses; how many there were. What
    earlier DELs could not record is recorded before.

    Several may be at this at once: a link is known by name and index, so that a new one by the same
    name is safe, and of one tombstone only who drops it frees an address.
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
    finally:  # what is gone is gone, whatever has become of the others
        gone = [one for name, one in tombstones.items() if kernel.index(name) != one.link]
        forget_connections(filter(None, (ipam.lease(one.owner) for one in gone)))
        ipam.release_buried(gone)
    if unsettled is not None:  # only now: the links do not depend on it
        raise unsettled
    return len(tombstones)


def forget_connections(leases: Iterable[Lease]) -> None:
    """Before the addresses go to other pods, which must not be sent what these were sent."""
    addresses = [one.address for lease in leases for one in lease.addresses]
    if addresses:
        from .datapath import conntrack

        conntrack.forget_addresses(addresses)
