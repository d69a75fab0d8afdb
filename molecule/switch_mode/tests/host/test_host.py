"""After the switch back to host mode."""

from __future__ import annotations

from mesh_state import assert_in_mode, assert_pods_leave_by
from traffic import assert_unharmed


def test_nobody_missed_more_than_a_second(traffic):
    assert_unharmed(traffic.stop(), gap=1)


def test_every_node_is_in_host_mode(lab, nodes, traffic):
    for node, host in nodes.items():
        assert_in_mode(lab, node, "host")
        assert_pods_leave_by("tailscale0", node, host, traffic.addresses)
