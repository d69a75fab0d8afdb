"""The CNI server: runs the calls that shims hand over, with everything loaded and open.

One thread listens and reads. Each call has a thread while it runs, because a verb enters the pod's
network namespace and waits for the kernel. A request that is malformed, not from root, from another
release or from another network namespace is closed without an answer, and its shim runs the call
itself. So are calls that have not begun when the daemon stops. Calls that have begun are answered,
and so are calls that wait for them. A call that runs other plugins is handed back to its shim.

    python3 -m headcni.daemon.cni.server --socket /run/headcni/cni.sock

serves without the rest of the daemon and prints each call, for debugging and tests.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple, Optional

from ... import __version__, config, skel
from ...database import DATA_DIR
from ...errors import CniError
from ...exec import LeftToCaller, plugins_left_to_caller
from ...plugins import headcni_ipam, loopback
from ...plugins.headcni import plugin as headcni
from ...plugins.headcni.node import Node
from ...policy import admission
from ...recover import recover
from ...shim import NETNS, SOCKET
from ...skel import Call, Outcome
from ...store import Attachment
from . import protocol
from .calls import Calls, PendingCall, Worker, close
from .links import LinkRemover
from .listener import Listener, Log
from .stores import OpenStores


class Served(NamedTuple):
    """A call that was answered. The first of the phases is "wait", the wait for a thread."""

    verb: str
    outcome: Outcome
    seconds: float  # of the verb
    response: float  # from the complete request to its answer
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
        """`data_dir` is opened at the start. A call whose configuration names another folder
        uses that."""
        self.socket_path = socket_path
        self.version = version
        self._data_dir = data_dir
        self._on_call = on_call
        self._log = log
        self._home = os.readlink(NETNS)
        self._stores = OpenStores()
        self._links = LinkRemover(self._stores.using, self._stores.drop, log)
        self._stores.opened = self._links.wake  # a daemon that was killed may have left tombstones
        self._calls = Calls(self._serve)
        self._listener = Listener(socket_path, self._take, log)

    def start(self) -> None:
        """Listen. Raises OSError if the socket cannot be made, or another daemon has it."""
        try:
            with self._stores.using(self._data_dir) as store:
                if store.is_unverified():
                    recover(store)  # before the first pod has to wait for it
        except CniError as problem:  # each call will report it, and the daemon has other work too
            self._log(f'msg="the store cannot be used" error="{problem}"')
        self._listener.open()
        self._links.start()

    def stop(self, limit: float = 30.0) -> bool:
        """Take no more calls and finish those that have begun; False if some outlast the limit.

        Those stay connected until the process ends: if they were closed, their shims would run them
        a second time at the same moment.
        """
        deadline = time.monotonic() + limit
        self._listener.close()
        finished = self._calls.finish(limit)
        finished = self._links.stop(max(1.0, deadline - time.monotonic())) and finished
        if finished:
            self._stores.close()
        self._listener.give_up_the_path()
        return finished

    def is_alive(self) -> bool:
        return self._listener.is_alive() and self._links.is_alive()

    @property
    def calls(self) -> int:
        """The number of calls that run or wait now."""
        return self._calls.count

    def _take(self, connection: socket.socket, message: bytes, netns_fd: Optional[int]) -> None:
        """A complete message has arrived. Is it a call for us?"""
        try:
            request = protocol.parse(message)
            if request.release != self.version:
                raise protocol.Malformed(f"it is of release {request.release}, not {self.version}")
            if request.netns != self._home:
                raise protocol.Malformed("its caller is in another network namespace")
            if request.is_ipam and headcni_ipam.means_its_own_folder(request.stdin):
                raise protocol.Malformed("its dataDir means something only to its caller")
        except protocol.Malformed as problem:
            self._log(f'msg="a call was left to its shim" reason="{problem}"')
            close(connection, netns_fd)
            return
        call = PendingCall(request, connection, netns_fd)
        if not self._calls.begin(call):
            call.close()

    def _serve(self, call: PendingCall, worker: Worker) -> None:
        if call.is_abandoned():  # the runtime has ended the shim, so nobody waits for the answer
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
            # The runtime gave up on this ADD, and its DEL may be over already: while we are
            # stopping, a shim that cannot connect runs the DEL itself.
            self._run(call, {**call.request.env, "CNI_COMMAND": "DEL"}, worker)

    def _run(self, call: PendingCall, env: Mapping[str, str], worker: Worker) -> Optional[Outcome]:
        """The outcome; None if the shim was to run the call and did not report."""
        to_clean = list[str]()  # the folders of stores that have links to delete
        began = time.monotonic()
        verb, stdin = env.get("CNI_COMMAND", ""), call.request.stdin
        if call.request.is_ipam:
            verb = f"IPAM-{verb}"
            outcome = headcni_ipam.run(env, stdin, self._stores.using)
        elif call.request.is_loopback:
            verb = f"LOOPBACK-{verb}"
            outcome = skel.run(loopback.PLUGIN, env, stdin, call.netns_fd)
        else:
            served = self._run_headcni(call, env, worker, to_clean)
            if served is None:
                return None
            outcome = served
        took = time.monotonic() - began
        with suppress(OSError):  # the shim has ended, or has answered by itself
            call.answer(outcome.exit_code, outcome.output)
        if outcome.unrecorded and outcome.network:
            to_clean.append(outcome.network.data_dir)
        for data_dir in to_clean:
            self._links.wake(data_dir)
        response = time.monotonic() - call.arrived
        phases = {"wait": began - call.arrived, **outcome.phases}
        self._report(Served(verb, outcome, took, response, phases))
        return outcome

    def _run_headcni(
        self, call: PendingCall, env: Mapping[str, str], worker: Worker, to_clean: list[str]
    ) -> Optional[Outcome]:
        @contextmanager
        def open_node(data_dir: str) -> Iterator[Node]:
            with self._stores.using(data_dir) as store:
                yield Node(store, worker.kernel, lambda: to_clean.append(data_dir))

        try:
            with plugins_left_to_caller():
                outcome = headcni.run(env, call.request.stdin, call.netns_fd, open_node)
        except LeftToCaller:
            return self._hand_back(call)
        if outcome.code or outcome.unrecorded:
            worker.renew()  # a new process would start with a new socket, too
        return outcome

    def _hand_back(self, call: PendingCall) -> Optional[Outcome]:
        """Let the shim run the call, and wait until it has: the next call for the same container
        must not begin earlier. None if the shim did not report the outcome."""
        env, stdin = call.request.env, call.request.stdin
        network = config.parse(stdin, env, forgiving=env.get("CNI_COMMAND") == "DEL")
        asked = Call.of(env)
        owner = asked.owner(network.name)

        def attachment() -> Optional[Attachment]:
            with suppress(CniError), self._stores.using(network.data_dir) as store:
                return store.attachment(owner) if owner.container_id else None
            return None

        before = attachment()
        if env.get("CNI_COMMAND") == "ADD":
            admission.expect(network, owner)
        try:
            with self._calls.left_to_its_shim(call):
                report = call.hand_back()
        finally:
            admission.settle(owner)
        if report is None:
            return None
        known = before if asked.command == "DEL" else attachment()
        outcome = Outcome()
        outcome.pod, outcome.network = asked.pod, network
        outcome.error, outcome.phases = report.error, report.phases
        outcome.attachment = known if report.error is None else None
        return outcome

    def _report(self, served: Served) -> None:
        if self._on_call is None:
            return
        try:
            self._on_call(served)
        except Exception as problem:  # whatever it is, the pod has its network already
            self._log(f'msg="on_call failed" error="{type(problem).__name__}: {problem}"')


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
    # A signal may be delivered to any thread, and Python runs its handler in this thread only when
    # it runs again. Only the wake-up descriptor is written at once.
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
