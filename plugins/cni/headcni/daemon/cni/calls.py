"""The calls that the server has taken: their threads, their order, and their answers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Optional

from ...datapath.netlink import Netlink
from ...exec import MAX_NESTING
from ...shim import HANDED_BACK, LIMIT
from ...skel import NESTING, pod_ref, steps
from . import protocol

MAX_CALLS = 256  # begun or waiting; the shim of a call beyond the limit runs it itself
THREADS = 16  # for each depth of nesting, started when needed
# Python runs one thread at a time, and calls that take it from each other after every system call
# spend more time on that than on pods. So few calls of a depth are at work at once: one in Python,
# others in the kernel. A call that its shim runs does not count.
AT_WORK = 3
# A netconf of this size comes from annotations that a pod's author has written. Python runs one
# thread at a time, so such calls get few threads, which pause for longer than they work.
LARGE = 32 << 10  # bytes
LARGE_THREADS = 2  # for each depth of nesting
LARGE_CALLS = 16  # begun or waiting; beyond that their shims run them
REST = 16  # times as long as the call has used the processor
LONGEST_REST = 1.0
SEND_SECONDS = 5.0
THREAD_NETNS = "/proc/thread-self/ns/net"


def close(connection: socket.socket, fd: Optional[int]) -> None:
    connection.close()
    if fd is not None:
        os.close(fd)


class PendingCall:
    """A request that has arrived completely, until it is answered."""

    def __init__(
        self, request: protocol.Request, connection: socket.socket, netns_fd: Optional[int]
    ) -> None:
        self.request = request
        self.connection = connection
        self.netns_fd = netns_fd
        self.arrived = time.monotonic()
        self.answered = False
        self.depth = min(len(steps(request.env)), MAX_NESTING)
        self.is_large = len(request.stdin) >= LARGE
        self.namespace = pod_ref(request.env).namespace
        # No two calls may work on it at the same time: a runtime that has given up on an ADD may
        # send a DEL while the ADD still runs. A headcni in a chain of ours is called while the
        # outer one works on the same container, so the chain is a part. GC and STATUS have none.
        container, ifname, nesting = (
            request.env.get(name, "") for name in ("CNI_CONTAINERID", "CNI_IFNAME", NESTING)
        )
        self.subject = (request.program, container, ifname, nesting) if container else ()

    def is_abandoned(self) -> bool:
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def answer(self, exit_code: int, output: bytes) -> None:
        self.connection.settimeout(SEND_SECONDS)
        self.connection.sendall(protocol.answer(exit_code, output))
        self.connection.close()
        self.answered = True

    def hand_back(self) -> Optional[protocol.Report]:
        """Let the shim run the call, and wait for its report. The connection closes when it
        ends."""
        received = bytearray()
        with suppress(OSError):
            self.connection.settimeout(SEND_SECONDS)
            self.connection.sendall(protocol.answer(HANDED_BACK, b""))
            self.answered = True
            self.connection.settimeout(None)
            while len(received) <= LIMIT:
                more = self.connection.recv(65536)
                if not more:
                    break
                received += more
        return protocol.report(received)

    def close(self) -> None:
        close(self.connection, self.netns_fd)
        self.netns_fd = None


class FairQueue:
    """Calls that wait for a thread. The namespaces of pods take turns, however many pods each
    has."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[PendingCall]] = {}  # the next namespace comes first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[PendingCall]:
        for calls in self._waiting.values():
            yield from calls

    def append(self, call: PendingCall) -> None:
        self._waiting.setdefault(call.namespace, deque()).append(call)

    def popleft(self) -> PendingCall:
        namespace = next(iter(self._waiting))
        calls = self._waiting.pop(namespace)
        call = calls.popleft()
        if calls:
            self._waiting[namespace] = calls
        return call

    def clear(self) -> None:
        self._waiting.clear()


class Lane:
    """The calls of a depth of nesting, either large or not, and their threads."""

    def __init__(self, lock: threading.RLock, for_large: bool) -> None:
        self.ready = FairQueue()
        self.came = threading.Condition(lock)
        self.idle = 0
        self.at_work = 0
        self.threads = 0
        self.most_threads = LARGE_THREADS if for_large else THREADS
        self.most_at_work = LARGE_THREADS if for_large else AT_WORK
        self.rests = for_large

    @property
    def may_begin(self) -> bool:
        return bool(self.ready) and self.at_work < self.most_at_work


