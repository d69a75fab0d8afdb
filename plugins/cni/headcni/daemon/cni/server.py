"""The verbs on a socket, with everything warm: what the shim hands over is run here.

One thread listens and reads. Each call has a thread while it runs, since a verb enters the pod's
network namespace and waits for the kernel. What is not a sound request of root's, of our own
release and network namespace, is closed without an answer, and its shim runs the call itself. The
same becomes of calls that have not begun when the daemon stops; those that have are answered, and
so are those that wait for them. A call that runs other plugins is handed back to its shim.

    python3 -m headcni.daemon.cni.server --socket /run/headcni/cni.sock

serves without the rest of the daemon, and shows each call: for debugging, and for tests.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple, Optional

from ... import __version__, config, loopback, verbs
from ...call import Call, pod_ref
from ...datapath.netlink import Netlink
from ...errors import STORE, CniError
from ...exec import MAX_NESTING, NESTING, LeftToCaller, plugins_left_to_caller, steps
from ...ipam import plugin as ipam
from ...ipam.allocate import Ipam
from ...recover import recover
from ...shim import HANDED_BACK, LIMIT, NETNS, SOCKET
from ...store import DATA_DIR, Attachment, Store
from . import protocol
from .links import LinkRemover

BACKLOG = 256
MAX_READING = 128
MAX_CALLS = 256  # begun or waiting; a shim whose call is one too many runs it itself
THREADS = 16  # for each depth of nesting, started when they are needed
# Python runs one thread at a time, and calls that take it from each other after every system call
# spend more time on that than on pods. So few calls of a depth are at work at once: one in Python,
# others in the kernel. A call that its shim runs does not count.
AT_WORK = 3
# A call with a netconf of this size carries what a pod's author has put into annotations. Python
# runs one thread at a time, so such calls have few threads, which rest longer than they work.
LARGE = 32 << 10  # bytes
LARGE_THREADS = 2  # for each depth of nesting
LARGE_CALLS = 16  # begun or waiting; beyond that their shims run them
REST = 16  # times as long as the call has kept the processor
LONGEST_REST = 1.0
READ_SECONDS = 5.0
SEND_SECONDS = 5.0
PAUSE_SECONDS = 0.2  # before accepting again, when there was no file descriptor left
STORES_KEPT = 8
THREAD_NETNS = "/proc/thread-self/ns/net"
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid

Log = Callable[[str], None]


class Served(NamedTuple):
    """A call that was answered. The first of the phases is "wait", for a thread."""

    verb: str
    outcome: verbs.Outcome
    seconds: float  # of the verb
    response: float  # from the whole request to its answer
    phases: Mapping[str, float]


OnCall = Callable[[Served], None]


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class CniServer:
    """Serves from start() to stop(), once."""

    def __init__(
        self,
        socket_path: str = os.fsdecode(SOCKET),
        data_dir: str = DATA_DIR,
        version: str = __version__,
        on_call: Optional[OnCall] = None,
        log: Log = to_stderr,
    ) -> None:
        """`data_dir` is opened at the start; a call whose configuration names another gets that."""
        self.socket_path = socket_path
        self.version = version
        self._data_dir = data_dir
        self._on_call = on_call
        self._log = log
        self._home = os.readlink(NETNS)
        self._stores = _Stores()
        self._links = LinkRemover(self._stores.using, self._stores.drop, log)
        self._stores.opened = self._links.wake  # a daemon that was killed may have left tombstones
        self._calls = _Calls(self._serve)
        self._door = _Door(socket_path, self._take, log)

    def start(self) -> None:
        """Listen. OSError if the socket cannot be made, or another daemon has it."""
        try:
            with self._stores.using(self._data_dir) as store:
                if store.is_unverified():
                    recover(store)  # before the first pod waits for it
        except CniError as problem:  # each call will say so, and the daemon has other work, too
            self._log(f'msg="the store cannot be used" error="{problem}"')
        self._door.open()
        self._links.start()

    def stop(self, limit: float = 30.0) -> bool:
        """Take no more calls and finish those that have begun; false if some outlast the limit.

        Those stay connected until the process ends: were they closed, their shims would run them a
        second time beside us.
        """
        deadline = time.monotonic() + limit
        self._door.close()
        finished = self._calls.finish(limit)
        finished = self._links.stop(max(1.0, deadline - time.monotonic())) and finished
        if finished:
            self._stores.close()
        self._door.give_up_the_path()
        return finished

    def is_alive(self) -> bool:
        return self._door.is_alive() and self._links.is_alive()

    @property
    def calls(self) -> int:
        """How many are at work or wait, just now."""
        return self._calls.count

    def _take(self, connection: socket.socket, message: bytes, netns_fd: Optional[int]) -> None:
        """A whole message has come. Is it a call for us?"""
        try:
            request = protocol.parse(message)
            if request.release != self.version:
                raise protocol.Malformed(f"it is of release {request.release}, not {self.version}")
            if request.netns != self._home:
                raise protocol.Malformed("its caller is in another network namespace")
            if request.is_ipam and ipam.means_its_own_folder(request.stdin):
                raise protocol.Malformed("its dataDir means something only to its caller")
        except protocol.Malformed as problem:
            self._log(f'msg="a call was left to its shim" reason="{problem}"')
            _close(connection, netns_fd)
            return
        call = _Call(request, connection, netns_fd)
        if not self._calls.begin(call):
            call.close()

    def _serve(self, call: _Call, worker: _Worker) -> None:
        if call.is_abandoned():  # the runtime has ended its shim: nobody wants this any more
            return
        try:
            worker.prepare()
        except OSError as problem:
            self._log(f'msg="a call was left to its shim" reason="no netlink: {problem}"')
            return
        outcome = self._run(call, call.request.env, worker)
        if outcome is None:
            return
        made = not outcome.code and "store" in outcome.phases
        if made and not call.answered and not self._calls.is_followed(call):
            # The DEL of a runtime that gave up on this ADD may be over: a shim that does not get in
            # here, as we are stopping, runs it by itself.
            self._run(call, {**call.request.env, "CNI_COMMAND": "DEL"}, worker)

    def _run(self, call: _Call, env: Mapping[str, str], worker: _Worker) -> Optional[verbs.Outcome]:
        """How it went; None if the shim was to run it and did not say."""
        buried: list[str] = []
        began = time.monotonic()
        verb = env.get("CNI_COMMAND", "")
        if call.request.is_ipam:
            verb = f"IPAM-{verb}"
            outcome = verbs.Outcome(*ipam.outcome(env, call.request.stdin, self._opened))
        elif call.request.is_loopback:
            verb = f"LOOPBACK-{verb}"
            outcome = verbs.Outcome(*loopback.run(env, call.request.stdin, call.netns_fd))
        else:
            opener = self._opener(worker, buried.append)
            try:
                with plugins_left_to_caller():
                    outcome = verbs.run(env, call.request.stdin, call.netns_fd, opener)
            except LeftToCaller:
                reported = self._hand_back(call)
                if reported is None:
                    return None
                outcome = reported
        took = time.monotonic() - began
        with suppress(OSError):  # its shim was ended meanwhile, or has answered by itself
            call.answer(outcome.exit_code, outcome.output)
        if outcome.unrecorded and outcome.network:
            buried.append(outcome.network.data_dir)
        for data_dir in buried:
            self._links.wake(data_dir)
        response = time.monotonic() - call.arrived
        phases = {"wait": began - call.arrived, **outcome.phases}
        self._report(Served(verb, outcome, took, response, phases))
        return outcome

    def _hand_back(self, call: _Call) -> Optional[verbs.Outcome]:
        """Have the shim run the call, and wait until it has: the next one for the same container
        must not begin before. None if it did not say how that went."""
        env, stdin = call.request.env, call.request.stdin
        network = config.parse(stdin, env, forgiving=env.get("CNI_COMMAND") == "DEL")
        asked = Call.of(env)
        owner = verbs.owner_of(network, asked)

        def attachment() -> Optional[Attachment]:
            with suppress(CniError), self._opened(network.data_dir) as store:
                return store.attachment(owner) if owner.container_id else None
            return None

        before = attachment()
        with self._calls.left_to_its_shim(call):
            report = call.hand_back()
        if report is None:
            return None
        known = before if asked.command == "DEL" else attachment()
        return verbs.Outcome(
            report.code,
            report.output,
            network,
            asked.pod,
            report.phases,
            None if report.code else known,
        )

    def _report(self, served: Served) -> None:
        if self._on_call is None:
            return
        try:
            self._on_call(served)
        except Exception as problem:  # whatever it is, the pod has its network
            self._log(f'msg="on_call failed" error="{type(problem).__name__}: {problem}"')

    def _opener(self, worker: _Worker, bury: Callable[[str], None]) -> verbs.Opener:
        @contextmanager
        def warm(data_dir: str) -> Iterator[verbs.Node]:
            try:
                with self._opened(data_dir) as store:
                    yield verbs.Node(store, Ipam(store), worker.kernel, lambda: bury(data_dir))
            except Exception:  # a process of its own would begin anew: so do we
                worker.renew()
                raise

        return warm

    @contextmanager
    def _opened(self, data_dir: str) -> Iterator[Store]:
        """The store that is open already; after a failure that may be its own, not again."""
        try:
            with self._stores.using(data_dir) as store:
                yield store
        except Exception as problem:
            if not isinstance(problem, CniError) or problem.code == STORE:
                self._stores.drop(data_dir)
                self._links.wake(data_dir)  # it tries until it has recorded what waits
            raise


def _close(connection: socket.socket, fd: Optional[int]) -> None:
    connection.close()
    if fd is not None:
        os.close(fd)


class _Call:
    """One request, from the moment that it is whole."""

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
        # What no two calls may be at work on: a runtime that has given up on an ADD sends a DEL
        # while we may still be at it. A headcni in a chain of ours is called while the outer one
        # is at work on the same container, so the chain is part of it. GC and STATUS have none.
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
        """Wait for the shim's report; its end, of whatever kind, closes the connection."""
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
        _close(self.connection, self.netns_fd)
        self.netns_fd = None


