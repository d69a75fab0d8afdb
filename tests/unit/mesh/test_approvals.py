"""What no real Headscale does: mistakes of our own must not end the passes."""

from __future__ import annotations

from patience import until

from headcni.log import Log
from headcni.mesh.approvals import ApprovalKeeper, Identity
from headcni.mesh.headscale import Node

ME = Node("1", "nodekey:me", "node1", True, ("10.1.1.0/24",), ("10.1.1.0/24",))


class Server:
    """A client in which there is a bug, the first time."""

    url = "http://headscale.invalid"

    def __init__(self) -> None:
        self.asked = 0

    def nodes(self) -> list[Node]:
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError("never thought of")
        return [ME]

    def node(self, number: str) -> Node:
        self.asked += 1
        return ME

    def cancel(self) -> None:
        pass


def keeper(server, **options) -> ApprovalKeeper:
    return ApprovalKeeper(server, lambda: Identity(ME.key, ME.name), ["10.1.1.0/24"], **options)


def test_a_bug_is_told_and_the_next_pass_may_succeed():
    server = Server()
    kept = keeper(server, interval=0.1)
    assert "a bug in HeadCNI: RuntimeError" in kept.ensure_once().problem
    assert "never thought of" in kept.held_back()
    server.asked = 0
    kept.start()
    try:
        until(lambda: kept.condition.ok)
    finally:
        kept.stop()


def test_a_listener_that_fails_is_logged_and_stops_nothing(monkeypatch):
    logged = []
    monkeypatch.setattr(Log, "error", lambda _self, msg, **more: logged.append((msg, more)))

    def fail(report) -> None:
        raise RuntimeError("a bug elsewhere")

    server = Server()
    server.asked = 1
    kept = keeper(server, on_report=fail, interval=0.05)
    kept.start()
    try:
        until(lambda: server.asked > 3)
    finally:
        kept.stop()
    assert logged[0][0] == "a listener failed" and "elsewhere" in str(logged[0][1]["problem"])
