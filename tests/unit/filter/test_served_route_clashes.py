"""Which routes of the tailnet lead to a node's own networks."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.filter.served_route_clashes import (
    clashes as all_clashes,
)

NODE = {
    "mode": "host",
    "cluster_cidrs": ["10.244.0.0/16", "fd44::/48"],
    "networks": [
        {"network": "192.168.7.0/24", "interface": "eth0"},
        {"network": "fd77::/64", "interface": "eth0"},
    ],
    "controller": "192.168.7.2",
}


def served(*routes: str, by: str = "router") -> list[dict[str, object]]:
    return [{"route": one, "node": by, "served": True} for one in routes]


def clashes(routes, node, joined=False):
    known = {
        "headcni_node_preflight": node,
        "tailscale_preflight": {"node_key": "nodekey:1" if joined else ""},
    }
    none = {"problems": [], "notes": []}
    return all_clashes(["node1"], {"node1": known}, routes).get("node1", none)


def test_a_route_to_the_nodes_own_network_is_a_note():
    found = clashes(served("192.168.0.0/16", "fd77::/64"), NODE)
    assert found["problems"] == []
    assert found["notes"] == [
        f"tailnet: router serves {route}, and this node is in {network} by eth0: "
        "the node goes on reaching it directly"
        for route, network in (("192.168.0.0/16", "192.168.7.0/24"), ("fd77::/64", "fd77::/64"))
    ]


@pytest.mark.parametrize(
    "routes",
    [
        [],
        served("10.244.2.0/24", "fd44:0:0:2::/64", by="node2"),  # pods of another node
        served("0.0.0.0/0", "::/0"),  # an exit node, which nobody has chosen
        served("172.20.0.0/16", "fd99::/64"),
        [{**served("192.168.7.0/24")[0], "served": False}],
    ],
)
def test_other_routes_are_no_concern_of_the_node(routes):
    assert all_clashes(["node1"], {"node1": {"headcni_node_preflight": NODE}}, routes) == {}


def test_a_controller_that_the_node_would_answer_through_the_tunnel_stops_the_run():
    far = {**NODE, "controller": "10.9.0.4"}
    (problem,) = clashes(served("10.9.0.0/16"), far)["problems"]
    assert "router serves 10.9.0.0/16, and the controller, 10.9.0.4, is in it" in problem
    assert "headcni_mode to daemon" in problem
    with_a_route = {**far, "networks": [{"network": "10.9.0.0/24", "interface": "eth1"}]}
    assert clashes(served("10.9.0.0/16"), with_a_route)["problems"] == []
    assert clashes(served("10.9.0.0/16"), far, joined=True)["problems"] == []
    assert clashes(served("10.9.0.0/16"), {**far, "mode": "daemon"})["problems"] == []
    assert clashes(served("10.9.0.0/16"), {**far, "controller": ""})["problems"] == []


def test_a_route_that_holds_the_clusters_range_is_a_note():
    (note,) = clashes(served("10.0.0.0/8"), {**NODE, "mode": "daemon"})["notes"]
    assert "holds the cluster's 10.244.0.0/16" in note


def test_a_node_whose_preflight_failed_is_passed_over():
    assert all_clashes(["node1"], {"node1": {}}, served("192.168.7.0/24")) == {}
