"""The annotation headcni.dev/tailnet-access of namespaces, as the API server knows it.

While the API server is away, the last known values stay.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Callable, Tuple

from ...log import Log
from ...tailnet_access import ANNOTATION
from .client import KubeClient
from .errors import DENIED, GONE, REFUSED, KubeError
from .watching import FIRST_PAUSE, LONGEST_PAUSE, keep_watching

STOP_SECONDS = 5.0

log = Log("annotations")


class AnnotationWatcher:
    """Watches the annotation of all namespaces from start() to stop(), once."""

    def __init__(
        self,
        client: KubeClient,
        on_change: Callable[[Mapping[str, str]], None],
        pauses: Tuple[float, float] = (FIRST_PAUSE, LONGEST_PAUSE),
    ) -> None:
        self._client, self._on_change, self._pauses = client, on_change, pauses
        self._known: dict[str, str] = {}
        self._version = ""  # where to continue the watch; "" means to list again
        self.problem = ""  # what only an operator can fix; PodWatcher reports a lost server
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="annotations", daemon=True)

    def start(self) -> None:
        self._thread.start()

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
            found = self._client.namespaces(ANNOTATION)
            self._known, self._version = found.annotated, found.version
            self._on_change(self._known)
        with self._client.watch_namespaces(ANNOTATION, self._version) as changes:
            self.problem = ""
            for change in changes:
                heard()
                self._version = change.version
                if change.name and self._known.get(change.name) != change.annotation:
                    self._known.pop(change.name, None)
                    if change.annotation is not None:
                        self._known[change.name] = change.annotation
                    self._on_change(self._known)

    def _lost(self, problem: KubeError) -> None:
        if problem.kind in (GONE, REFUSED):
            self._version = ""
        if problem.kind == GONE:
            return
        said = str(problem)
        if problem.kind != DENIED:
            log.debug("annotations of namespaces cannot be watched now", problem=said)
        elif said != self.problem:
            log.warn("annotations of namespaces cannot be watched", problem=said)
            self.problem = said

    def _failed(self, bug: Exception) -> None:
        self._version = ""
        log.error("a bug in HeadCNI", problem=repr(bug))
        self.problem = f"a bug in HeadCNI: {bug!r}"
