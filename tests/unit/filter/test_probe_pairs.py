"""Which pods test which."""

from __future__ import annotations

from ansible_collections.headcni.mesh.plugins.filter.probe_pairs import pairs


def test_nodes_without_a_pod_are_left_out():
    known = {
        "node1": {"headcni_probe": {"probe": {"node": "node1"}}},
        "node2": {"headcni_probe": {"failed": True}},
        "node3": {},
    }
    assert pairs(["node1", "node2", "node3"], known) == {
        "probes": {"node1": {"node": "node1"}},
        "targets": {"node1": []},
    }
