"""uninstall.yml: the node is as it was, file by file, link by link, switch by switch."""

from __future__ import annotations

import pytest
from lab_command import LabCommand
from leftovers import assert_nothing_left
from node_listing import differences, listing, prefs
from site_run import Site
from traffic import CNITOOL

pytestmark = pytest.mark.timeout(900)
OTHER = '{"cniVersion":"1.0.0","name":"other","plugins":[{"type":"bridge"}]}'
MINE = "192.168.77.0/24"


@pytest.fixture(scope="module")
def site():
    """node1 is bare but for another network. node2 has a tailscaled of its owner's, who joined it
    to the same server, with a route and switches of his own."""
    lab = LabCommand("d2u")
    lab("down")
    before = lab.listing()
    lab("up", "--nodes", "2")
    site = Site(lab)
    lab.write("node1", "/etc/cni/net.d/50-other.conflist", OTHER.encode())
    site("--limit", "node2", playbook="tests/support/joined.yml", headscale_routes_user="owner")
    lab.on(
        "node2",
        f"tailscale set --advertise-routes={MINE} --accept-routes=false --accept-dns=true"
        " --snat-subnet-routes=true",
    )
    # tailscaled says that it is done before its rules are there.
    lab.wait("node2", 'a=$(nft -s list ruleset); sleep 3; [ "$a" = "$(nft -s list ruleset)" ]')
    yield site
    lab("down")
    assert_nothing_left(before, lab.listing())


def uninstall(site: Site, *words: str, check: bool = True, **given):
    return site(*words, playbook="playbooks/uninstall.yml", check=check, **given)


@pytest.mark.parametrize("mode", ["host", "daemon"])
def test_a_node_is_as_it_was(site, mode):
    lab = site.lab
    nodes = ("node1", "node2")
    lab.on("node1", "sysctl -qw net.ipv4.ip_forward=0 net.ipv6.conf.all.forwarding=0")
    before = {node: listing(lab, node) for node in nodes}
    owners = prefs(lab, "node2")
    site(headcni_mode=mode)
    assert len(differences(before["node1"], listing(lab, "node1"))) > 50
    lab.on("node1", f"ip netns add pod && {CNITOOL} add headcni /run/netns/pod")

    refused = uninstall(site, check=False)
    assert refused.code != 0
    assert "1 pods use the network of node1 (cnitool-" in refused.failures("node1")
    assert lab.on("node1", "systemctl is-active headcni-daemon").strip() == "active"

    lab.on("node1", f"{CNITOOL} del headcni /run/netns/pod; ip netns del pod")
    lab.on("node1", "rm -r /var/lib/cni/results")  # cnitool's own
    foretold = uninstall(site, "--check", "--diff")
    uninstalled = uninstall(site, "--diff")
    assert foretold.changed == uninstalled.changed
    assert set(uninstalled.counted("rescued").values()) == {0}
    for node in nodes:
        left = differences(before[node], listing(lab, node))
        assert not left, "\n".join([node, *left])
    assert prefs(lab, "node2") == owners
    assert uninstall(site).changed == set()


def test_headscale_has_the_owners_node_and_no_other(site):
    told = site(playbook="tests/support/at_headscale.yml")
    (nodes,) = [one["result"]["nodes"] for one in told.tasks if one["task"] == "List the nodes"]
    assert [one["name"] for one in nodes] == ["node2"]
    assert nodes[0]["approved_routes"] == []


def test_pods_lose_their_network_if_told_so(site):
    lab = site.lab
    site("--limit", "node1")
    lab.on("node1", f"ip netns add pod && {CNITOOL} add headcni /run/netns/pod")
    uninstall(site, "--limit", "node1", headcni_with_pods=True, headcni_identities="keep")
    assert "eth0" not in lab.on("node1", "ip netns exec pod ip -br link")
    assert lab.on("node1", "ls /etc/cni/net.d").split() == ["50-other.conflist"]
    lab.on("node1", "ip netns del pod")
    told = site(playbook="tests/support/at_headscale.yml")
    (nodes,) = [one["result"]["nodes"] for one in told.tasks if one["task"] == "List the nodes"]
    assert sorted(one["name"] for one in nodes) == ["node1", "node2"]
    assert {tuple(one["approved_routes"]) for one in nodes} == {()}


def test_a_headscale_that_is_gone_for_good_keeps_nobody_from_leaving(site):
    lab = site.lab
    site("--limit", "node1")
    lab.on("control", "systemctl stop headscale")
    try:
        refused = uninstall(site, "--limit", "node1", check=False)
        assert refused.code != 0
        assert "headcni_identities=ignore" in refused.failures("node1")
        uninstall(site, "--limit", "node1", headcni_identities="ignore")
    finally:
        lab.on("control", "systemctl start headscale")
    assert "headcni" not in lab.on("node1", "ls /opt /etc /etc/cni/net.d /etc/systemd/system")


def test_what_the_owner_has_set_since_stays(site):
    """And nothing else does: what was turned for HeadCNI is as it was before."""
    lab = site.lab
    owners = prefs(lab, "node2")
    assert owners["CorpDNS"] and owners["Hostname"] != "his-own"
    site("--limit", "node2")
    assert not prefs(lab, "node2")["CorpDNS"]
    lab.on("node2", "tailscale set --hostname=his-own")
    uninstall(site, "--limit", "node2")
    assert prefs(lab, "node2") == {**owners, "Hostname": "his-own"}
