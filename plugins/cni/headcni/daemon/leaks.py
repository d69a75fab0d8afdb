"""Releasing networks whose network namespace is gone although no DEL came."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Callable

from .. import repair
from ..errors import CniError
from ..log import Log
from ..recover import release_unused
from ..store import Store
from .observe.events import LEAKED, Event

GRACE_SECONDS = 60.0  # before a network without a namespace counts as leaked

log = Log("daemon")


class Leaks:
    """Looks for leaked networks when it is due."""

    def __init__(
        self,
        store: Callable[[], Store],
        is_watched: Callable[[], bool],
        tell: Callable[[Event], None],
    ) -> None:
        """`is_watched`: pods of Kubernetes are compared by PodWatcher, which also asks the API
        server, so they are left to it."""
        self._store, self._is_watched, self._tell = store, is_watched, tell
        self.due_at = 0.0
        self._opens = 0

    def is_due(self, interval: float) -> bool:
        """Whether to look now. If so, the next look is due after the interval."""
        if time.monotonic() < self.due_at:
            return False
        self.due_at = time.monotonic() + interval
        return True

    def note_opens(self, opens: int) -> None:
        """Look again soon after the store was opened or replaced: a store that is reconstructed
        during a DEL may adopt the pod from the runtime's cache."""
        if opens != self._opens:
            self._opens = opens
            self.due_at = min(self.due_at, time.monotonic() + GRACE_SECONDS)

    def hurry(self) -> None:
        """Look again soon, because a pool is full."""
        self.due_at = min(self.due_at, time.monotonic() + GRACE_SECONDS)

    def sweep(self) -> Sequence[str]:
        """Release them, and return what was released."""
        released = []
        for attachment in self._store().attachments():
            watched = self._is_watched() and bool(attachment.pod.name)
            young = time.time() - attachment.created < GRACE_SECONDS
            if watched or young or not attachment.netns:
                continue
            if not repair.is_dead(attachment.netns, None):
                continue
            try:
                repair.release(attachment, self._store())
            except CniError as problem:
                log.warn("a leaked network cannot be released", pod=attachment.pod, problem=problem)
                continue
            self._tell(Event.of(LEAKED, attachment, "its network namespace is gone: released"))
            released.append(f"{attachment.owner.container_id} {attachment.owner.ifname}")
        attached = {attachment.owner for attachment in self._store().attachments()}
        for owner in release_unused(self._store(), attached):
            released.append(f"{owner.container_id} {owner.ifname}".strip())
        return released
