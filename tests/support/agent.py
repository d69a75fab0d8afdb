"""What a pod of the policy tests runs: it answers on its ports and tries connections to others.

    agent.py PORT...

answers on each of the ports by TCP, UDP and SCTP, over both IP versions. Each line of its stdin is
a list of attempts in JSON, [[protocol, address, port, seconds], ...], that are made at the same
time; the answer is a line with the list of who got an answer. SCTP is done by raw packets, because
few kernels have it: an INIT, and an INIT ACK as the answer.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

SCTP, ICMP, ICMP6 = 132, 1, 58
INIT, INIT_ACK = 1, 2


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _unused in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def sctp_packet(kind: int, source: int, destination: int, tag: int) -> bytes:
    chunk = struct.pack("!BBHIIHHI", kind, 0, 20, 0x1234, 65535, 1, 1, 1)
    if kind == INIT_ACK:  # with a cookie, which it must have
        chunk = struct.pack("!BBHIIHHI", kind, 0, 28, 0x4321, 65535, 1, 1, 1)
        chunk += struct.pack("!HH4s", 7, 8, b"hctc")
    head = struct.pack("!HHI", source, destination, tag)
    checksum = struct.pack("<I", crc32c(head + bytes(4) + chunk))
    return head + checksum + chunk


def sctp_parts(packet: bytes, family: int) -> tuple[int, int, int] | None:
    """The ports and the kind of the first chunk."""
    if family == socket.AF_INET:
        packet = packet[(packet[0] & 15) * 4 :]
    if len(packet) < 16:
        return None
    source, destination = struct.unpack_from("!HH", packet)
    return source, destination, packet[12]


def serve_tcp(port: int) -> None:
    server = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)

    def work() -> None:
        while True:
            connection, client = server.accept()
            with connection:
                connection.sendall(client[0].encode() + b"\n")

    threading.Thread(target=work, daemon=True).start()


def serve_udp(port: int) -> None:
    for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        server = socket.socket(family, socket.SOCK_DGRAM)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        server.bind((any_address, port))

        def work(server: socket.socket = server) -> None:
            while True:
                said, client = server.recvfrom(2048)
                server.sendto(said, client)

        threading.Thread(target=work, daemon=True).start()


def serve_sctp(ports: set[int]) -> None:
    for family in (socket.AF_INET, socket.AF_INET6):
        server = socket.socket(family, socket.SOCK_RAW, SCTP)

        def work(server: socket.socket = server, family: int = family) -> None:
            while True:
                packet, client = server.recvfrom(2048)
                parts = sctp_parts(packet, family)
                if parts is not None and parts[1] in ports and parts[2] == INIT:
                    answer = sctp_packet(INIT_ACK, parts[1], parts[0], 0x1234)
                    server.sendto(answer, (client[0], 0))

        threading.Thread(target=work, daemon=True).start()


def family_of(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def reached(protocol: str, address: str, port: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    try:
        return ATTEMPTS[protocol](family_of(address), address, port, deadline)
    except OSError:
        return False


def by_tcp(family: int, address: str, port: int, deadline: float) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(max(0.01, deadline - time.monotonic()))
        client.connect((address, port))
        return bool(client.recv(64))


def by_udp(family: int, address: str, port: int, deadline: float) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.connect((address, port))
        return _answered(client, lambda: client.send(b"?"), lambda said: said == b"?", deadline)


def by_sctp(family: int, address: str, port: int, deadline: float) -> bool:
    own = 1024 + int.from_bytes(os.urandom(2), "big") % 60000
    with socket.socket(family, socket.SOCK_RAW, SCTP) as client:
        init = sctp_packet(INIT, own, port, 0)
        return _answered(
            client,
            lambda: client.sendto(init, (address, 0)),
            lambda said: sctp_parts(said, family) == (port, own, INIT_ACK),
            deadline,
        )


def by_icmp(family: int, address: str, _port: int, deadline: float) -> bool:
    six = family == socket.AF_INET6
    number = int.from_bytes(os.urandom(2), "big")
    head = struct.pack("!BBHHH", 128, 0, 0, number, 1)  # the kernel adds the checksum of ICMPv6
    if not six:
        total = 0x0800 + number + 1
        total = (total & 0xFFFF) + (total >> 16)
        head = struct.pack("!BBHHH", 8, 0, ~total & 0xFFFF, number, 1)
    with socket.socket(family, socket.SOCK_RAW, ICMP6 if six else ICMP) as client:

        def is_answer(said: bytes) -> bool:
            body = said if six else said[(said[0] & 15) * 4 :]
            return body[0] == (129 if six else 0) and struct.unpack_from("!H", body, 4)[0] == number

        return _answered(client, lambda: client.sendto(head, (address, 0)), is_answer, deadline)


def _answered(client, send, is_answer, deadline: float) -> bool:  # type: ignore[no-untyped-def]
    """Sends again and again, as a first packet may be lost while neighbours are looked up."""
    while time.monotonic() < deadline:
        send()
        again = min(deadline, time.monotonic() + 0.25)
        while (left := again - time.monotonic()) > 0:
            client.settimeout(left)
            try:
                said = client.recv(2048)
            except socket.timeout:
                break
            if is_answer(said):
                return True
    return False


ATTEMPTS = {"tcp": by_tcp, "udp": by_udp, "sctp": by_sctp, "icmp": by_icmp}


def main() -> None:
    ports = set(map(int, sys.argv[1:]))
    for port in ports:
        serve_tcp(port)
        serve_udp(port)
    serve_sctp(ports)
    print("ready", flush=True)
    with ThreadPoolExecutor(64) as workers:
        for line in sys.stdin:
            asked = json.loads(line)
            found = list(workers.map(lambda one: reached(*one), asked))
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
