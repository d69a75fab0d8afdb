"""The thread that deletes the links that DEL has taken down, all waiting links in one request."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Callable

from ... import deferred
from ...datapath.netlink import Netlink
from ...errors import CniError
from ...store import Store

RETRY_SECONDS = 5.0  # after a failure


class LinkRemover:
    """Runs from start() to stop(), once. Links that it does not get to stay in the store."""

    def __init__(
        self,
        store: Callable[[str], AbstractContextManager[Store]],
        drop_store: Callable[[str], None],
        log: Callable[[str], None],
    ) -> None:
        self._store = store
        self._drop_store = drop_store
        self._log = log
        self._said = ""  # the last failure, logged again only when it changes
        self._came = threading.Condition()
        self._folders: set[str] = set()  # with stores that may have tombstones
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="links", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, limit: float) -> bool:
        """Delete the waiting links; False if that outlasts the limit."""
        if self._thread.ident is None:
            return True
        self._stopping.set()
        with self._came:
            self._came.notify()
        self._thread.join(limit)
        return not self._thread.is_alive()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def wake(self, data_dir: str) -> None:
        """There may be a tombstone in the store of that folder."""
        with self._came:
            self._folders.add(data_dir)
            self._came.notify()

    def _work(self) -> None:
        while True:
            with self._came:
                self._came.wait_for(lambda: self._folders or self._stopping.is_set())
                folders, self._folders = self._folders, set()
            if not folders:
                return
            failed = {folder for folder in folders if not self._finish(folder)}
            if failed and self._stopping.wait(RETRY_SECONDS):
                return
            with self._came:
                self._folders |= failed

    def _finish(self, folder: str) -> bool:
        try:
            with self._store(folder) as store, Netlink() as kernel:
                deferred.finish(store, kernel)
        except (CniError, OSError) as problem:
            if str(problem) != self._said:
                self._said = str(problem)
                self._log(f'msg="deleted pods could not be cleaned up after" error="{problem}"')
            self._drop_store(folder)
            return False
        self._said = ""
        return True
