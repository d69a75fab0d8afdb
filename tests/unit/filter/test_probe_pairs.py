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
        "measured": {"node1": []},
    }


def test_throughput_is_measured_on_all_pairs_of_few_nodes_and_to_the_next_of_many():
    def measured(count):
        names = [f"node{number}" for number in range(1, count + 1)]
        return pairs(names, {name: {"headcni_probe": {"probe": {"node": name}}} for name in names})

    assert measured(3)["measured"]["node2"] == ["node3", "node1"]
    assert measured(9)["measured"]["node9"] == ["node1"]
    assert measured(100)["measured"]["node7"] == ["node8"]
