"""Packets without end, for tests that look for a moment at which one gets through.

    stream.py send ADDRESS...    sends UDP to each of them, again and again, from a new port for
                                 each packet, so that each is a connection of its own; it begins
                                 before there is a network, and never stops to try
    stream.py count              counts those that arrive, of either IP version

Each packet has the time at which it was sent. A line on stdin asks how many there were: `send`
answers with the number that the kernel took, `count` with one line of JSON, all times of sending.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

PORT = 9009


def send(addresses: list[str]) -> None:
    sent = 0
    targets = [(socket.AF_INET6 if ":" in one else socket.AF_INET, one) for one in addresses]

    def work() -> None:
        nonlocal sent
        while True:
            for family, address in targets:
                try:
                    with socket.socket(family, socket.SOCK_DGRAM) as client:
                        client.sendto(f"{time.monotonic():.6f}".encode(), (address, PORT))
                    sent += 1
                except OSError:
                    time.sleep(0.0002)  # there is no way yet, or no room

    threading.Thread(target=work, daemon=True).start()
    print("ready", flush=True)
    for _unused in sys.stdin:
        print(sent, flush=True)


def count() -> None:
    seen: list[float] = []
    server = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    server.bind(("::", PORT))

    def work() -> None:
        while True:
            seen.append(float(server.recv(64)))

    threading.Thread(target=work, daemon=True).start()
    print("ready", flush=True)
    for _unused in sys.stdin:
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(sys.argv[2:])
    else:
        count()
