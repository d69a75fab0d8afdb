"""Pods that are to be compared soon."""

from __future__ import annotations

import threading
import time

QUEUED = 1024
BATCH = 256
BATCH_SECONDS = 1.0


class WorkQueue:
    """Holds each pod once, however often it is named, up to a limit. A batch comes only after a
    pause since the last one, so a storm of events costs as much as a single look."""

    def __init__(self, capacity: int = QUEUED, pause: float = BATCH_SECONDS) -> None:
        self._capacity, self._pause = capacity, pause
        self._due: dict[str, float] = {}
        self._changed = threading.Condition()
        self._not_before = 0.0
        self._closed = self._interrupted = False

    def __len__(self) -> int:
        return len(self._due)

    def put(self, key: str, delay: float = 0.0) -> bool:
        """False if there is no room: the caller then has to look at all pods."""
        due = time.monotonic() + delay
        with self._changed:
            if key not in self._due and len(self._due) >= self._capacity:
                return False
            self._due[key] = min(due, self._due.get(key, due))
            self._changed.notify()
            return True

    def take(self, until: float, most: int = BATCH) -> list[str]:
        """Wait for pods that are due, and return them, the longest due first. Empty at the time
        `until`, or if the queue was closed or interrupted."""
        with self._changed:
            while not (self._closed or self._interrupted):
                now = time.monotonic()
                ready = [key for key, due in self._due.items() if due <= now]
                if ready and now >= self._not_before:
                    ready.sort(key=self._due.__getitem__)
                    for key in ready[:most]:
                        del self._due[key]
                    self._not_before = now + self._pause
                    return ready[:most]
                if now >= until:
                    return []
                next_due = min(self._due.values(), default=until)
                wake = max(next_due, self._not_before)
                self._changed.wait(max(0.0, min(wake, until) - now))
            self._interrupted = False
            return []

    def interrupt(self) -> None:
        """Let the waiting take() return, or the next one, because `until` has changed."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
