"""The control socket: headcnictl sends a line with a question, and gets lines of JSON.

    status            the state of everything
    events            what happened lately
    events follow     the same, and what happens from now on
    policy            the network policies of this node's pods
    policy explain SRC DST PORT/PROTOCOL
    config            the settings in use
    metrics           everything that is measured, a line for each metric

It is a unix socket that only root may use. It works even if the monitor is turned off.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Callable, Optional

from ...errors import IO_FAILURE, CniError
from ...log import Log
from .events import Events
from .few_at_once import FewAtOnce

LONGEST_QUESTION = 1024  # with the names of two pods
CLIENTS = 16
BUSY = b'{"error":"too many ask at once; try again"}\n'
QUESTION_SECONDS = 5.0
SEND_SECONDS = 10.0
BEAT_SECONDS = 15.0  # how soon we notice that a follower has gone

log = Log("control")


class Control:
    """Answers from start() to stop()."""

    def __init__(
        self,
        path: str,
        status: Callable[[], Mapping[str, Any]],
        events: Events,
        policy: Callable[[Sequence[str]], Mapping[str, Any]],
        others: Mapping[str, Callable[[], Iterable[Mapping[str, Any]]]] = MappingProxyType({}),
    ) -> None:
        """`policy` gets the words that follow its name in the question. `others` answers questions
        of a single word."""
        self.path = path
        self.status, self.events, self.policy = status, events, policy
        self.others = others
        self.stopping = threading.Event()
        self._server: Optional[_Server] = None

    def start(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        try:
            self._server = _Server(self.path, self)
        except OSError as problem:
            raise CniError(
                IO_FAILURE, f"no control socket at {self.path}", problem.strerror or ""
            ) from None
        threading.Thread(target=self._server.run, name="control", daemon=True).start()

    def stop(self) -> None:
        self.stopping.set()
        self.events.wake()
        if self._server is not None:
            self._server.end()
            with suppress(FileNotFoundError):
                os.unlink(self.path)

    def answers(self, question: str) -> Iterator[Mapping[str, Any]]:
        """An empty answer is a heartbeat, which shows whether a follower has gone."""
        try:
            yield from self._answers(question)
        except Exception as problem:  # for example an unreadable store: the client wants to know
            log.error("a question has no answer", question=question, problem=problem)
            yield {"error": str(problem) or type(problem).__name__}

    def _answers(self, question: str) -> Iterator[Mapping[str, Any]]:
        if question == "status":
            yield self.status()
        elif question == "events":
            yield from self.events.kept()
        elif question == "events follow":
            with self.events.following() as follower:
                while not self.stopping.is_set():
                    yield follower.next(BEAT_SECONDS) or {}
        elif question.split()[:1] == ["policy"]:
            yield self.policy(question.split()[1:])
        elif question in self.others:
            yield from self.others[question]()
        else:
            known = ("status, events, events follow, policy, policy explain", *self.others)
            yield {"error": f"{question!r} is not one of: {', '.join(known)}"}


class _Server(FewAtOnce, socketserver.UnixStreamServer):
    request_queue_size = CLIENTS

    def __init__(self, path: str, control: Control) -> None:
        self.control = control
        super().__init__(CLIENTS, BUSY, path, _Handler)

    def server_bind(self) -> None:
        super().server_bind()
        os.chmod(self.control.path, 0o600)  # nobody can connect yet

    def run(self) -> None:
        while not self.control.stopping.is_set():
            self.handle_request()
        self.server_close()

    def end(self) -> None:
        with (
            suppress(OSError),
            socket.socket(socket.AF_UNIX) as caller,
        ):  # wakes up the waiting thread
            caller.settimeout(1)
            caller.connect(self.control.path)

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request, client_address
        log.debug("an asker went away", problem=sys.exc_info()[1])


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        self.request.settimeout(QUESTION_SECONDS)
        asked = b""
        while not asked.endswith(b"\n") and len(asked) < LONGEST_QUESTION:
            piece = self.request.recv(LONGEST_QUESTION)
            if not piece:
                return
            asked += piece
        self.server.is_waited_for(self.request, False)
        self.request.settimeout(SEND_SECONDS)
        for answer in self.server.control.answers(asked.decode(errors="replace").strip()):
            line = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
            self.request.sendall(line.encode() + b"\n")
