"""A lock that a killed process lets go of by dying."""

from __future__ import annotations

import fcntl
import time
from contextlib import contextmanager
from typing import Iterator

from .layout import LabError, cache_dir


@contextmanager
def locked(name: str, waiting_for: str, limit: float) -> Iterator[None]:
    path = cache_dir() / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        deadline = time.monotonic() + limit
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LabError(
                        f"{waiting_for} still holds {path} after {limit:.0f} s"
                    ) from None
                if not told:
                    print(f"  … waiting for {waiting_for}", flush=True)
                    told = True
                time.sleep(0.2)
        yield
