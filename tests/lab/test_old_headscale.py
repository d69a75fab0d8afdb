"""site.yml at a real Headscale 0.25, which approves only what a node advertises already.

`make test-headscale-old` builds it first; that takes minutes, so without it these are skipped.
"""

from __future__ import annotations

import pytest
from lab_command import LabCommand
from leftovers import assert_nothing_left
from site_run import Run, Site

from lab import tools

OLD = tools.HEADSCALE_OLD
NODES = ("node1", "node2")
UNIT = "[Service]\nExecStart=\nExecStart=/opt/headscale serve\n"

pytestmark = pytest.mark.skipif(not OLD.built, reason="run make test-headscale-old")


@pytest.fixture(scope="module")
def site():
    command = LabCommand("old-headscale")
    command("down")
    before = command.listing()
    command("up", "--nodes", "2")
    command.copy(OLD.bin / "headscale", "control", "/opt/headscale")
    command.write("control", "/etc/systemd/system/headscale.service.d/old.conf", UNIT.encode())
    command.on(
        "control",
        "chmod +x /opt/headscale && systemctl stop headscale && rm -r /var/lib/headscale/*"
        " && systemctl daemon-reload && systemctl start headscale",
    )
    command.wait("control", "test -S /run/headscale/headscale.sock")
    key = command.on("control", "/opt/headscale apikeys create --expiration 1h").split()[-1]
    yield Site(command, {"headcni_headscale_api_key": key})
    command("down")
    assert_nothing_left(before, command.listing())


@pytest.fixture(scope="module")
def first(site) -> Run:
    return site()


def approvals(run: Run) -> list[tuple[str, bool]]:
    """Which of the two tasks that approve was run, and whether it changed anything."""
    return [
        (one["status"], one["changed"])
        for one in run.tasks
        if one["task"].endswith("Approve the nodes' routes")
    ]


def test_one_run_ends_with_every_route_approved_and_pods_that_talk(site, first):
    assert set(first.counted("failed").values()) == {0}
    assert ("ok", True) in approvals(first)
    assert "every pod reaches every other" in site.verify().output


def test_a_second_run_changes_nothing_in_as_few_tasks_as_elsewhere(site, first):
    again = site()
    assert again.counted("changed") == dict.fromkeys(NODES, 0)
    assert approvals(again).count(("ok", False)) == 1
    for node in NODES:
        assert 0 < len(again.modules(node)) <= 12, again.modules(node)


def test_a_node_that_stopped_advertising_is_approved_again_in_one_run(site, first):
    """As after a change of its range: Headscale knows it, and has yet to hear of the route."""
    site.lab.on("node2", "systemctl stop headcni-daemon; tailscale set --advertise-routes=")
    assert site().counted("failed") == dict.fromkeys(NODES, 0)
    assert "every pod reaches every other" in site.verify().output
