"""daemon mode: HeadCNI's own tailscaled in its own network namespace."""

from __future__ import annotations

from mesh_state import assert_in_mode, assert_pods_leave_by


def test_every_node_is_in_daemon_mode_and_headscale_names_our_tailscaled(lab, nodes):
    for node in nodes:
        assert_in_mode(lab, node, "daemon")


def test_our_tailscaled_is_the_only_one_and_its_tun_is_in_its_namespace(host):
    ours = host.service("headcni-tailscaled")
    assert ours.is_running and ours.is_enabled
    assert not host.service("tailscaled").is_running
    assert host.check_output("pgrep -xc tailscaled") == "1"
    assert host.interface("headcni01").exists
    assert not host.interface("tailscale0").exists
    assert "tailscale0" in host.check_output("ip -n headcni -br link")


def test_the_host_has_nothing_of_tailscales(host):
    """tailscaled's rules, routing table and chains are in the namespace."""
    assert host.run("ip route show table 52").stdout == ""
    assert "5270:" not in host.check_output("ip rule")
    assert "ts-forward" not in host.check_output("nft list ruleset")
    assert "ts-forward" in host.check_output("ip netns exec headcni nft list ruleset")


def test_packets_for_other_nodes_pods_leave_by_headcni01(nodes, pods):
    for node, host in nodes.items():
        assert_pods_leave_by("headcni01", node, host, pods.addresses)
