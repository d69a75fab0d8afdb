# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a pod of this node reaches: pings, full-sized packets, names, host ports, approved routes,
addresses outside of the cluster; and which way tailscaled sends what goes to another node.

ICMP and DNS are spoken here rather than by `ping` and `dig`, which a node need not have. Everything
is asked of all targets at once, and asked again until it is answered or the time is over: a path
through the mesh may need a moment to come up.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from . import paths
from .localapi import LocalAPIError

REPEAT_SECONDS = 0.5
PING_SPACING = 0.05  # seconds between two pings that are counted
LATE_SECONDS = 2.0  # an answer that takes longer counts as lost
MOST_LOSS_PERCENT = 10  # more is a failure
SEND_BYTES = 1 << 18
DIRECT, RELAYED, UNKNOWN = "direct", "relayed", "unknown"  # paths
HEADSCALE = "headscale"  # as a place outside: the server that the node is joined to
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _DO = 10, 23, 2
_HEADERS = {4: 28, 6: 48}  # of IP and ICMP together
_REQUEST = {4: 8, 6: 128}
_REPLY = {4: 0, 6: 129}


class Echo(NamedTuple):
    """One thing to ping. ``size`` is that of the whole packet, which is never fragmented; 0 is a
    small one that may be."""

    target: str
    check: str
    address: str
    size: int = 0


def outcome(ok: bool | None, detail: str = "") -> dict[str, Any]:
    """ok is None for what was not asked."""
    return {"ok": ok, "detail": detail}


def echoes(target: str, addresses: Iterable[str], mtu: int) -> Iterator[Echo]:
    for address in addresses:
        version = ip_address(address).version
        yield Echo(target, f"v{version}", address)
        yield Echo(target, f"mtu{version}", address, mtu)


def ping(wanted: Sequence[Echo], seconds: float) -> list[dict[str, Any]]:
    """The outcome of each, in their order. For a process that is in the pod's namespace."""
    found: list[dict[str, Any] | None] = [None] * len(wanted)
    refused: dict[int, str] = {}
    sent_at: dict[int, float] = {}
    sockets: dict[tuple[int, bool], socket.socket] = {}
    for version in {ip_address(one.address).version for one in wanted}:
        for fixed in (False, True):
            sockets[version, fixed] = _socket(version, fixed)
    mark = os.getpid() & 0xFFFF
    deadline = time.monotonic() + seconds
    try:
        while None in found and time.monotonic() < deadline:
            for at, one in enumerate(wanted):
                if found[at] is None:
                    try:
                        _send(sockets, one, mark, at)
                        sent_at[at] = time.monotonic()
                    except OSError as problem:
                        refused[at] = problem.strerror or str(problem)
            until = min(deadline, time.monotonic() + REPEAT_SECONDS)
            while None in found and (left := until - time.monotonic()) > 0:
                ready, _unused, _unused = select.select(list(sockets.values()), [], [], left)
                for one_socket in ready:
                    at = _heard(one_socket, mark)
                    if at in sent_at and found[at] is None:
                        taken = (time.monotonic() - sent_at[at]) * 1000
                        found[at] = outcome(True, f"{taken:.1f} ms")
    finally:
        for one_socket in sockets.values():
            one_socket.close()
    return [
        one or outcome(False, _why(wanted[at], refused.get(at, ""), seconds))
        for at, one in enumerate(found)
    ]


