"""A real packet from where the calling thread is: a ping, a connection, or a datagram."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from contextlib import closing
from typing import Optional

from ..model import Address

SECONDS = 3.0
TRIES = 3
_HEADERS = {4: 20 + 8, 6: 40 + 8}  # of IP and ICMP
_PROBE = 3  # do not fragment, and ignore what is known of the path
_WHOLE = {4: (socket.IPPROTO_IP, 10, _PROBE), 6: (socket.IPPROTO_IPV6, 23, _PROBE)}
_REQUEST, _REPLY = {4: 8, 6: 128}, {4: 0, 6: 129}


class NoAnswer(Exception):
    """Why there was no answer."""


def send(src: Address, dst: Address, port: int, protocol: str) -> Optional[float]:
    """The seconds until the answer. None if a datagram was neither answered nor refused."""
    if not port:
        return ping(src, dst)
    return _datagram(src, dst, port) if protocol == "udp" else _connection(src, dst, port)


def _connection(src: Address, dst: Address, port: int) -> float:
    began = time.monotonic()
    try:
        socket.create_connection((str(dst), port), SECONDS, (str(src), 0)).close()
    except OSError as problem:
        raise NoAnswer(f"port {port}: {problem.strerror or problem}") from None
    return time.monotonic() - began


def _datagram(src: Address, dst: Address, port: int) -> Optional[float]:
    began = time.monotonic()
    with closing(socket.socket(_family(dst), socket.SOCK_DGRAM)) as caller:
        caller.settimeout(SECONDS)
        try:
            caller.bind((str(src), 0))
            caller.connect((str(dst), port))
            caller.send(b"")
            caller.recv(64)
        except socket.timeout:
            return None
        except OSError as problem:
            raise NoAnswer(f"port {port}: {problem.strerror or problem}") from None
    return time.monotonic() - began


def ping(src: Address, dst: Address, size: int = 0, tries: int = TRIES) -> float:
    """The seconds until the answer. With a size, the packets have so many bytes and must not be
    fragmented."""
    protocol = socket.IPPROTO_ICMP if dst.version == 4 else socket.IPPROTO_ICMPV6
    mark = os.urandom(8)
    try:
        with closing(socket.socket(_family(dst), socket.SOCK_RAW, protocol)) as caller:
            caller.bind((str(src), 0))
            if size:
                caller.setsockopt(*_WHOLE[dst.version])
            padding = bytes(max(0, size - _HEADERS[dst.version] - len(mark)))
            for number in range(tries):
                began = time.monotonic()
                caller.sendto(_echo(dst.version, number, mark + padding), (str(dst), 0))
                if _answered(caller, dst, mark, began + SECONDS / TRIES):
                    return time.monotonic() - began
    except OSError as problem:
        raise NoAnswer(problem.strerror or str(problem)) from None
    raise NoAnswer(f"{tries} pings were lost")


def _answered(caller: socket.socket, dst: Address, mark: bytes, until: float) -> bool:
    while (left := until - time.monotonic()) > 0:
        if not select.select([caller], [], [], left)[0]:
            return False
        data, sender = caller.recvfrom(2048)
        body = data[(data[0] & 15) * 4 :] if dst.version == 4 else data
        if body[:1] == bytes([_REPLY[dst.version]]) and body[8:16] == mark:
            return str(sender[0]).partition("%")[0] == str(dst)
    return False


def _echo(version: int, number: int, mark: bytes) -> bytes:
    head = struct.pack("!BBHHH", _REQUEST[version], 0, 0, os.getpid() & 0xFFFF, number)
    body = head + mark
    if version == 6:
        return body  # the kernel adds the checksum
    total = sum(struct.unpack(f"!{len(body) // 2}H", body))
    total = (total >> 16) + (total & 0xFFFF)
    total += total >> 16
    return body[:2] + struct.pack("!H", ~total & 0xFFFF) + body[4:]


def _family(address: Address) -> int:
    return int(socket.AF_INET if address.version == 4 else socket.AF_INET6)
