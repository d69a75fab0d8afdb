"""An HTTP server that says what it is told to: for the answers that a real one won't give."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ssl import SSLContext
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler], None]


def says(status: int, body: Any, kind: str = "application/json", **headers: str) -> Answer:
    text = body if isinstance(body, str) else json.dumps(body)
    content = text.encode(errors="surrogateescape")  # "\udcff" stands for the byte ff

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(content)

    return answer


@dataclass
class StubServer:
    """`paths` are looked at first; `answers` are given in turn, the last one for ever."""

    answers: list[Answer] = field(default_factory=list)
    paths: dict[str, Answer] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        question = f"{request.command} {request.path}"
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.requests.append(question)
        self.headers.append(dict(request.headers))
        self.bodies.append(json.loads(body) if body else None)
        known = self.paths.get(question)
        if known is None:
            known = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        known(request)


@contextmanager
def stub_server(tls: SSLContext | None = None) -> Iterator[StubServer]:
    stub = StubServer()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            stub.answer(self)

        do_GET = do_POST = do_PUT = do_DELETE = _answer

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: object) -> None:
            pass  # a client that has gone is the point of some tests

    server = Server(("localhost", 0), Handler)
    stub.url = f"{'https' if tls else 'http'}://localhost:{server.server_port}"
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()
