"""site.yml, verify.yml and uninstall.yml at other releases of Headscale than the lab's own.

Those before 0.26 approve only what a node advertises already. `make test-headscale-versions` runs
this for each release, and builds it first.
"""

from __future__ import annotations

import os

import pytest
from headscale_server import HEADSCALE, VERSION
from lab_command import LabCommand
from leftovers import assert_nothing_left
from site_run import Run, Site

from lab import tools

NODES = ("node1", "node2")

pytestmark = pytest.mark.skipif(
    "HEADCNI_HEADSCALE" not in os.environ, reason="run make test-headscale-versions"
)


@pytest.fixture(scope="module")
def site():
    command = LabCommand("headscale-versions")
    command("down")
    before = command.listing()
    command("up", "--nodes", "2")
    yield Site(command)
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


def test_the_lab_runs_the_release_that_was_asked_for(site):
    said = site.lab.on("control", "/opt/lab/headscale/headscale version")
    # Up to 0.26 it does not say, unless its own build script built it.
    assert tools.headscale_version(HEADSCALE) in said or VERSION < (0, 27)
    running = site.lab.on("control", "sha256sum < /proc/$(pidof headscale)/exe")
    built = site.lab.run("sha256sum", str(HEADSCALE.bin / "headscale")).stdout
    assert running.split()[0] == built.split()[0]


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


def test_nodes_change_to_daemon_mode_and_leave(site, first):
    assert site(playbook="playbooks/switch_mode.yml", headcni_mode="daemon", timeout=600).recap
    assert "every pod reaches every other" in site.verify().output
    site(playbook="playbooks/uninstall.yml")
    told = site(playbook="tests/support/at_headscale.yml")
    (nodes,) = [one["result"]["nodes"] for one in told.tasks if one["task"] == "List the nodes"]
    assert nodes == []
