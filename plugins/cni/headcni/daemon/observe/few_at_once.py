"""A server with a thread for each request and a limit on requests at a time. A client beyond the
limit is told so, without a thread.

A client that keeps us waiting, for its request or for reading the answer, loses its place to the
next client, the oldest first. So idle clients cannot keep others out, however many they are.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from contextlib import suppress
from time import monotonic
from typing import Any

EVICTION_SECONDS = 0.5  # for the thread of a client that lost its place to end


class FewAtOnce(socketserver.ThreadingMixIn):
    """A mixin for servers of socketserver."""

    daemon_threads = True

    def __init__(self, at_once: int, busy: bytes, *args: Any) -> None:
        """`busy` is what a client beyond the limit gets."""
        self._at_once, self._busy = at_once, busy
        self._free = threading.Semaphore(at_once)
        self._lock = threading.Lock()
        self._waited_for: dict[Any, None] = {}  # connections, the oldest first
        super().__init__(*args)

    def is_waited_for(self, request: Any, waited_for: bool) -> None:
        """Note whether we wait for this connection's client, or the client for us."""
        with self._lock:
            self._waited_for.pop(request, None)
            if waited_for:
                self._waited_for[request] = None

    def drained(self, seconds: float) -> None:
        """Wait for requests in progress. Nobody gets in afterwards."""
        end = monotonic() + seconds
        for _unused in range(self._at_once):
            self._free.acquire(timeout=max(0.0, end - monotonic()))

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._has_place():
            with suppress(OSError):
                request.settimeout(0.1)
                request.send(self._busy)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was started that would free the place at its end
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            self.is_waited_for(request, True)
            super().process_request_thread(request, client_address)
        finally:
            self.is_waited_for(request, False)
            self._free.release()

    def shutdown_request(self, request: Any) -> None:
        self.is_waited_for(request, False)  # another connection may get its descriptor after this
        super().shutdown_request(request)  # type: ignore[misc]

    def _has_place(self) -> bool:
        if self._free.acquire(blocking=False):
            return True
        with self._lock:
            oldest = next(iter(self._waited_for), None)
            if oldest is None:
                return False
            del self._waited_for[oldest]
            with suppress(OSError):  # its thread then sees the end of the connection
                oldest.shutdown(socket.SHUT_RDWR)
        return self._free.acquire(timeout=EVICTION_SECONDS)
