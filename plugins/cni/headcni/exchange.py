"""A request to a server over TCP that always ends: when its time is up, or when another thread
ends it, whatever the server does. A socket's own time-out starts again with each byte."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Optional


class Exchange:
    """A single request. `late` means that the time limit ended it. Without a limit it is a wait
    that another thread can end."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.late = False
        self._lock = threading.Lock()
        self._socket: Optional[socket.socket] = None

    def uses(self, connection: socket.socket) -> None:
        with self._lock:
            self._socket = connection
        if self.ended.is_set():
            self.end()

    def time_out(self) -> None:
        self.late = True
        self.end()

    def end(self) -> None:
        self.ended.set()
        with self._lock, suppress(OSError):
            if self._socket is not None:
                # Not SSLSocket's own shutdown, which would remove the cipher while a thread reads.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class Exchanges:
    """The exchanges in progress. May be used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Exchange] = set()

    @contextmanager
    def begin(self, limit: Optional[float] = None) -> Iterator[Exchange]:
        exchange = Exchange()
        timer = None
        if limit is not None:
            timer = threading.Timer(limit, exchange.time_out)
            timer.daemon = True
            timer.start()
        with self._lock:
            self._open.add(exchange)
        try:
            yield exchange
        finally:
            if timer is not None:
                timer.cancel()
            with self._lock:
                self._open.discard(exchange)

    def end(self) -> None:
        """End all that are in progress. Later exchanges are not affected."""
        with self._lock:
            exchanges = list(self._open)
        for exchange in exchanges:
            exchange.end()


class Connection(http.client.HTTPConnection):
    """http, or https if `tls` is given. The exchange knows the socket before the handshake begins.

    `server_name` is the name in the certificate, if it differs from the host.
    """

    def __init__(
        self,
        exchange: Exchange,
        host: str,
        port: int,
        timeout: float,
        tls: Optional[ssl.SSLContext],
        server_name: str = "",
    ) -> None:
        super().__init__(host, port, timeout=timeout)
        self._exchange, self._tls, self._server_name = exchange, tls, server_name or host

    def connect(self) -> None:
        self.sock = socket.create_connection((self.host, self.port), self.timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A watch may be silent for long, and we must still notice that the server's machine died.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            self.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(
                self.sock, server_hostname=self._server_name, do_handshake_on_connect=False
            )
        self._exchange.uses(self.sock)
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.do_handshake()