class _Queue:
    """Calls that wait for a thread. Each namespace of pods has its turn, however many pods another
    one has."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_Call]] = {}  # whose turn it is comes first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[_Call]:
        for calls in self._waiting.values():
            yield from calls

    def append(self, call: _Call) -> None:
        self._waiting.setdefault(call.namespace, deque()).append(call)

    def popleft(self) -> _Call:
        namespace = next(iter(self._waiting))
        calls = self._waiting.pop(namespace)
        call = calls.popleft()
        if calls:
            self._waiting[namespace] = calls
        return call

    def clear(self) -> None:
        self._waiting.clear()


class _Lane:
    """The calls of one depth of nesting, large or not, and the threads that they have."""

    def __init__(self, lock: threading.RLock, for_large: bool) -> None:
        self.ready = _Queue()
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


class _Calls:
    """Calls in their threads: so many at once, and of one container one after the other.

    A chain of ours may call headcni, whose shim comes back here while the outer call has a thread.
    So each depth has threads of its own: a call waits only for deeper ones, and depth has an end.
    """

    def __init__(self, serve: Callable[[_Call, _Worker], None]) -> None:
        self._serve = serve
        self._lock = threading.RLock()
        self._lanes = [
            _Lane(self._lock, for_large)
            for _unused in range(MAX_NESTING + 1)
            for for_large in (False, True)
        ]
        self._behind: dict[tuple[str, ...], deque[_Call]] = {}  # who waits for a subject at work
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._over = threading.Event()
        self.count = self._large = 0

    def begin(self, call: _Call) -> bool:
        """False if there are too many, or we are stopping."""
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

    def is_followed(self, call: _Call) -> bool:
        """Whether another call for the same container waits for this one."""
        with self._lock:
            return bool(self._behind.get(call.subject))

    @contextmanager
    def left_to_its_shim(self, call: _Call) -> Iterator[None]:
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
        """Hand back what has not begun, and see the rest through: with it whoever waits for it, as
        a shim that was handed a DEL back would run it beside the ADD that is at work."""
        deadline = time.monotonic() + limit
        with self._lock:
            self._stopping = True
            self._over.set()
            for lane in self._lanes:
                for call in lane.ready:
                    for one in (call, *self._behind.pop(call.subject, ())):
                        self._count_out(one)
                        one.close()
                lane.ready.clear()
                lane.came.notify_all()
        while True:
            with self._lock:
                at_work = next((one for one in self._threads if one.is_alive()), None)
            if at_work is None:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            at_work.join(left)

    def _make_ready(self, call: _Call) -> None:
        lane = self._lane_of(call)
        lane.ready.append(call)
        self._begin_next(lane)

    def _lane_of(self, call: _Call) -> _Lane:
        return self._lanes[2 * call.depth + call.is_large]

    def _begin_next(self, lane: _Lane) -> None:
        """Find a thread for the next call. If it must wait, a thread that becomes free takes it."""
        if not lane.may_begin:
            return
        if lane.idle:
            lane.came.notify()
        else:
            self._hire(lane)

    def _hire(self, lane: _Lane) -> None:
        if lane.threads == lane.most_threads:
            return
        # As a daemon: one that outlasts stop() must not keep the process from ending.
        thread = threading.Thread(target=self._work, args=(lane,), name="cni", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process may have no more; others will come to it, if there are
            while lane.ready and not lane.threads:
                call = lane.ready.popleft()
                call.close()
                self._finished(call)
            return
        lane.threads += 1
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]

    def _work(self, lane: _Lane) -> None:
        worker = _Worker()
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

    def _work_on(self, call: _Call, worker: _Worker, lane: _Lane) -> None:
        began = time.thread_time()
        try:
            self._serve(call, worker)
        finally:
            call.close()
            self._finished(call)
        if lane.rests:
            took = time.thread_time() - began
            self._over.wait(min(REST * took, LONGEST_REST))

    def _next(self, lane: _Lane) -> Optional[_Call]:
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

    def _finished(self, call: _Call) -> None:
        with self._lock:
            self._count_out(call)
            if not call.subject:
                return
            waiting = self._behind[call.subject]
            if waiting:
                self._make_ready(waiting.popleft())
            else:
                del self._behind[call.subject]

    def _count_out(self, call: _Call) -> None:
        self.count -= 1
        self._large -= call.is_large


class _Worker:
    """What a thread keeps between calls: netlink, in the node's own network namespace."""

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
        """After a failure: answers to what was asked may still be under way."""
        self.close()
        self._kernel = None

    def is_at_home(self) -> bool:
        """False if it could not come back from a pod's namespace: it must not go on there."""
        return os.path.samestat(self._home, os.stat(THREAD_NETNS))

    def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()


