"""Wait for something that another process or the kernel is about to do, but not forever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def until(
    wanted: Callable[[], Found],
    seconds: float = 20.0,
    what: str = "the condition",
    every: float = 0.02,
) -> Found:
    """Return what `wanted` returned when it was first true. Fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        found = wanted()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not come true within {seconds:g} s"
        time.sleep(every)
