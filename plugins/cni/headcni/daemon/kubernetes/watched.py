"""All objects of a kind at the API server: a list in parts, then a watch, again and again.

Each object is reduced to what is needed as soon as it is read, so a large cluster costs little
memory. While the API server is away, what was learned last stays.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import Any, Callable, Dict, Generic, Protocol, Tuple, TypeVar

from ...errors import CniError
from ...log import Log
from .client import KubeClient, Resource
from .errors import DENIED, GONE, REFUSED, KubeError, not_understood
from .objects import BOOKMARK, DELETED
from .watching import FIRST_PAUSE, LONGEST_PAUSE, keep_watching

STOP_SECONDS = 5.0

log = Log("kubernetes-watch")

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
V_contra = TypeVar("V_contra", contravariant=True)


class Listener(Protocol[K, V_contra]):
    """Is told everything, from the thread of the watch."""

    def listed(self, found: Mapping[K, V_contra], wrong: Mapping[K, str]) -> None:
        """These objects exist, and these that are wrong in themselves."""

    def changed(self, key: K, value: V_contra) -> None: ...

    def wrong(self, key: K, problem: str) -> None:
        """It exists, but cannot be understood."""

    def gone(self, key: K) -> None: ...


class WatchedKind(Generic[K, V]):
    """Watches from start() to stop(), once."""

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        key_of: Callable[[Mapping[str, Any]], K],
        read: Callable[[Mapping[str, Any]], V],
        listener: Listener[K, V],
        pauses: Tuple[float, float] = (FIRST_PAUSE, LONGEST_PAUSE),
    ) -> None:
        """`read` raises a CniError about an object that it does not understand."""
        self._client, self._resource, self._pauses = client, resource, pauses
        self._key_of, self._read, self._listener = key_of, read, listener
        self._version = ""  # where to continue the watch; "" means to list again
        self.problem = "the API server has not been asked yet"
        self._told = ""
        self.lasting_problem = ""  # what only an operator can fix
        self.is_listed = False  # whether the list was complete at least once
        self._stopping = threading.Event()
        name = f"watch-{resource}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        self._stopping.set()
        self._client.cancel()

    def stop(self) -> None:
        self._stopping.set()
        for _unused in range(int(STOP_SECONDS * 10)):
            self._client.cancel()
            self._thread.join(0.1)
            if not self._thread.is_alive():
                return

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _work(self) -> None:
        keep_watching(self._attempt, self._lost, self._failed, self._stopping, self._pauses)

    def _attempt(self, heard: Callable[[], None]) -> None:
        if not self._version:
            self._version = self._list(heard)
            self.is_listed = True
        with self._client.watch_all(self._resource, self._version) as events:
            self._tell("")
            for kind, version, found in events:
                heard()
                self._hear(kind, found)
                self._version = version

    def _list(self, heard: Callable[[], None]) -> str:
        found: Dict[K, V] = {}
        wrong: Dict[K, str] = {}
        version = ""
        for items, at in self._client.pages(self._resource):
            version = at
            heard()
            for item in items:
                key = self._key(item)
                try:
                    found[key] = self._read(item)
                except CniError as problem:
                    wrong[key] = str(problem)
        log.info("listed", kind=self._resource, count=len(found), wrong=len(wrong))
        self._listener.listed(found, wrong)
        return version

    def _hear(self, kind: str, found: Mapping[str, Any]) -> None:
        if kind == BOOKMARK:
            return
        key = self._key(found)
        if kind == DELETED:
            self._listener.gone(key)
            return
        try:
            value = self._read(found)
        except CniError as problem:
            self._listener.wrong(key, str(problem))
        else:
            self._listener.changed(key, value)

    def _key(self, found: Any) -> K:
        try:
            return self._key_of(found)
        except (KeyError, TypeError) as problem:
            raise not_understood(f"an object lacks {problem}") from None

    def _lost(self, problem: KubeError) -> None:
        if problem.kind in (GONE, REFUSED):
            self._version = ""
        if problem.kind != GONE:
            self._tell(str(problem), is_lasting=problem.kind == DENIED)

    def _failed(self, bug: Exception) -> None:
        self._version = ""
        self._tell(f"a bug in HeadCNI: {bug!r}", is_lasting=True)

    def _tell(self, problem: str, is_lasting: bool = False) -> None:
        """Log a problem when it begins. The watch of this node's pods reports a lost server, too,
        so only what lasts is a warning here."""
        before, self._told, self.problem = self._told, problem, problem
        self.lasting_problem = problem if is_lasting else ""
        if problem and not before:
            (log.warn if is_lasting else log.info)(
                "cannot be watched", kind=self._resource, problem=problem
            )
        elif not problem:
            log.info("watching", kind=self._resource)
