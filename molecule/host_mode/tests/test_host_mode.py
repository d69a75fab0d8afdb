"""host mode: the node's own tailscaled, and no other."""

from __future__ import annotations

import json

from mesh_state import assert_in_mode, assert_pods_leave_by, pod_ranges


def test_every_node_is_in_host_mode_and_headscale_names_its_own_tailscaled(lab, nodes):
    for node in nodes:
        assert_in_mode(lab, node, "host")


def test_the_nodes_own_tailscaled_is_the_only_one(host):
    assert host.service("tailscaled").is_running
    assert not host.service("headcni-tailscaled").is_running
    assert host.check_output("pgrep -xc tailscaled") == "1"
    assert host.interface("tailscale0").exists
    assert not host.interface("headcni01").exists


def test_it_advertises_the_pods_and_leaves_their_addresses_alone(nodes):
    for node, host in nodes.items():
        prefs = json.loads(host.check_output("tailscale debug prefs"))
        assert pod_ranges(node)[0] in prefs["AdvertiseRoutes"]
        assert prefs["RouteAll"] and prefs["NoSNAT"]


def test_packets_for_other_nodes_pods_leave_by_tailscale0(nodes, pods):
    for node, host in nodes.items():
        assert_pods_leave_by("tailscale0", node, host, pods.addresses)
