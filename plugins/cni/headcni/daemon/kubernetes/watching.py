"""Continuing a watch at the API server whatever happens to it."""

from __future__ import annotations

import random
import threading
import time
from typing import Callable, Tuple

from .errors import STOPPED, KubeError

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
SHORTEST_WATCH = 1.0

# Watches until the server ends it, and calls its argument whenever something arrives.
Attempt = Callable[[Callable[[], None]], None]


def keep_watching(
    attempt: Attempt,
    lost: Callable[[KubeError], None],
    failed: Callable[[Exception], None],
    stopping: threading.Event,
    pauses: Tuple[float, float] = (FIRST_PAUSE, LONGEST_PAUSE),
) -> None:
    """Watch again and again, with longer pauses while it fails."""
    first, longest = pauses
    pause = first

    def heard() -> None:
        nonlocal pause
        pause = first

    while not stopping.is_set():
        began, wait = time.monotonic(), 0.0
        try:
            attempt(heard)
            if time.monotonic() - began < SHORTEST_WATCH:
                wait = pause
            else:
                heard()
        except KubeError as problem:
            if problem.kind == STOPPED and stopping.is_set():
                return
            wait = max(pause, problem.retry_after)
            lost(problem)
        except Exception as bug:  # the next attempt may succeed
            wait = longest
            failed(bug)
        if wait:
            # Nodes that lost the API server together should not come back together.
            stopping.wait(wait * random.uniform(0.5, 1.5))  # noqa: S311
            pause = min(pause * 2, longest)