class _Stores:
    """The stores in use, kept open: one, on a node with one network.

    A store that is dropped is closed as soon as its last user is done. Python would close it some
    time later, and until then the kernel keeps a deleted database on the disk: on a small one there
    would be no room for the new one.
    """

    def __init__(self) -> None:
        self.opened: Callable[[str], None] = lambda _unused: None  # told of each folder
        self._lock = threading.Lock()
        self._open: dict[str, Store] = {}
        self._users: dict[Store, int] = {}

    @contextmanager
    def using(self, data_dir: str) -> Iterator[Store]:
        with self._lock:
            store = self._open.get(data_dir)
            if store is None:
                store = Store.in_directory(data_dir)
                for oldest in list(self._open)[: 1 - STORES_KEPT]:
                    self._forget(oldest)
                self._open[data_dir] = store
                self.opened(data_dir)
            self._users[store] = self._users.get(store, 0) + 1
        try:
            yield store
        finally:
            with self._lock:
                self._users[store] -= 1
                if not self._users[store]:
                    del self._users[store]
                    if self._open.get(data_dir) is not store:
                        store.close()

    def drop(self, data_dir: str) -> None:
        """Have it opened anew."""
        with self._lock:
            if data_dir in self._open:
                self._forget(data_dir)

    def close(self) -> None:
        with self._lock:
            for data_dir in list(self._open):
                self._forget(data_dir)

    def _forget(self, data_dir: str) -> None:
        store = self._open.pop(data_dir)
        if store not in self._users:
            store.close()


