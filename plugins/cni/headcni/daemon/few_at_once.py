"""A thread for each request, and so many at once: one too many is told so, and costs no thread."""

from __future__ import annotations

import socketserver
import threading
from contextlib import suppress
from time import monotonic
from typing import Any


class FewAtOnce(socketserver.ThreadingMixIn):
    """For a server of socketserver's."""

    daemon_threads = True

    def __init__(self, at_once: int, busy: bytes, *args: Any) -> None:
        """`busy` is what the one too many gets."""
        self._at_once, self._busy = at_once, busy
        self._free = threading.Semaphore(at_once)
        super().__init__(*args)

    def drained(self, seconds: float) -> None:
        """Wait for those at work; nobody gets in afterwards."""
        end = monotonic() + seconds
        for _unused in range(self._at_once):
            self._free.acquire(timeout=max(0.0, end - monotonic()))

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            with suppress(OSError):
                request.settimeout(0.1)
                request.send(self._busy)
            self.shutdown_request(request)  # type: ignore[attr-defined]
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started, to give the place back at its end
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()
