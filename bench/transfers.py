"""How long the same amount of data takes through connections between pods."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from cni_node import Namespace

from headcni.datapath import netns

PORT = 5201
SIZE = 8 << 20  # bytes of a transfer: some five milliseconds
LIMIT = 10  # seconds for a transfer
RECEIVE = """
import select, socket, sys
size, *numbers = map(int, sys.argv[1:])
connections = [socket.socket(fileno=number) for number in numbers]
buffer = bytearray(1 << 20)
while True:
    for connection in select.select(connections, (), ())[0]:
        left = size
        while left:
            count = connection.recv_into(buffer, min(left, len(buffer)))
            if not count:
                sys.exit()
            left -= count
        connection.sendall(b".")
"""


class Transfers:
    """Connections that stay open, and one process that sends on one of them at a time. So whatever
    changes the machine's speed for longer than a transfer changes that of all connections."""

    def __init__(self, senders: Sequence[socket.socket]):
        self._senders = senders
        self._data = bytes(SIZE)

    def seconds(self, number: int) -> float:
        """Until the receiver has all of it."""
        sender = self._senders[number]
        began = time.perf_counter()
        sender.sendall(self._data)
        answer = sender.recv(1)
        took = time.perf_counter() - began
        assert answer == b".", "the receiver has ended"
        return took


@contextmanager
def between(*pods: tuple[Namespace, Namespace, str]) -> Iterator[Transfers]:
    """One connection for each sender, receiver and the receiver's address."""
    with ExitStack() as made:
        ends = [_connected(made, *pair) for pair in pods]
        numbers = [end.fileno() for _, end in ends]
        command = [sys.executable, "-c", RECEIVE, *map(str, (SIZE, *numbers))]
        process = made.enter_context(subprocess.Popen(command, pass_fds=numbers))
        made.callback(process.kill)
        # Both processes stay where they are: a move costs more than what is measured.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, {cores[-1]})
        made.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, {cores[0]})
        yield Transfers([sender for sender, _ in ends])


def _connected(
    made: ExitStack, sender: Namespace, receiver: Namespace, address: str
) -> tuple[socket.socket, socket.socket]:
    with _inside(receiver):
        server = made.enter_context(socket.create_server((address, PORT)))
    with _inside(sender):
        near = made.enter_context(socket.create_connection((address, PORT), timeout=LIMIT))
    far = made.enter_context(server.accept()[0])
    return near, far


@contextmanager
def _inside(pod: Namespace) -> Iterator[None]:
    with netns.opened(pod.path) as fd, netns.entered(fd):
        yield
