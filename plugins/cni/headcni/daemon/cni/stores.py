"""The stores that the server keeps open between calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import STORE, CniError
from ...store import Store

STORES_KEPT = 8


class OpenStores:
    """The stores in use, kept open: a single store on a node with one network.

    A dropped store is closed as soon as its last user is done. Python would close it later, and
    until then the kernel keeps a deleted database on the disk, which on a small disk would leave no
    room for the new one.
    """

    def __init__(self) -> None:
        # Called with the folder of each store that was opened, or that has failed.
        self.opened: Callable[[str], None] = lambda _unused: None
        self._lock = threading.Lock()
        self._open: dict[str, Store] = {}
        self._users: dict[Store, int] = {}

    @contextmanager
    def using(self, data_dir: str) -> Iterator[Store]:
        """The store of a folder. It stays open afterwards, unless it fails."""
        with self._lock:
            store = self._open.get(data_dir)
            if store is None:
                store = Store.in_directory(data_dir)
                for oldest in list(self._open)[: 1 - STORES_KEPT]:
                    self._forget(oldest)
                self._open[data_dir] = store
                self.opened(data_dir)
            self._users[store] = self._users.get(store, 0) + 1
        try:
            yield store
        except Exception as problem:
            # The store may be the cause: open it again. LinkRemover retries until it is usable.
            if not isinstance(problem, CniError) or problem.code == STORE:
                self.drop(data_dir)
                self.opened(data_dir)
            raise
        finally:
            with self._lock:
                self._users[store] -= 1
                if not self._users[store]:
                    del self._users[store]
                    if self._open.get(data_dir) is not store:
                        store.close()

    def drop(self, data_dir: str) -> None:
        """Close it, so that it is opened again."""
        with self._lock:
            if data_dir in self._open:
                self._forget(data_dir)

    def close(self) -> None:
        with self._lock:
            for data_dir in list(self._open):
                self._forget(data_dir)

    def _forget(self, data_dir: str) -> None:
        store = self._open.pop(data_dir)
        if store not in self._users:
            store.close()
