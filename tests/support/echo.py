"""A server that tells each client which address it came from, and a client that asks it."""

from __future__ import annotations

import socket
import sys

LIMIT = 3.0


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def serve(protocol: str, address: str, port: int) -> None:
    kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
    with socket.socket(_family(address), kind) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        if protocol == "tcp":
            server.listen(64)
        print("ready", flush=True)
        while True:
            if protocol == "udp":
                _, client = server.recvfrom(64)
                server.sendto(client[0].encode(), client)
                continue
            connection, client = server.accept()
            with connection:
                connection.sendall(client[0].encode())


def ask(protocol: str, address: str, port: int, source_port: int = 0, limit: float = LIMIT) -> str:
    kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
    with socket.socket(_family(address), kind) as client:
        client.settimeout(limit)
        if source_port:
            client.bind(("", source_port))
        client.connect((address, port))
        if protocol == "udp":
            client.send(b"?")
        return client.recv(64).decode()


if __name__ == "__main__":
    verb, protocol, address, port, *more = sys.argv[1:7]
    if verb == "serve":
        serve(protocol, address, int(port))
    else:
        try:
            print(ask(protocol, address, int(port), *map(int, more[:1]), *map(float, more[1:])))
        except OSError as problem:
            sys.exit(f"no answer: {problem}")
