"""A peer advertises the network that the nodes themselves are in: nobody loses them."""

from __future__ import annotations

import json

import pytest
from lab_command import LabCommand
from leftovers import assert_nothing_left
from site_run import Site

HEADSCALE = "/opt/lab/headscale/headscale"
RULE = "5205: from all lookup main suppress_prefixlength 7 proto 72"


@pytest.fixture(scope="module")
def site():
    """node2 is in the mesh, and serves the underlay as well: a subnet router at home."""
    command = LabCommand("own-networks")
    command("down")
    before = command.listing()
    command("up", "--nodes", "2")
    made = Site(command)
    made("--limit", "node2")
    advertise(made, command.underlay())
    yield made
    command("down")
    assert_nothing_left(before, command.listing())


def advertise(site: Site, network: str) -> None:
    lab = site.lab
    prefs = json.loads(lab.on("node2", "tailscale debug prefs"))
    routes = ",".join(sorted({*prefs["AdvertiseRoutes"], network}))
    lab.on("node2", f"tailscale set --advertise-routes={routes}")
    nodes = json.loads(lab.on("control", f"{HEADSCALE} nodes list -o json"))
    number = next(one["id"] for one in nodes if one["given_name"] == "node2")
    lab.on("control", f"{HEADSCALE} nodes approve-routes -i {number} -r {routes}")


def way(site: Site, node: str, address: str) -> str:
    return site.lab.on(node, f"ip route get {address}").partition(" dev ")[2].split()[0]


def neighbour(site: Site) -> str:
    """An address of the underlay that is not a machine of the mesh."""
    return site.lab.underlay().rpartition(".")[0] + ".1"


def test_a_node_joins_although_its_own_network_is_served_in_the_tailnet(site):
    assert site("--limit", "node1").counted("failed") == {"node1": 0}
    site.lab.wait("node1", "ip route show table 52 | grep -q /24", 30)
    assert site.lab.underlay() in site.lab.on("node1", "ip route show table 52")
    assert way(site, "node1", neighbour(site)) == "eth0"
    assert "every pod reaches every other" in site.verify().output


def test_a_second_run_changes_nothing(site):
    assert site().changed == set()


def test_after_a_reboot_the_rule_is_there_before_tailscaled(site):
    site.lab("reboot", "node1")
    assert RULE in " ".join(site.lab.on("node1", "ip rule").split())
    rules, tailscaled = map(
        int,
        site.lab.on(
            "node1",
            "systemctl show -P InactiveEnterTimestampMonotonic headcni-own-networks;"
            " systemctl show -P InactiveExitTimestampMonotonic tailscaled",
        ).split(),
    )
    assert 0 < rules < tailscaled
    site.lab.wait("node1", "ip route show table 52 | grep -q /24", 60)
    assert way(site, "node1", neighbour(site)) == "eth0"


def test_a_daemon_that_does_not_run_leaves_the_node_reachable(site):
    site.lab.on("node1", "systemctl stop headcni-daemon; systemctl restart tailscaled")
    site.lab.wait("node1", "ip route show table 52 | grep -q /24", 60)
    assert way(site, "node1", neighbour(site)) == "eth0"
    site.lab.on("node1", "systemctl start headcni-daemon")


def test_the_uninstall_removes_the_rule_and_tailscaled_accepts_no_routes_any_more(site):
    site("--limit", "node1", playbook="playbooks/uninstall.yml", headcni_tailscale="keep")
    assert "5205:" not in site.lab.on("node1", "ip rule; ip -6 rule")
    assert json.loads(site.lab.on("node1", "tailscale debug prefs"))["RouteAll"] is False
