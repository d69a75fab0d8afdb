"""The monitor: health, readiness, metrics and profiles over HTTP, GET only.

    /healthz               200 as long as the daemon's parts run
    /ready                 each condition by name; 503 if any does not hold
    /metrics               for Prometheus
    /debug/pprof/          profile, heap, threads; only if the operator has enabled them

/healthz and /ready answer with text, or with JSON to clients that accept it or add ?format=json.
"""

from __future__ import annotations

import io
import json
import socket
import sys
import threading
from collections.abc import Mapping
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from time import monotonic
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, cast
from urllib.parse import parse_qs, urlsplit

from ...condition import Condition
from ...errors import INVALID_CONFIG, IO_FAILURE, TRY_AGAIN, CniError
from ...log import Log
from . import pprof
from .few_at_once import FewAtOnce
from .metrics import Metrics

# Why a condition does not hold, in a few words; "" if it holds.
Reason = Callable[[], str]

BUSY = 8  # requests at a time
REQUEST_SECONDS = 5.0  # for a client to send its whole request
ANSWER_SECONDS = 10.0  # for each write of the answer
LONGEST_REQUEST = 16 << 10  # bytes

_PROFILES = """\
profile?seconds=30  CPU and wall time, for go tool pprof
heap?seconds=10     what is allocated in that time and stays, for go tool pprof
threads             every thread's stack, as text"""

log = Log("monitor")


class Answer(NamedTuple):
    status: int
    content_type: str
    body: bytes
    headers: Tuple[Tuple[str, str], ...] = ()


def text(status: int, message: str) -> Answer:
    return Answer(status, "text/plain; charset=utf-8", f"{message}\n".encode())


