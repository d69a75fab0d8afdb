"""A tailscaled's LocalAPI with peers as a test wants them: real ones do not relay on demand."""

from __future__ import annotations

import json
import time
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingMixIn, UnixStreamServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit


def go_time(age: float) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - age))
    return f"{stamp}.123456789Z"


NEVER = "0001-01-01T00:00:00Z"


def peer(number: int, **known: object) -> dict[str, object]:
    return {
        "ID": f"{number}",
        "PublicKey": f"nodekey:{number}",
        "DNSName": f"n{number}.mesh.example.",
        "TailscaleIPs": [f"100.64.0.{number}"],
        "Online": True,
        "Active": False,
        "Relay": "lab",
        "CurAddr": "",
        "LastHandshake": NEVER,
        **known,
    }


class Tailscaled(ThreadingMixIn, UnixStreamServer):
    """A LocalAPI with the given peers. Addresses in `pings` answer to a ping."""

    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(path, Handler)
        self.peers: list[dict[str, object]] = []
        self.pings: dict[str, object] = {}
        self.asked = 0
        self.self_known: dict[str, object] = {}
        self.known: dict[str, object] = {"BackendState": "Running"}
        self.filter: list[dict[str, Any]] = []
        self.prefs: dict[str, object] = {}
        Thread(target=self.serve_forever, daemon=True).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, path: str) -> object:
        url = urlsplit(path)
        if url.path.endswith("/ping"):
            return self.pings.get(parse_qs(url.query)["ip"][0], {"Err": "timed out"})
        if url.path.endswith("/prefs"):
            return self.prefs
        if url.path.endswith("/debug-packet-filter-matches"):
            return self.filter
        self.asked += 1
        known = {str(one["PublicKey"]): one for one in self.peers}
        me = peer(1, **self.self_known)
        return {"Version": "1.102.5", "Self": me, "Peer": known, **self.known}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(self.server.answer(self.path)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def address_string(self) -> str:
        return ""

    def log_message(self, *_unused: object) -> None:
        pass
