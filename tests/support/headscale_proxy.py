"""Between a controller and its Headscale: passes everything on, and remembers it."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Exchange(NamedTuple):
    method: str
    path: str
    answer: bytes


class HeadscaleProxy(ThreadingHTTPServer):
    def __init__(self, url: str) -> None:
        self.seen: list[Exchange] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def _pass_on(self) -> None:
                names = ("Authorization", "Accept", "Content-Type")
                request = urllib.request.Request(
                    url + self.path,
                    self.rfile.read(int(self.headers["Content-Length"] or 0)) or None,
                    {name: self.headers[name] for name in names if self.headers[name]},
                    method=self.command,
                )
                try:
                    answer = urllib.request.urlopen(request, timeout=10)
                except urllib.error.HTTPError as problem:
                    answer = problem
                with answer:
                    body = answer.read()
                    path = self.path.partition("?")[0]
                    proxy.seen.append(Exchange(self.command, path, body))
                    self.send_response(answer.status)
                    if answer.headers["Content-Type"]:
                        self.send_header("Content-Type", answer.headers["Content-Type"])
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_DELETE = _pass_on

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked(self, method: str, path: str) -> list[bytes]:
        """The answers that were given to one question."""
        return [one.answer for one in self.seen if (one.method, one.path) == (method, path)]


@contextmanager
def headscale_proxy(url: str) -> Iterator[HeadscaleProxy]:
    with HeadscaleProxy(url) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