class Monitor:
    """Answers on one address until it is stopped.

    ``ready`` and ``alive`` are conditions by name, each with a function that checks it. The
    functions run in the thread of a request, so they must not wait for anything.
    """

    def __init__(
        self,
        metrics: Metrics,
        ready: Mapping[str, Reason],
        alive: Optional[Mapping[str, Reason]] = None,
        address: str = "127.0.0.1",
        port: int = 9001,
        path: str = "/metrics",
        serve_pprof: bool = False,
    ) -> None:
        self.metrics = metrics
        self.ready, self.alive = ready, alive or {}
        self.address, self.port = address, port
        self.serve_pprof = serve_pprof
        self._pages: Dict[str, Callable[[_Request], Answer]] = {
            "/healthz": lambda request: _conditions(self.alive, "healthy", request),
            "/ready": lambda request: _conditions(self.ready, "ready", request),
            path: self._metrics,
            "/debug/pprof/": lambda _unused: text(200, _PROFILES),
            "/debug/pprof/profile": lambda request: self._pprof(pprof.profile, request, 30.0),
            "/debug/pprof/heap": lambda request: self._pprof(pprof.heap, request, 10.0),
            "/debug/pprof/threads": lambda _unused: text(200, pprof.threads()),
        }
        self._server: Optional[_Server] = None
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        """Listen and answer, in threads; CniError if the address cannot be used."""
        try:
            self._server = _Server((self.address, self.port), self)
        except OSError as problem:
            raise CniError(
                IO_FAILURE,
                f"the monitor cannot listen on {self.where}",
                f"{problem.strerror}; see monitoring.address and monitoring.port",
            ) from None
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.run, name="monitor", daemon=True)
        self._thread.start()
        log.info("listening", on=self.where, pprof=self.serve_pprof)

    def stop(self, seconds: float = 2.0) -> None:
        """Stop listening. Requests in progress have some seconds to end; a profile ends at once."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        server.end(self._thread, seconds)
        server.drained(seconds)

    @property
    def where(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"

    def answer(self, request: _Request) -> Answer:
        page = self._pages.get(request.path)
        if page is None or (request.path.startswith("/debug/") and not self.serve_pprof):
            served = [p for p in self._pages if self.serve_pprof or not p.startswith("/debug/")]
            return text(404, f"there is no {request.path} here, only {', '.join(served)}")
        return page(request)

    def _metrics(self, request: _Request) -> Answer:
        return Answer(200, *self.metrics.render(request.accept))

    def _pprof(
        self, take: Callable[[float, Callable[[], bool]], bytes], request: _Request, default: float
    ) -> Answer:
        given = request.query.get("seconds", "")
        try:
            seconds = float(given) if given else default
        except ValueError:
            return text(400, f"seconds is {given!r}: expected a number")
        server = self._server
        try:
            body = take(seconds, lambda: server is None or server.ended)
        except CniError as problem:
            status = {INVALID_CONFIG: 400, TRY_AGAIN: 429}.get(problem.code, 500)
            return text(status, str(problem))
        name = request.path.rpartition("/")[2]
        shown = ("Content-Disposition", f'attachment; filename="{name}.pb.gz"')
        return Answer(200, "application/octet-stream", body, (shown,))


def ask(conditions: Mapping[str, Reason]) -> List[Condition]:
    """The current state of each condition. A condition whose check fails does not hold."""
    found = []
    for name, reason in conditions.items():
        try:
            said = reason()
            found.append(Condition(name, not said, said))
        except Exception as problem:
            found.append(Condition(name, False, f"{type(problem).__name__}: {problem}"))
    return found


def _conditions(conditions: Mapping[str, Reason], word: str, request: _Request) -> Answer:
    found = ask(conditions)
    good = all(condition.ok for condition in found)
    status = 200 if good else 503
    if request.wants_json:
        listed = [{"name": c.name, "ok": c.ok, "reason": c.message} for c in found]
        body = json.dumps({word: good, "conditions": listed}, indent=2) + "\n"
        return Answer(status, "application/json", body.encode())
    lines = [word if good else f"not {word}"]
    lines += [f"  {c.name}: {'ok' if c.ok else ' '.join(c.message.split())}" for c in found]
    return text(status, "\n".join(lines))


class _Request(NamedTuple):
    path: str
    query: Mapping[str, str]
    accept: str

    @property
    def wants_json(self) -> bool:
        return self.query.get("format") == "json" or "application/json" in self.accept


class _Server(FewAtOnce, HTTPServer):
    request_queue_size = 32

    def __init__(self, where: Tuple[str, int], monitor: Monitor) -> None:
        six = ip_address(where[0]).version == 6
        self.address_family = socket.AF_INET6 if six else socket.AF_INET
        self.monitor = monitor
        self.ended = False
        busy = f"HTTP/1.0 503 Busy\r\nRetry-After: 1\r\n\r\n{BUSY} requests at a time\n"
        super().__init__(BUSY, busy.encode(), where, _Handler)

    def server_bind(self) -> None:
        """The same as http.server's, but without asking DNS for this host's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def run(self) -> None:
        """Unlike serve_forever it does not wake up twice a second: end() ends the wait."""
        while not self.ended:
            self.handle_request()

    def end(self, thread: threading.Thread, seconds: float) -> None:
        """End ``run`` in its thread, and close the socket only then, because run may be using
        it."""
        self.ended = True
        self.socket.shutdown(socket.SHUT_RDWR)  # wakes up the thread that waits for a client
        thread.join(seconds)
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request  # it is closed already
        log.debug("request ended early", client=client_address[0], problem=sys.exc_info()[1])


class _Incoming(io.RawIOBase):
    """A request as it arrives. Reading fails if it takes too long or is too large."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._end = monotonic() + REQUEST_SECONDS
        self._room = LONGEST_REQUEST

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - monotonic()
        if left <= 0:
            raise socket.timeout("the request took too long")
        if self._room <= 0:
            raise LineTooLong("request")
        self._connection.settimeout(left)
        came = self._connection.recv_into(memoryview(buffer)[: self._room])
        self._room -= came
        return came


class _Handler(BaseHTTPRequestHandler):
    server_version = "headcni"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Incoming(self.connection))

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        request = _Request(url.path, query, self.headers.get("Accept", ""))
        server = cast(_Server, self.server)
        server.is_waited_for(self.request, False)
        try:
            answer = server.monitor.answer(request)
        except Exception as problem:
            log.error("a page failed", path=url.path, problem=problem)
            answer = text(500, f"{type(problem).__name__}: {problem}")
        server.is_waited_for(self.request, True)
        self.connection.settimeout(ANSWER_SECONDS)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in answer.headers:
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        if log.enabled("DEBUG"):
            log.debug("request", client=self.client_address[0], line=format % args)
