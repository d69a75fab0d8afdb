"""A peer advertises the network that the nodes themselves are in: nobody loses them."""

from __future__ import annotations

import json

import pytest
from advertised_lan import advertise, await_route, way
from lab_command import LabCommand
from leftovers import assert_nothing_left
from site_run import Site

RULE = "5205: from all lookup main suppress_prefixlength 7 proto 72"


@pytest.fixture(scope="module")
def site():
    command = LabCommand("own-networks")
    command("down")
    before = command.listing()
    command("up", "--nodes", "2")
    made = Site(command)
    made("--limit", "node2")
    advertise(made)
    yield made
    command("down")
    assert_nothing_left(before, command.listing())


def test_a_node_joins_although_its_own_network_is_served_in_the_tailnet(site):
    run = site("--limit", "node1")
    assert run.counted("failed") == {"node1": 0}
    underlay = site.lab.underlay()
    said = " ".join(run.output.split())  # Ansible breaks long lines
    assert f"node2 serves {underlay}, and this node is in {underlay} by eth0" in said
    await_route(site, "node1")
    assert way(site, "node1") == "eth0"
    assert "every pod reaches every other" in site.verify().output


def test_a_second_run_changes_nothing(site):
    assert site().changed == set()


def test_after_a_reboot_the_rule_is_there_before_tailscaled(site):
    site.lab("reboot", "node1")
    assert RULE in " ".join(site.lab.on("node1", "ip rule").split())
    times = site.lab.on(
        "node1",
        "systemctl show -P InactiveEnterTimestampMonotonic headcni-own-networks;"
        " systemctl show -P InactiveExitTimestampMonotonic tailscaled",
    )
    rules, tailscaled = map(int, times.split())
    assert 0 < rules < tailscaled
    await_route(site, "node1")
    assert way(site, "node1") == "eth0"


def test_a_daemon_that_does_not_run_leaves_the_node_reachable(site):
    site.lab.on("node1", "systemctl stop headcni-daemon; systemctl restart tailscaled")
    await_route(site, "node1")
    assert way(site, "node1") == "eth0"
    site.lab.on("node1", "systemctl start headcni-daemon")


def test_the_uninstall_removes_the_rule_and_tailscaled_accepts_no_routes_any_more(site):
    site("--limit", "node1", playbook="playbooks/uninstall.yml", headcni_tailscale="keep")
    assert "5205:" not in site.lab.on("node1", "ip rule; ip -6 rule")
    assert json.loads(site.lab.on("node1", "tailscale debug prefs"))["RouteAll"] is False
