"""Netlink as ADD and DEL need it: messages built by struct, many in one send, acknowledged.

pyroute2 is what the daemon, CHECK and the tests read the kernel with. It takes hundreds of
milliseconds to import and some hundred microseconds a message, so what a pod waits for is
written here (docs/decisions/0003). Only requests that HeadCNI makes are known.
"""

from __future__ import annotations

import _socket as socket  # without what `socket` imports
import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from ..errors import KERNEL, CniError
from ..record import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from typing import Optional

NETLINK_ROUTE, NETLINK_SOCK_DIAG, NETLINK_NETFILTER = 0, 4, 12
SOL_NETLINK, NETLINK_CAP_ACK, NETLINK_EXT_ACK, NETLINK_GET_STRICT_CHK = 270, 10, 11, 12
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP = 0x1, 0x4, 0x300
NLM_F_DUMP_INTR = 0x10
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE = 0x100, 0x200, 0x400
NLMSGERR_ATTR_MSG = 1
NLA_F_NESTED = 0x8000
SIOCGIFINDEX = 0x8933
SO_SNDBUFFORCE = 32
RECEIVE_SECONDS = 10
DUMP_TRIES = 10
IDLE_KEPT = 16  # as many as calls that are at work at once

_BATCH = 0x10, 0x11  # NFNL_MSG_BATCH_BEGIN and _END
_HEADER = struct.Struct("=LHHLL")
_ATTRIBUTE = struct.Struct("=HH")


class Request(NamedTuple):
    """One message, what it is for, and the errors that mean it was done already."""

    type: int
    flags: int
    body: bytes
    what: str
    fine: tuple[int, ...] = ()


class KernelError(CniError):
    """The kernel said no. `errno` is its word, `request` what was asked."""

    def __init__(self, number: int, request: Request, said: str) -> None:
        detail = f"{os.strerror(number)} ({errno.errorcode.get(number, number)})"
        super().__init__(
            KERNEL, f"the kernel refused to {request.what}", f"{detail}{': ' if said else ''}{said}"
        )
        self.errno = number
        self.request = request


def _last_acknowledged(requests: Sequence[Request]) -> list[Request]:
    """Each acknowledgement would be a message to receive. The kernel works in order, so that of the
    last says that all are done, and an error is told without being asked for."""
    *others, last = requests
    return [*others, last._replace(flags=last.flags | NLM_F_ACK)]


def attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return _ATTRIBUTE.pack(length, kind) + value + b"\0" * (-length % 4)


