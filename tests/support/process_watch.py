"""What every process of this machine was started with, over a time: its arguments and variables.

The lab's machines are containers, so their processes are seen from here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ProcessWatch:
    """Looks over and over, as fast as one thread can. Only what is gone within a look is missed."""

    def __init__(self) -> None:
        self.looks = 0
        self._seen: dict[bytes, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.is_set():
            for pid in filter(str.isdigit, os.listdir("/proc")):
                for kind in ("cmdline", "environ"):
                    with suppress(OSError), open(f"/proc/{pid}/{kind}", "rb") as file:
                        text = file.read()
                        if text not in self._seen:
                            self._seen[text] = f"{kind} of process {pid}"
            self.looks += 1

    def having(self, word: str) -> list[str]:
        """Where it was seen, in words that do not repeat it."""
        return [where for text, where in self._seen.items() if word.encode() in text]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def watched_processes() -> Iterator[ProcessWatch]:
    watch = ProcessWatch()
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
