"""Which calls wait for which, what becomes of them when the daemon stops, and whether it serves."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Optional

import pytest

from headcni.daemon.cni.calls import (
    AT_WORK,
    LARGE,
    LARGE_CALLS,
    LARGE_THREADS,
    THREADS,
    Calls,
    PendingCall,
)
from headcni.daemon.cni.protocol import Request
from headcni.daemon.cni.server import CniServer

SECONDS = 10.0


class Work:
    """Calls that are at work until they are told to end."""

    def __init__(self) -> None:
        self.calls = Calls(self._serve)
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._may_end = threading.Event()
        self._endings: Optional[threading.Semaphore] = None
        self._shims: list[socket.socket] = []
        self.left_to_shims = self.fails = False

    def _serve(self, call: PendingCall, _worker: object) -> None:
        with self._changed:
            self.begun.append(call.request.env["CNI_COMMAND"])
            self._changed.notify_all()
        with self.calls.left_to_its_shim(call) if self.left_to_shims else nullcontext():
            self._may_end.wait(SECONDS)
        if self.fails:
            raise RuntimeError("a bug")
        if self._endings is not None:
            self._endings.acquire(timeout=SECONDS)

    def call(
        self, verb: str, container: str = "", stdin: bytes = b"", taken: bool = True, **env: str
    ) -> socket.socket:
        """The shim's end of its connection."""
        ours, theirs = socket.socketpair()
        names = {"CNI_CONTAINERID": container, "CNI_IFNAME": "eth0"} if container else {}
        env = {"HEADCNI_PROGRAM": "headcni", "CNI_COMMAND": verb, **names, **env}
        assert self.calls.begin(PendingCall(Request("0", "", env, stdin), theirs, None)) is taken
        self._shims.append(ours)
        return ours

    def has_begun(self, *verbs: str) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: sorted(self.begun) == sorted(verbs), 2.0)

    def end(self, calls: int = 0) -> None:
        """Let so many of them end, or all."""
        if calls:
            self._endings = threading.Semaphore(calls)
        self._may_end.set()

    def calls_are_over(self) -> bool:
        until = time.monotonic() + SECONDS
        while self.calls.count and time.monotonic() < until:
            time.sleep(0.01)
        return not self.calls.count

    def begin_again(self) -> None:
        """Forget what has begun, and keep the calls that come now at work."""
        self.left_to_shims = False
        self._may_end.clear()
        with self._changed:
            self.begun.clear()

    def clear(self) -> None:
        self.end(1000)
        self.calls.finish(SECONDS)
        for shim in self._shims:
            shim.close()


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.clear()


def test_calls_for_one_container_come_one_after_the_other(work):
    work.call("ADD", "c1")
    work.call("DEL", "c1")
    work.call("DEL", "c2")
    work.call("CHECK", "c1", HEADCNI_CHAIN="0")
    assert work.has_begun("ADD", "DEL", "CHECK")
    assert not work.has_begun("ADD", "DEL", "DEL", "CHECK")
    work.end()
    assert work.has_begun("ADD", "DEL", "DEL", "CHECK")


def test_calls_for_no_container_wait_for_nobody(work):
    work.call("GC")
    work.call("STATUS")
    work.call("STATUS")
    assert work.has_begun("GC", "STATUS", "STATUS")


def test_a_stopping_daemon_keeps_the_call_that_waits_for_one_at_work(work):
    work.call("ADD", "c1")
    assert work.has_begun("ADD")
    behind = work.call("DEL", "c1")
    stopping = threading.Thread(target=work.calls.finish, args=(SECONDS,))
    stopping.start()
    behind.settimeout(0.5)
    with pytest.raises(socket.timeout):  # were it closed, its shim would do it beside the ADD
        behind.recv(1)
    work.end()
    stopping.join(SECONDS)
    assert work.begun == ["ADD", "DEL"]
    assert work.calls.count == 0
    assert behind.recv(1) == b""


def test_a_socket_that_somebody_deleted_is_not_served(tmp_path):
    path = tmp_path / "cni.sock"
    server = CniServer(str(path), str(tmp_path / "data"))
    server.start()
    try:
        assert server.is_alive()
        path.unlink()
        assert not server.is_alive()
    finally:
        server.stop(SECONDS)


def test_a_namespace_with_many_calls_leaves_the_next_turn_to_another(work: Work) -> None:
    for number in range(AT_WORK + 50):
        work.call("ADD", f"evil{number}", CNI_ARGS="K8S_POD_NAMESPACE=evil")
    assert work.has_begun(*["ADD"] * AT_WORK)
    work.call("CHECK", "good", CNI_ARGS="K8S_POD_NAMESPACE=good")
    work.end(2)
    assert work.has_begun(*["ADD"] * (AT_WORK + 1), "CHECK")


def test_few_calls_are_at_work_at_once_and_each_that_ends_makes_room(work: Work) -> None:
    for number in range(AT_WORK + 5):
        work.call("ADD", f"c{number}")
    assert work.has_begun(*["ADD"] * AT_WORK)
    assert not work.has_begun(*["ADD"] * (AT_WORK + 1))
    work.end()
    assert work.has_begun(*["ADD"] * (AT_WORK + 5))


def test_a_call_that_its_shim_runs_leaves_its_place_to_another(work: Work) -> None:
    work.left_to_shims = True
    for number in range(THREADS + 5):
        work.call("ADD", f"c{number}")
    assert work.has_begun(*["ADD"] * THREADS)
    assert not work.has_begun(*["ADD"] * (THREADS + 1))
    work.end()
    assert work.has_begun(*["ADD"] * (THREADS + 5))


def test_after_calls_that_their_shims_ran_no_more_than_before_are_at_work(work: Work) -> None:
    work.left_to_shims = True
    for number in range(THREADS):
        work.call("ADD", f"c{number}")
    assert work.has_begun(*["ADD"] * THREADS)
    work.end()
    assert work.calls_are_over()
    work.begin_again()
    for number in range(THREADS):
        work.call("CHECK", f"c{number}")
    assert work.has_begun(*["CHECK"] * AT_WORK)
    assert not work.has_begun(*["CHECK"] * (AT_WORK + 1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_that_fails_by_a_bug_makes_room_for_the_next(work: Work) -> None:
    work.fails = True
    for number in range(AT_WORK):
        work.call("ADD", f"c{number}")
    assert work.has_begun(*["ADD"] * AT_WORK)
    work.end()
    assert work.calls_are_over()
    work.fails = False
    work.call("CHECK", "c1")
    assert work.has_begun(*["ADD"] * AT_WORK, "CHECK")


def test_large_calls_have_few_threads_and_places_and_others_pass_them(work: Work) -> None:
    for number in range(LARGE_CALLS):
        work.call("ADD", f"large{number}", b"x" * LARGE)
    work.call("ADD", "one too many", b"x" * LARGE, taken=False)
    assert work.has_begun(*["ADD"] * LARGE_THREADS)
    work.call("CHECK", "small")
    assert work.has_begun(*["ADD"] * LARGE_THREADS, "CHECK")
