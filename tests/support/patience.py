"""Wait for something that another process or the kernel is about to do, but not forever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar, Union

Found = TypeVar("Found")


def until(
    wanted: Callable[[], Found],
    seconds: float = 20.0,
    what: Union[str, Callable[[], str]] = "the condition",
    every: float = 0.02,
) -> Found:
    """Return what `wanted` returned when it was first true. Fail after so many seconds, with `what`
    in the message; it may be a function that reads, say, a log at that moment."""
    deadline = time.monotonic() + seconds
    while True:
        found = wanted()
        if found:
            return found
        if time.monotonic() >= deadline:
            described = what if isinstance(what, str) else what()
            raise AssertionError(f"not true within {seconds:g} s: {described}")
        time.sleep(every)
