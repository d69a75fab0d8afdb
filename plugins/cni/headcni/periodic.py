"""A thread that does its work at intervals, and sooner when it is woken or when something happens.

Every part that compares and repairs at intervals runs on this loop: routes, approvals, firewalls,
the token for Kubernetes, and the daemon's own upkeep.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Callable, NamedTuple, Optional

from .log import Log

CANCEL_SECONDS = 0.1  # between two attempts to cancel what keeps the thread from ending


class Source(NamedTuple):
    """Something that may ask for a pass. `has_news` reads everything that has arrived, and returns
    whether any of it matters."""

    socket: Any  # with fileno()
    has_news: Callable[[], bool]


class WakeUp(NamedTuple):
    """What interrupted the wait for the next pass."""

    woken: bool  # somebody called wake()
    news: bool  # a source had news
    since_first: float  # seconds since the first interruption of this wait
    left: float  # seconds until the pass that was due anyway


def at_once(_wake_up: WakeUp) -> float:
    return 0.0


class Periodic:
    """Calls `work` from start() to stop(), first at once and then every `interval` seconds.

    `work` may return the number of seconds until the next pass. `delay` decides how many seconds
    after an interruption the next pass begins. `gather` lets news collect for that many seconds
    before it is read. What `work` raises is given to `failed` or logged, and the loop goes on,
    because the next pass may succeed.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Optional[float]],
        interval: float,
        *,
        delay: Callable[[WakeUp], float] = at_once,
        gather: float = 0.0,
        failed: Optional[Callable[[Exception], None]] = None,
    ) -> None:
        self.name = name
        self._work, self._delay, self._failed = work, delay, failed or self._log_bug
        self._gather = gather
        self._interval = interval
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._bell: Optional[socket.socket] = None

    def start(
        self, sources: Sequence[Source] = (), at_end: Callable[[], object] = lambda: None
    ) -> None:
        """`at_end` is called when the thread ends, for example to close the sources."""
        self._stopping = threading.Event()
        self._bell, listener = socket.socketpair()
        for end in (self._bell, listener):
            end.setblocking(False)
        arguments = (self._stopping, listener, tuple(sources), at_end)
        self._thread = threading.Thread(
            target=self._run, args=arguments, name=self.name, daemon=True
        )
        self._thread.start()

    def stop(self, seconds: float, cancel: Optional[Callable[[], object]] = None) -> None:
        """End the loop, and wait at most so long for a pass in progress. `cancel` is called until
        the thread has ended: it ends what the pass may be waiting for."""
        thread, deadline = self._thread, time.monotonic() + seconds
        self.ask_to_stop()
        while thread is not None and thread.is_alive() and time.monotonic() < deadline:
            if cancel is not None:
                cancel()
            left = max(0.0, deadline - time.monotonic())
            thread.join(left if cancel is None else min(CANCEL_SECONDS, left))
        self._thread = None
        if self._bell is not None:
            self._bell.close()
            self._bell = None

    def ask_to_stop(self) -> None:
        """Begin no further pass. stop() waits for the one in progress."""
        self._stopping.set()
        self.wake()

    def wake(self) -> None:
        """Begin the next pass soon, as `delay` says."""
        self._woken.set()
        bell = self._bell
        if bell is not None:
            with suppress(OSError):  # it is full, or was closed by stop()
                bell.send(b"!")

    def every(self, seconds: float) -> None:
        """Change the interval. The next pass begins soon."""
        self._interval = seconds
        self.wake()

    @property
    def interval(self) -> float:
        return self._interval

    @property
    def is_woken(self) -> bool:
        """Whether wake() was called and the thread has not noticed it yet."""
        return self._woken.is_set()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def is_alive(self) -> bool:
        thread = self._thread
        return thread is not None and thread.is_alive()

    def _log_bug(self, bug: Exception) -> None:
        Log(self.name).error("a bug in HeadCNI", problem=bug)

    def _run(
        self,
        stopping: threading.Event,
        listener: socket.socket,
        sources: Sequence[Source],
        at_end: Callable[[], object],
    ) -> None:
        try:
            with listener:
                while not stopping.is_set():
                    seconds: Optional[float] = None
                    try:
                        seconds = self._work()
                    except Exception as bug:
                        self._failed(bug)
                    wait = self._interval if seconds is None else seconds
                    self._wait(wait, stopping, listener, sources)
        finally:
            at_end()

    def _wait(
        self,
        seconds: float,
        stopping: threading.Event,
        listener: socket.socket,
        sources: Sequence[Source],
    ) -> None:
        due = time.monotonic() + seconds
        first: Optional[float] = None
        watched = [listener, *(source.socket for source in sources)]
        while not stopping.is_set():
            left = due - time.monotonic()
            if left <= 0:
                return
            ready, _unused, _unused = select.select(watched, [], [], left)
            if ready and self._gather:
                stopping.wait(min(self._gather, left))
            self._woken.clear()
            woken = _drain(listener)
            news = [source.has_news() for source in sources]
            if not woken and not any(news):
                continue
            now = time.monotonic()
            first = now if first is None else first
            due = now + self._delay(WakeUp(woken, any(news), now - first, due - now))


def _drain(listener: socket.socket) -> bool:
    """Whether the bell was rung."""
    rung = False
    with suppress(BlockingIOError):
        while listener.recv(4096):
            rung = True
    return rung
