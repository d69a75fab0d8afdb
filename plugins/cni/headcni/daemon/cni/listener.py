"""The socket of the server, and the thread that reads requests from it."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Optional

from . import protocol
from .calls import close

BACKLOG = 256
MAX_READING = 128
READ_SECONDS = 5.0
PAUSE_SECONDS = 0.2  # before accepting again after the file descriptors ran out
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid

Log = Callable[[str], None]


class Incoming:
    """A connection whose message has not arrived completely."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = bytearray()
        self.netns_fd: Optional[int] = None
        self.deadline = time.monotonic() + READ_SECONDS
        self.is_registered = False

    def read(self) -> bool:
        """Read what has arrived; False at the end of the connection."""
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


class Listener:
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
        self._incoming: dict[int, Incoming] = {}  # oldest first, so the nearest deadline is first
        self._paused_until = 0.0
        self._accepting = False
        self._closing = False
        self._inode = 0
        self._thread = threading.Thread(target=self._watch, name="cni-door", daemon=True)

    def open(self) -> None:
        os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
        self._claim_the_path()
        # Renamed into place only when it listens and has its mode, so that no shim finds an
        # unfinished socket, or the dead socket of a daemon that was killed.
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
        """Take no more requests, and close connections with incomplete ones."""
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
        """If somebody has deleted the socket, no shim can connect, although the thread is fine."""
        try:
            return self._thread.is_alive() and os.stat(self._path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def _claim_the_path(self) -> None:
        """Two daemons would take calls from each other. A lock, unlike a file, ends with the
        process."""
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
        """Seconds until something has to be done although nothing arrives; None if nothing has
        to."""
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
        incoming = Incoming(connection)
        self._incoming[connection.fileno()] = incoming
        self._read(incoming)  # usually everything is there already
        if connection.fileno() in self._incoming:
            self._selector.register(connection, selectors.EVENT_READ, incoming)
            incoming.is_registered = True

    def _read(self, incoming: Incoming) -> None:
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

    def _forget(self, incoming: Incoming) -> None:
        del self._incoming[incoming.connection.fileno()]
        if incoming.is_registered:
            self._selector.unregister(incoming.connection)

    def _drop(self, incoming: Incoming) -> None:
        self._forget(incoming)
        close(incoming.connection, incoming.netns_fd)

    def _shut(self) -> None:
        with suppress(OSError):  # it is gone, or belongs to another daemon now
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
        for incoming in list(self._incoming.values()):
            self._drop(incoming)
        self._listener.close()
        self._selector.close()
