"""A line that moves on a terminal, and a line now and then where nobody watches."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from typing import Iterator

QUIET_INTERVAL = 20.0


class Step:
    """One thing that takes a while. Call `says` as often as you like."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.began = time.monotonic()
        self._told = self.began
        self._live = sys.stderr.isatty()
        if not self._live:
            print(f"  … {what}", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def says(self, detail: str) -> None:
        line = f"  … {self.what}: {detail} ({self.seconds:.0f} s)"
        if self._live:
            print(f"\r\033[K{line[:110]}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._told > QUIET_INTERVAL:
            self._told = time.monotonic()
            print(line, file=sys.stderr, flush=True)


@contextmanager
def step(what: str) -> Iterator[Step]:
    current = Step(what)
    start = "\r\033[K" if sys.stderr.isatty() else ""
    try:
        yield current
    except BaseException:
        print(f"{start}  ✗ {what} ({current.seconds:.1f} s)", file=sys.stderr, flush=True)
        raise
    print(f"{start}  ✓ {what} ({current.seconds:.1f} s)", file=sys.stderr, flush=True)