class Calls:
    """Runs calls in threads: a limited number at once, and those of a container one after another.

    A chain of ours may call headcni, whose shim comes back here while the outer call occupies a
    thread. So each depth has its own threads: a call waits only for deeper calls, and the depth is
    limited.
    """

    def __init__(self, serve: Callable[[PendingCall, Worker], None]) -> None:
        self._serve = serve
        self._lock = threading.RLock()
        self._lanes = [
            Lane(self._lock, for_large)
            for _unused in range(MAX_NESTING + 1)
            for for_large in (False, True)
        ]
        self._behind: dict[
            tuple[str, ...], deque[PendingCall]
        ] = {}  # calls that wait for a subject in work
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._over = threading.Event()
        self.count = self._large = 0

    def begin(self, call: PendingCall) -> bool:
        """False if there are too many calls, or the server is stopping."""
        with self._lock:
            if self._stopping or self.count >= MAX_CALLS:
                return False
            if call.is_large and self._large >= LARGE_CALLS:
                return False
            self.count += 1
            self._large += call.is_large
            if call.subject and call.subject in self._behind:
                self._behind[call.subject].append(call)
                return True
            if call.subject:
                self._behind[call.subject] = deque()
            self._make_ready(call)
            return True

    def is_followed(self, call: PendingCall) -> bool:
        """Whether another call for the same container waits for this one."""
        with self._lock:
            return bool(self._behind.get(call.subject))

    @contextmanager
    def left_to_its_shim(self, call: PendingCall) -> Iterator[None]:
        """Its thread only waits meanwhile: another call may be at work."""
        lane = self._lane_of(call)
        with self._lock:
            lane.at_work -= 1
            self._begin_next(lane)
        try:
            yield
        finally:
            with self._lock:
                lane.at_work += 1

    def finish(self, limit: float) -> bool:
        """Hand back calls that have not begun, and finish the others and those that wait for
        them: a shim that got a DEL back would run it at the same time as the ADD that is in
        progress."""
        deadline = time.monotonic() + limit
        with self._lock:
            self._stopping = True
            self._over.set()
            for lane in self._lanes:
                for call in lane.ready:
                    for unbegun in (call, *self._behind.pop(call.subject, ())):
                        self._count_out(unbegun)
                        unbegun.close()
                lane.ready.clear()
                lane.came.notify_all()
        while True:
            with self._lock:
                at_work = next((thread for thread in self._threads if thread.is_alive()), None)
            if at_work is None:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            at_work.join(left)

    def _make_ready(self, call: PendingCall) -> None:
        lane = self._lane_of(call)
        lane.ready.append(call)
        self._begin_next(lane)

    def _lane_of(self, call: PendingCall) -> Lane:
        return self._lanes[2 * call.depth + call.is_large]

    def _begin_next(self, lane: Lane) -> None:
        """Find a thread for the next call. If it must wait, a thread that becomes free takes it."""
        if not lane.may_begin:
            return
        if lane.idle:
            lane.came.notify()
        else:
            self._hire(lane)

    def _hire(self, lane: Lane) -> None:
        if lane.threads == lane.most_threads:
            return
        # A daemon thread, because a call that outlasts stop() must not keep the process alive.
        thread = threading.Thread(target=self._work, args=(lane,), name="cni", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no new thread could be started; an existing worker takes the call
            while lane.ready and not lane.threads:
                call = lane.ready.popleft()
                call.close()
                self._finished(call)
            return
        lane.threads += 1
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [thread]

    def _work(self, lane: Lane) -> None:
        worker = Worker()
        try:
            while worker.is_at_home():
                call = self._next(lane)
                if call is None:
                    return
                try:
                    self._work_on(call, worker, lane)
                finally:
                    with self._lock:
                        lane.at_work -= 1
        finally:
            worker.close()
            with self._lock:
                lane.threads -= 1
                self._begin_next(lane)

    def _work_on(self, call: PendingCall, worker: Worker, lane: Lane) -> None:
        began = time.thread_time()
        try:
            self._serve(call, worker)
        finally:
            call.close()
            self._finished(call)
        if lane.rests:
            took = time.thread_time() - began
            self._over.wait(min(REST * took, LONGEST_REST))

    def _next(self, lane: Lane) -> Optional[PendingCall]:
        with self._lock:
            lane.idle += 1
            lane.came.wait_for(lambda: self._stopping or lane.may_begin)
            lane.idle -= 1
            if not lane.ready:
                return None
            call = lane.ready.popleft()
            lane.at_work += 1
            self._begin_next(lane)  # two that came at once may have woken one thread
            return call

    def _finished(self, call: PendingCall) -> None:
        with self._lock:
            self._count_out(call)
            if not call.subject:
                return
            waiting = self._behind[call.subject]
            if waiting:
                self._make_ready(waiting.popleft())
            else:
                del self._behind[call.subject]

    def _count_out(self, call: PendingCall) -> None:
        self.count -= 1
        self._large -= call.is_large


class Worker:
    """What a thread keeps between calls: netlink in the node's own network namespace."""

    def __init__(self) -> None:
        self._home = os.stat(THREAD_NETNS)
        self._kernel: Optional[Netlink] = None

    def prepare(self) -> None:
        if self._kernel is None:
            self._kernel = Netlink()

    @property
    def kernel(self) -> Netlink:
        if self._kernel is None:
            raise AssertionError("prepare() comes first")
        return self._kernel

    def renew(self) -> None:
        """After a failure: answers to earlier requests may still arrive."""
        self.close()
        self._kernel = None

    def is_at_home(self) -> bool:
        """False if it could not return from a pod's namespace, where it must not continue."""
        return os.path.samestat(self._home, os.stat(THREAD_NETNS))

    def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