def u8(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=B", value))


def u32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=L", value))


def u64(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=Q", value))


def text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def nested(kind: int, *attributes: bytes) -> bytes:
    return attribute(kind | NLA_F_NESTED, b"".join(attributes))


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The attributes in a message's body, their flags taken off."""
    at = 0
    while at + 4 <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < 4:
            return
        yield kind & 0x3FFF, data[at + 4 : at + length]
        at += (length + 3) & ~3


class Netlink:
    """One conversation, in the network namespace that the calling thread is in when it begins."""

    def __init__(self, protocol: int = NETLINK_ROUTE, strict: bool = False) -> None:
        """Only a `strict` one has the kernel heed what a request for a list says of which."""
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol
        )
        self._socket.setsockopt(SOL_NETLINK, NETLINK_CAP_ACK, 1)
        self._socket.setsockopt(SOL_NETLINK, NETLINK_EXT_ACK, 1)
        if strict:
            self._socket.setsockopt(SOL_NETLINK, NETLINK_GET_STRICT_CHK, 1)
        self._socket.setblocking(False)  # the kernel answers before a send returns
        self._sequence = 0

    def close(self) -> None:
        self._socket.close()

    def send_up_to(self, size: int) -> None:
        """Have room for transactions of so many bytes, which are sent whole."""
        self._socket.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, size)

    @property
    def port(self) -> int:
        """By which the kernel knows this socket; 0 before the first request."""
        return int(self._socket.getsockname()[0])

    def __enter__(self) -> Netlink:
        return self

    def __exit__(self, *_unused: object) -> None:
        self.close()

    def do(self, requests: Iterable[Request]) -> None:
        """Send them all at once. The first that failed is raised, after all have been done."""
        sent = list(requests)
        if sent:
            first = self._sequence + 1
            self._send(_last_acknowledged(sent), 0)
            self._acknowledged(sent, first)

    def commit(self, subsystem: int, requests: Sequence[Request]) -> None:
        """In one transaction of a subsystem of netfilter's, which does all of them or none."""
        if not requests:
            return
        edge = struct.pack("=BBH", socket.AF_UNSPEC, 0, socket.htons(subsystem))
        begin, end = (Request(kind, 0, edge, "") for kind in _BATCH)
        first = self._sequence + 2
        self._send([begin, *_last_acknowledged(requests), end], 0)
        self._acknowledged(requests, first)

    def _acknowledged(self, sent: Sequence[Request], first: int) -> None:
        """The kernel tells of each that failed, in their order, and answers the last in any case.
        Of a transaction, what was refused as a whole is said of its begin, before the first."""
        failure: Optional[KernelError] = None
        last = first + len(sent) - 1
        waiting = True
        while waiting:
            for kind, sequence, body in self._receive():
                if kind != NLMSG_ERROR or not first - 1 <= sequence <= last:
                    continue
                request = sent[max(sequence - first, 0)]
                (number,) = struct.unpack_from("=i", body)
                if sequence < first:
                    raise KernelError(-number, request, _said(body))
                waiting = waiting and sequence != last
                if number and -number not in request.fine and failure is None:
                    failure = KernelError(-number, request, _said(body))
        if failure is not None:
            raise failure

    def ask(self, request: Request) -> Optional[bytes]:
        """One question, one answer; None if the kernel says that there is no such thing."""
        self._send([request], 0)
        while True:
            for kind, sequence, body in self._receive():
                if sequence != self._sequence:
                    continue
                if kind != NLMSG_ERROR:
                    return body
                (number,) = struct.unpack_from("=i", body)
                if -number in (errno.ENOENT, errno.ENODEV):
                    return None
                raise KernelError(-number, request, _said(body))

    def dump(self, request: Request, must_know: bool = False) -> list[bytes]:
        """All that there is of a kind, as one consistent picture: a list that changed while it was
        read is read again. Nothing where the kernel knows no such table, unless it `must_know`."""
        for _unused in range(DUMP_TRIES):
            self._send([request], NLM_F_DUMP)
            found, consistent = self._dumped(request, must_know)
            if consistent:
                return found
        raise CniError(KERNEL, f"the kernel could not {request.what}: it changed all the while")

    def _dumped(self, request: Request, must_know: bool) -> tuple[list[bytes], bool]:
        found, consistent = [], True
        while True:
            data, at = self._read(), 0
            while at + _HEADER.size <= len(data):
                length, kind, flags, sequence, _unused = _HEADER.unpack_from(data, at)
                body = data[at + _HEADER.size : at + length]
                at += (max(length, _HEADER.size) + 3) & ~3
                if sequence != self._sequence:
                    continue
                consistent = consistent and not flags & NLM_F_DUMP_INTR
                if kind not in (NLMSG_ERROR, NLMSG_DONE):
                    found.append(body)
                    continue
                (number,) = struct.unpack_from("=i", body)
                if number and (must_know or -number != errno.ENOENT):
                    raise KernelError(-number, request, _said(body) if kind == NLMSG_ERROR else "")
                return found, consistent

    def index(self, name: str) -> int:
        """A link's index, by an ioctl on this socket, so in this socket's namespace; 0 if none."""
        question = struct.pack("16si12x", name.encode(), 0)
        try:
            answer = fcntl.ioctl(self._socket.fileno(), SIOCGIFINDEX, question)
        except OSError as problem:
            if problem.errno == errno.ENODEV:
                return 0
            raise
        index: int = struct.unpack_from("16si", answer)[1]
        return index

    def _send(self, requests: Sequence[Request], flags: int) -> None:
        parts = []
        for request in requests:
            self._sequence += 1
            parts.append(
                _HEADER.pack(
                    _HEADER.size + len(request.body),
                    request.type,
                    NLM_F_REQUEST | request.flags | flags,
                    self._sequence,
                    0,
                )
            )
            parts.append(request.body)
        self._socket.sendto(b"".join(parts), (0, 0))

    def _read(self) -> bytes:
        with suppress(BlockingIOError):
            return self._socket.recv(65536)
        self._socket.settimeout(RECEIVE_SECONDS)
        try:
            return self._socket.recv(65536)
        except socket.timeout:
            raise CniError(
                KERNEL, f"the kernel did not answer a netlink request in {RECEIVE_SECONDS} s"
            ) from None
        finally:
            self._socket.setblocking(False)

    def _receive(self) -> Iterator[tuple[int, int, bytes]]:
        data, at = self._read(), 0
        while at + _HEADER.size <= len(data):
            length, kind, _unused, sequence, _unused = _HEADER.unpack_from(data, at)
            if length < _HEADER.size:
                return
            yield kind, sequence, data[at + _HEADER.size : at + length]
            at += (length + 3) & ~3


_idle: dict[tuple[int, int], list[Netlink]] = {}  # by the network namespace that they are in


@contextmanager
def netfilter() -> Iterator[Netlink]:
    """A conversation with netfilter that is kept for the next one. To close its socket waits for
    whatever nftables has deleted just now, by whomever: some 15 ms."""
    here = os.stat("/proc/thread-self/ns/net")
    kept = _idle.setdefault((here.st_dev, here.st_ino), [])
    try:
        kernel = kept.pop()
    except IndexError:
        kernel = Netlink(NETLINK_NETFILTER)
    ended_well = False
    try:
        yield kernel
        ended_well = True
    finally:
        if ended_well and len(kept) < IDLE_KEPT:
            kept.append(kernel)
        else:
            kernel.close()  # after an error, answers may still be under way


def _said(body: bytes) -> str:
    """The sentence that newer kernels add to an error; it follows the capped request header."""
    for kind, value in attributes(body[4 + _HEADER.size :]):
        if kind == NLMSGERR_ATTR_MSG:
            return value.rstrip(b"\0").decode(errors="replace")
    return ""
