"""Pods on nodes that site.yml has set up."""

from __future__ import annotations

from mesh_state import assert_in_mode


def test_every_node_is_in_host_mode(lab, nodes):
    for node in nodes:
        assert_in_mode(lab, node, "host")


def test_pods_talk_and_go_on_talking(traffic):
    traffic.pods()
    traffic.start()
