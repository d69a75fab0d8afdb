"""The annotation headcni.dev/tailnet-access of namespaces, as the API server knows it.

While the API server is away, the last known values stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Optional, Tuple

from ...log import Log
from ...tailnet_access import ANNOTATION
from .client import NAMESPACES, KubeClient
from .objects import read_annotation
from .watched import WatchedKind
from .watching import FIRST_PAUSE, LONGEST_PAUSE

log = Log("annotations")


class AnnotationWatcher:
    """Watches the annotation of all namespaces from start() to stop(), once."""

    def __init__(
        self,
        client: KubeClient,
        on_change: Callable[[Mapping[str, str]], None],
        pauses: Tuple[float, float] = (FIRST_PAUSE, LONGEST_PAUSE),
    ) -> None:
        self._on_change = on_change
        self._known: dict[str, str] = {}
        self._watch: WatchedKind[str, Optional[str]] = WatchedKind(
            client, NAMESPACES, _name, _annotation, self, pauses
        )
        self.start, self.stop = self._watch.start, self._watch.stop
        self.is_alive = self._watch.is_alive

    @property
    def problem(self) -> str:
        """What only an operator can fix; PodWatcher reports a lost server."""
        return self._watch.lasting_problem

    def listed(self, found: Mapping[str, Optional[str]], wrong: Mapping[str, str]) -> None:
        for name, problem in wrong.items():
            self.wrong(name, problem)
        self._known = {name: text for name, text in found.items() if text is not None}
        self._on_change(self._known)

    def changed(self, key: str, value: Optional[str]) -> None:
        if self._known.get(key) == value:
            return
        self._known.pop(key, None)
        if value is not None:
            self._known[key] = value
        self._on_change(self._known)

    def wrong(self, key: str, problem: str) -> None:
        log.error("a namespace is not understood", namespace=key, problem=problem)

    def gone(self, key: str) -> None:
        self.changed(key, None)


def _name(found: Mapping[str, Any]) -> str:
    return read_annotation(found, ANNOTATION)[0]


def _annotation(found: Mapping[str, Any]) -> Optional[str]:
    return read_annotation(found, ANNOTATION)[1]
