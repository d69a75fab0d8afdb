# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""A lock on a file, that a killed process lets go of by dying, and that nobody waits for for ever.

The runtime uses this file too. Only the standard library is used, because this runs on nodes.
"""

from __future__ import annotations

import errno
import time

SECONDS = 60.0
PAUSE_SECONDS = 0.02


def lock(handle: int, path: str, seconds: float = SECONDS) -> None:
    """Have an open file to ourselves, until it is closed; a TimeoutError if others keep it."""
    import fcntl  # not on the way of a pod that needs no lock

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
