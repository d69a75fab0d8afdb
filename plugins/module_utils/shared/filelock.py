# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""A lock on a file. It is released when its process is killed, and waiting for it has a limit."""

from __future__ import annotations

import errno
import time

SECONDS = 60.0
PAUSE_SECONDS = 0.02


def lock(handle: int, path: str, seconds: float = SECONDS) -> None:
    """Lock an open file until it is closed; a TimeoutError if others keep it locked."""
    import fcntl  # imported late: an ADD usually needs no lock

    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"locked by others for {seconds:g} s: see fuser -v", path
                ) from None
        time.sleep(PAUSE_SECONDS)