def quality(wanted: Sequence[Echo], count: int) -> list[dict[str, Any]]:
    """For each: how many of ``count`` pings are lost, and the median time of the others. In the
    pod's namespace."""
    count = max(1, min(count, 0xFFFF // max(1, len(wanted))))
    versions = {ip_address(one.address).version for one in wanted}
    sockets: dict[tuple[int, bool], socket.socket] = {
        (version, False): _socket(version, False) for version in versions
    }
    mark = os.getpid() & 0xFFFF
    sent_at: dict[int, float] = {}
    taken: dict[int, float] = {}
    try:
        for turn in range(count):
            for at, one in enumerate(wanted):
                sent_at[turn * len(wanted) + at] = time.monotonic()
                with suppress(OSError):  # counts as lost
                    _send(sockets, one._replace(size=0), mark, turn * len(wanted) + at)
            last = turn == count - 1
            until = time.monotonic() + (LATE_SECONDS if last else PING_SPACING)
            while len(taken) < len(sent_at) and (left := until - time.monotonic()) > 0:
                ready, _unused, _unused = select.select(list(sockets.values()), [], [], left)
                for one_socket in ready:
                    number = _heard(one_socket, mark)
                    if number in sent_at and number not in taken:
                        taken[number] = (time.monotonic() - sent_at[number]) * 1000
            if (left := until - time.monotonic()) > 0 and not last:
                time.sleep(left)
    finally:
        for one_socket in sockets.values():
            one_socket.close()
    return [
        _quality(
            [taken[n] for n in range(at, count * len(wanted), len(wanted)) if n in taken], count
        )
        for at in range(len(wanted))
    ]


def _quality(times: Sequence[float], count: int) -> dict[str, Any]:
    percent = round((count - len(times)) * 100 / count, 1)
    shown = f"{count - len(times)} of {count} pings were lost"
    found = outcome(percent <= MOST_LOSS_PERCENT, shown)
    return {**found, "percent": percent, "ms": round(median(times), 2) if times else None}


def throughput(address: str, number: int, seconds: float) -> dict[str, Any]:
    """How much a TCP connection to another probe carries, as that probe has counted it. In the
    pod's namespace."""
    block = bytes(SEND_BYTES)
    try:
        with socket.create_connection((address, number), timeout=5) as client:
            client.settimeout(10)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                client.sendall(block)
            client.shutdown(socket.SHUT_WR)
            count, taken = client.recv(100).split()
            mbit = int(count) * 8 / float(taken) / 1e6
    except (OSError, ValueError, ZeroDivisionError) as problem:
        return {**outcome(False, f"{address} port {number}: {problem}"), "mbit": None}
    return {**outcome(True, f"{mbit:.0f} Mbit/s"), "mbit": round(mbit, 1)}


def _why(one: Echo, refused: str, seconds: float) -> str:
    what = f"{one.address}, {one.size} bytes unfragmented" if one.size else one.address
    return f"{what}: {refused or f'no answer in {seconds:g} s'}"


def _socket(version: int, fixed: bool) -> socket.socket:
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    protocol = socket.IPPROTO_ICMP if version == 4 else socket.IPPROTO_ICMPV6
    made = socket.socket(family, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    made.setblocking(False)
    if fixed and version == 4:
        made.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _DO)
    elif fixed:
        made.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _DO)
    return made


def _send(
    sockets: Mapping[tuple[int, bool], socket.socket], one: Echo, mark: int, number: int
) -> None:
    version = ip_address(one.address).version
    body = b"\0" * max(0, one.size - _HEADERS[version]) if one.size else b"headcni"
    head = struct.pack(">BBHHH", _REQUEST[version], 0, 0, mark, number)
    if version == 4:  # for IPv6 the kernel does it
        head = struct.pack(">BBHHH", _REQUEST[4], 0, _checksum(head + body), mark, number)
    sockets[version, bool(one.size)].sendto(head + body, (one.address, 0))


def _heard(one_socket: socket.socket, mark: int) -> int:
    """The number of the request that this answers; -1 if it is none of ours."""
    try:
        packet = one_socket.recv(1 << 16)
    except OSError:
        return -1
    version = 4 if one_socket.family == socket.AF_INET else 6
    start = (packet[0] & 0xF) * 4 if version == 4 else 0
    if len(packet) < start + 8:
        return -1
    kind, _unused, _unused, their_mark, number = struct.unpack_from(">BBHHH", packet, start)
    return int(number) if (kind, their_mark) == (_REPLY[version], mark) else -1


def _checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def resolve(name: str, servers: Sequence[str], seconds: float) -> dict[str, Any]:
    """Whether one of the servers knows the name's IPv4 address, and which ``addresses`` it has. In
    the pod's namespace."""
    said = ""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for server in servers:
            try:
                addresses = _asked(name, server)
            except (OSError, ValueError, IndexError, struct.error) as problem:
                said = f"{server}: {problem or type(problem).__name__}"
                continue
            if addresses:
                shown = f"{name} is {', '.join(addresses)}"
                return {**outcome(True, shown), "addresses": addresses}
            said = f"{server} does not know {name}"
        time.sleep(REPEAT_SECONDS)
    return outcome(False, said)


def _asked(name: str, server: str) -> list[str]:
    number = os.getpid() & 0xFFFF
    labels = b"".join(bytes([len(one)]) + one.encode() for one in name.rstrip(".").split("."))
    question = labels + b"\0" + struct.pack(">HH", 1, 1)
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(2)
        client.sendto(struct.pack(">HHHHHH", number, 0x0100, 1, 0, 0, 0) + question, (server, 53))
        answer = client.recv(4096)
    return _addresses(answer, number, len(question))


def _addresses(answer: bytes, number: int, question: int) -> list[str]:
    """The A records of an answer."""
    theirs, flags, _unused, count = struct.unpack_from(">HHHH", answer)
    if theirs != number or flags & 0xF not in (0, 3):
        raise ValueError(f"it answers with error {flags & 0xF}")
    at, found = 12 + question, []
    for _unused in range(count):
        while answer[at] and answer[at] < 0xC0:
            at += answer[at] + 1
        at += 2 if answer[at] >= 0xC0 else 1
        kind, _unused, _unused, length = struct.unpack_from(">HHIH", answer, at)
        at += 10
        if kind == 1 and length == 4:
            found.append(str(ip_address(answer[at : at + 4])))
        at += length
    return found


def port(addresses: Sequence[str], number: int, seconds: float) -> dict[str, Any]:
    """Whether a host port answers at one of the node's addresses. In the host's namespace."""
    said = "no address of that node is known"
    deadline = time.monotonic() + seconds
    while addresses and time.monotonic() < deadline:
        for address in addresses:
            try:
                with socket.create_connection((address, number), timeout=2) as client:
                    if client.recv(64):
                        return outcome(True, f"{address} port {number}")
                    said = f"{address} port {number}: it closes at once"
            except OSError as problem:
                said = f"{address} port {number}: {problem}"
        time.sleep(REPEAT_SECONDS)
    return outcome(False, said)


class Place(NamedTuple):
    """Something outside that pods should reach: a TCP port, or an address to ping if it is 0."""

    text: str  # as it was given
    host: str
    port: int


def place(text: str) -> Place:
    """ADDRESS, ADDRESS:PORT, NAME, NAME:PORT, [IPV6]:PORT or a URL."""
    try:
        if "://" in text:
            parts = urlsplit(text)
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        elif text.count(":") > 1 and not text.startswith("["):
            return Place(text, str(ip_address(text)), 0)
        else:
            parts = urlsplit(f"//{text}")
            port = parts.port or 0
        if not parts.hostname or any(one.isspace() for one in text) or len(text) > 255:
            raise ValueError(text)
    except (ValueError, KeyError):
        raise ValueError(
            f"{text!r} is no place to try: expected an address or a name, with or without :PORT, "
            "or an http or https URL"
        ) from None
    return Place(text, parts.hostname, port)


def addresses_of(host: str) -> list[str]:
    """By the node's own resolver. An OSError if it does not know the name."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_own(address: str) -> bool:
    """Whether this is an address of the namespace that we are in, loopback included."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as attempt:
        try:
            attempt.bind((address, 0))
        except OSError:
            return False
    return True


def reach(addresses: Sequence[str], number: int, seconds: float) -> dict[str, Any]:
    """Whether one of these addresses answers: at a TCP port, or to a ping if that is 0. In the
    namespace that we are in."""
    if not number:
        answers = ping([Echo("", "", one) for one in addresses], seconds)
        good = [f"{at}, {one['detail']}" for at, one in zip(addresses, answers) if one["ok"]]
        return outcome(bool(good), "".join(good[:1]) or "; ".join(one["detail"] for one in answers))
    said = {}
    deadline = time.monotonic() + seconds
    while True:
        for address in addresses:
            began = time.monotonic()
            try:
                socket.create_connection((address, number), timeout=2).close()
            except OSError as problem:
                said[address] = f"{address} port {number}: {problem}"
                continue
            taken = (time.monotonic() - began) * 1000
            return outcome(True, f"{address} port {number}, {taken:.1f} ms")
        if time.monotonic() > deadline:
            return outcome(False, "; ".join(said.values()) or "it has no address")
        time.sleep(REPEAT_SECONDS)


def path(ask: Callable[[], Mapping[str, Any]], until: float) -> dict[str, Any]:
    """The way to a peer, by what tailscaled says of an answer from it. A path may begin relayed and
    become direct, so it is asked again ``until`` then (of time.monotonic) or it is direct."""
    last: Mapping[str, Any] = {}
    said = ""
    while True:
        try:
            answer = ask()
            said = str(answer.get("Err") or "")
            last = last if said else answer
        except LocalAPIError as problem:
            said = str(problem)
        if last.get("Endpoint") or time.monotonic() > until:
            return _path(last, said)
        time.sleep(REPEAT_SECONDS)


def _path(answer: Mapping[str, Any], said: str) -> dict[str, Any]:
    found = paths.of_ping(answer)
    if found.kind == paths.NONE:
        return {"kind": UNKNOWN, "through": said or "tailscaled does not say", "ms": None}
    kind = RELAYED if found.kind in paths.RELAYED else DIRECT
    return {"kind": kind, "through": found.in_words, "ms": found.latency_ms}


def route(cidrs: Sequence[str], theirs: Sequence[str], peers: Sequence[Mapping[str, Any]]) -> Any:
    """Whether the tailnet leads to a node's pods, as this node's tailscaled has been told."""
    peer = next((p for p in peers if set(p.get("TailscaleIPs") or ()) & set(theirs)), None)
    if peer is None:
        return outcome(False, "it is not a peer of this node")
    served = {str(ip_network(one)) for one in (peer.get("AllowedIPs") or ())}
    lacking = [one for one in cidrs if str(ip_network(one)) not in served]
    if lacking:
        return outcome(False, f"not approved: {', '.join(lacking)}")
    return outcome(True, ", ".join(cidrs))


def own_addresses() -> list[str]:
    """The addresses from which this node reaches others outside of the tailnet."""
    found = []
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as unconnected:
                unconnected.connect((far, 9))
                found.append(unconnected.getsockname()[0])
        except OSError:
            continue
    return found
