"""What the shim hands over is done once."""

from __future__ import annotations

import socket

from headcni import shim


def test_an_answer_that_is_quicker_than_the_shim_is_not_taken_for_a_failure():
    """A daemon that has all of the request may close the connection at once."""
    ours, theirs = socket.socketpair()

    class Quick(socket.socket):
        def sendmsg(self, *what):
            sent = super().sendmsg(*what)
            theirs.recv(100)
            theirs.sendall(b"answer")
            theirs.close()
            return sent

    with Quick(fileno=ours.detach()) as server:
        shim._send(server, b"request", None)
        assert server.recv(100) == b"answer"