class _Incoming:
    """A connection whose message has not come whole."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = bytearray()
        self.netns_fd: Optional[int] = None
        self.deadline = time.monotonic() + READ_SECONDS
        self.is_registered = False

    def read(self) -> bool:
        """What has arrived; false at its end."""
        data, ancillary, _unused, _unused = self.connection.recvmsg(
            65536, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, body in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for fd in array.array("i", body[: len(body) - len(body) % 4]):
                    if self.netns_fd is None:
                        self.netns_fd = fd
                    else:
                        os.close(fd)
        self.received += data
        return bool(data)


class _Door:
    """The socket, and the thread that reads requests from it."""

    def __init__(
        self,
        path: str,
        take: Callable[[socket.socket, bytes, Optional[int]], None],
        log: Log,
    ) -> None:
        self._path = path
        self._take = take
        self._log = log
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._claim = -1
        self._bell, self._button = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._incoming: dict[int, _Incoming] = {}  # oldest first, so the nearest deadline is first
        self._paused_until = 0.0
        self._accepting = False
        self._closing = False
        self._inode = 0
        self._thread = threading.Thread(target=self._watch, name="cni-door", daemon=True)

    def open(self) -> None:
        os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
        self._claim_the_path()
        # Put in place only when it listens, with its mode: no shim ever finds half of one, nor one
        # that refuses where a daemon that was killed has left its own.
        unfinished = self._path + ".new"
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
        self._listener.bind(unfinished)
        os.chmod(unfinished, 0o600)
        self._listener.listen(BACKLOG)
        self._inode = os.stat(unfinished).st_ino
        os.rename(unfinished, self._path)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread.start()

    def close(self) -> None:
        """No more requests; those that are not whole are closed."""
        if self._thread.ident is None:
            return
        self._closing = True
        self._button.send(b"\0")
        self._thread.join()
        self._bell.close()
        self._button.close()

    def give_up_the_path(self) -> None:
        if self._claim >= 0:
            os.close(self._claim)
            self._claim = -1

    def is_alive(self) -> bool:
        """Where somebody has deleted the socket no shim comes any more, though all is well here."""
        try:
            return self._thread.is_alive() and os.stat(self._path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def _claim_the_path(self) -> None:
        """Two daemons would take calls from each other; a lock, unlike a file, dies with us."""
        self._claim = os.open(self._path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.give_up_the_path()
            raise OSError(
                errno.EADDRINUSE, "another headcni-daemon is listening there", self._path
            ) from None

    def _watch(self) -> None:
        try:
            while not self._closing:
                self._accept_or_pause()
                for key, _unused in self._selector.select(self._patience()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None:
                        self._read(key.data)
                self._drop_the_slow()
        finally:
            self._shut()

    def _accept_or_pause(self) -> None:
        wanted = len(self._incoming) < MAX_READING and time.monotonic() >= self._paused_until
        if wanted and not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._accepting and not wanted:
            self._selector.unregister(self._listener)
        self._accepting = wanted

    def _patience(self) -> Optional[float]:
        """Until something has to be done though nothing has come; None while all is quiet."""
        now = time.monotonic()
        due = [incoming.deadline for incoming in list(self._incoming.values())[:1]]
        if self._paused_until > now:
            due.append(self._paused_until)
        return max(0.0, min(due) - now) if due else None

    def _accept(self) -> None:
        try:
            connection, _unused = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as problem:
            self._log(f'msg="no call can be taken just now" error="{problem.strerror}"')
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            return
        pid, uid, _unused = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != 0:
            self._log(f'msg="a caller was refused" reason="it is not root" uid={uid} pid={pid}')
            connection.close()
            return
        connection.setblocking(False)
        incoming = _Incoming(connection)
        self._incoming[connection.fileno()] = incoming
        self._read(incoming)  # most often all of it is there
        if connection.fileno() in self._incoming:
            self._selector.register(connection, selectors.EVENT_READ, incoming)
            incoming.is_registered = True

    def _read(self, incoming: _Incoming) -> None:
        try:
            goes_on = incoming.read()
            whole = protocol.whole(incoming.received)
        except BlockingIOError:
            return
        except OSError:
            goes_on, whole = False, None
        except protocol.Malformed as problem:
            self._log(f'msg="a connection was closed" reason="no request: {problem}"')
            goes_on, whole = False, None
        if not goes_on:
            self._drop(incoming)
        elif whole == len(incoming.received):
            self._forget(incoming)
            self._take(incoming.connection, bytes(incoming.received), incoming.netns_fd)

    def _drop_the_slow(self) -> None:
        now = time.monotonic()
        for incoming in list(self._incoming.values()):
            if incoming.deadline > now:
                return
            self._log(
                'msg="a connection was closed" '
                f'reason="its request was not whole within {READ_SECONDS:g} s"'
            )
            self._drop(incoming)

    def _forget(self, incoming: _Incoming) -> None:
        del self._incoming[incoming.connection.fileno()]
        if incoming.is_registered:
            self._selector.unregister(incoming.connection)

    def _drop(self, incoming: _Incoming) -> None:
        self._forget(incoming)
        _close(incoming.connection, incoming.netns_fd)

    def _shut(self) -> None:
        with suppress(OSError):  # it is gone, or another daemon's by now
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
        for incoming in list(self._incoming.values()):
            self._drop(incoming)
        self._listener.close()
        self._selector.close()


def _shown(served: Served) -> None:
    took = " ".join(f"{name}={1000 * value:.2f}" for name, value in served.phases.items())
    outcome = served.outcome
    name = outcome.network.name if outcome.network else ""
    to_stderr(
        f"verb={served.verb} network={name} pod={outcome.pod} code={outcome.code} "
        f"ms={1000 * served.seconds:.2f} {took}"
    )


def main() -> int:
    import argparse
    import signal

    parser = argparse.ArgumentParser(
        prog="headcni.daemon.cni.server",
        description="Serve CNI calls, and show each one on stderr.",
    )
    parser.add_argument("--socket", default=os.fsdecode(SOCKET), help="where (%(default)s)")
    parser.add_argument("--data-dir", default=DATA_DIR, help="its store (%(default)s)")
    parser.add_argument(
        "--limit", type=float, default=30.0, help="seconds to stop in (%(default)s)"
    )
    args = parser.parse_args()
    # A signal may be delivered to any thread, and Python runs its handler in this one, when it next
    # runs at all. Only the wake-up descriptor is written to at once.
    over, end = os.pipe()
    os.set_blocking(end, False)
    signal.set_wakeup_fd(end)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_unused: None)
    server = CniServer(args.socket, args.data_dir, on_call=_shown)
    try:
        server.start()
    except OSError as problem:
        to_stderr(f"{parser.prog}: {problem}")
        return 1
    to_stderr(f"listening={args.socket} release={server.version}")
    os.read(over, 1)
    return 0 if server.stop(args.limit) else 1


if __name__ == "__main__":
    sys.exit(main())
