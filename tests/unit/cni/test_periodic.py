"""The loop that every part with regular passes runs on."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from headcni.periodic import Periodic, Source, WakeUp


class Passes:
    """Counts passes, and lets a test wait for them."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._changed = threading.Condition()

    def __call__(self) -> None:
        with self._changed:
            self.times.append(time.monotonic())
            self._changed.notify_all()

    def are(self, count: int, seconds: float = 10.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.times) >= count, seconds)


@pytest.fixture
def passes():
    return Passes()


@pytest.fixture
def running():
    """Ends what a test has started."""
    loops: list[Periodic] = []

    def start(loop: Periodic, *sources: Source) -> Periodic:
        loop.start(sources)
        loops.append(loop)
        return loop

    yield start
    for loop in loops:
        loop.stop(10)
        assert not loop.is_alive()


def test_the_first_pass_comes_at_once_and_the_next_after_the_interval(passes, running):
    running(Periodic("test", passes, 0.2))
    assert passes.are(3)
    first, second, third = passes.times[:3]
    assert second - first >= 0.2 and third - second >= 0.2


def test_the_work_may_choose_the_time_of_the_next_pass(passes, running):
    def work() -> float:
        passes()
        return 0.01

    running(Periodic("test", work, 3600))
    assert passes.are(3)


def test_a_wake_up_brings_the_next_pass_forward(passes, running):
    loop = running(Periodic("test", passes, 3600))
    assert passes.are(1)
    loop.wake()
    assert passes.are(2)
    assert not passes.are(3, 0.2), "one wake-up is one pass"


def test_a_wake_up_during_a_pass_is_not_lost(running):
    counted, began, go_on = Passes(), threading.Event(), threading.Event()

    def work() -> None:
        counted()
        began.set()
        assert go_on.wait(10)

    loop = running(Periodic("test", work, 3600))
    assert began.wait(10)
    loop.wake()
    assert loop.is_woken
    go_on.set()
    assert counted.are(2)


def test_no_wake_up_is_lost_among_others_news(running):
    """It may come at any moment of the loop: while it reads its sources, for example."""
    here, there = socket.socketpair()
    with here, there:
        there.setblocking(False)
        passes = Passes()

        def has_news() -> bool:
            if _read(there):
                loop.wake()
            return False

        loop = running(Periodic("test", passes, 3600), Source(there, has_news))
        assert passes.are(1)
        for count in range(2, 20):
            here.send(b"x")
            assert passes.are(count), f"the wake-up before pass {count} was lost"
        loop.stop(10)


def test_another_interval_counts_at_once(passes, running):
    loop = running(Periodic("test", passes, 3600))
    assert passes.are(1)
    loop.every(0.01)
    assert passes.are(4)


def test_what_the_work_raises_is_told_and_the_loop_goes_on(passes, running):
    told: list[Exception] = []

    def work() -> None:
        passes()
        raise ValueError("odd")

    loop = running(Periodic("test", work, 0.01, failed=told.append))
    assert passes.are(3) and loop.is_alive()
    assert isinstance(told[0], ValueError)


def test_news_of_a_source_asks_for_a_pass_and_other_events_do_not(passes, running):
    here, there = socket.socketpair()
    with here, there:
        there.setblocking(False)
        wake_ups: list[WakeUp] = []

        def delay(wake_up: WakeUp) -> float:
            wake_ups.append(wake_up)
            return 0.0

        source = Source(there, lambda: _read(there) == b"news")
        loop = running(Periodic("test", passes, 3600, delay=delay), source)
        assert passes.are(1)
        here.send(b"noise")
        assert not passes.are(2, 0.2)
        here.send(b"news")
        assert passes.are(2)
        assert [(one.woken, one.news) for one in wake_ups] == [(False, True)]
        loop.stop(10)  # before its source is closed


def _read(end: socket.socket) -> bytes:
    try:
        return end.recv(64)
    except BlockingIOError:
        return b""


def test_news_that_comes_together_is_read_together(passes, running):
    here, there = socket.socketpair()
    with here, there:
        there.setblocking(False)
        read: list[bytes] = []

        def has_news() -> bool:
            read.append(_read(there))
            return False

        loop = running(Periodic("test", passes, 3600, gather=0.3), Source(there, has_news))
        assert passes.are(1)
        for _unused in range(5):
            here.send(b"x")
            time.sleep(0.01)
        until = time.monotonic() + 10
        while not read and time.monotonic() < until:
            time.sleep(0.01)
        assert read == [b"xxxxx"]
        loop.stop(10)


def test_the_delay_may_wait_until_news_has_ended(passes, running):
    def delay(wake_up: WakeUp) -> float:
        return min(0.1, max(0.0, 0.5 - wake_up.since_first))

    loop = running(Periodic("test", passes, 3600, delay=delay))
    assert passes.are(1)
    for _unused in range(5):
        loop.wake()
        time.sleep(0.02)
    assert passes.are(2)
    assert not passes.are(3, 0.3), "five wake-ups in a row are one pass"


def test_stopping_does_not_wait_for_the_interval_and_runs_what_comes_at_the_end(passes):
    ended = threading.Event()
    loop = Periodic("test", passes, 3600)
    loop.start(at_end=ended.set)
    assert passes.are(1)
    began = time.monotonic()
    loop.stop(10)
    assert time.monotonic() - began < 5
    assert ended.is_set() and not loop.is_alive() and not loop.is_started


def test_stopping_cancels_what_a_pass_waits_for():
    cancelled, began = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        assert cancelled.wait(30)

    loop = Periodic("test", work, 3600)
    loop.start()
    assert began.wait(10)
    loop.stop(10, cancel=cancelled.set)
    assert cancelled.is_set() and not loop.is_alive()


def test_it_can_be_started_again(passes, running):
    loop = running(Periodic("test", passes, 3600))
    assert passes.are(1)
    loop.stop(10)
    running(loop)
    assert passes.are(2)
