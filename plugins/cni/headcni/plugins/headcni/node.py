"""The handles that the verbs use on a node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ...datapath.netlink import Netlink
from ...ipam.allocate import Ipam
from ...record import TYPE_CHECKING
from ...skel import timed
from ...store import Attachment, Store

if TYPE_CHECKING:
    from typing import Callable, Optional, TypeAlias

LONGEST_LOG = 1 << 20  # bytes of SQLite's log


class Node:
    """The store, and netlink in the node's own network namespace."""

    def __init__(
        self, store: Store, kernel: Netlink, links_wait: Optional[Callable[[], None]] = None
    ) -> None:
        """`links_wait` is called after a tombstone was written. Without it, no other thread deletes
        links after the answer."""
        self.store, self.kernel, self.links_wait = store, kernel, links_wait
        self.phases: dict[str, float] = {}
        self.attachment: Optional[Attachment] = None  # what ADD made or found, or what DEL removed

    @property
    def ipam(self) -> Ipam:
        return Ipam(self.store)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return timed(self.phases, name)


Opener: TypeAlias = "Callable[[str], AbstractContextManager[Node]]"  # of a folder with a store


@contextmanager
def of_store(store: Store) -> Iterator[Node]:
    """The handles with a store that is open."""
    with Netlink() as kernel:
        yield Node(store, kernel)


@contextmanager
def opened(data_dir: str) -> Iterator[Node]:
    """The handles for one call."""
    with Store.in_directory(data_dir) as store, of_store(store) as node:
        yield node


@contextmanager
def opened_until_exit(data_dir: str) -> Iterator[Node]:
    """The handles for a process that ends with the call. The kernel closes the store: if we did,
    SQLite would copy its log into the database and wait for the disk. But only that makes the log
    short again, so a long log is worth the wait."""
    store = Store.in_directory(data_dir)
    _left_open.append(store)
    try:
        with of_store(store) as node:
            yield node
    finally:
        if store.log_size() > LONGEST_LOG:
            store.close()


_left_open: list[Store] = []
