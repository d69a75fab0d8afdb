"""Routes at a real Headscale: approved for all nodes in one call, and kept apart."""

from __future__ import annotations

import time

import pytest
from ansible_module import Failed
from headscale_server import from_headscale
from patience import until

pytestmark = from_headscale(0, 26)

OWN = ("10.244.1.0/24", "fd44:0:0:1::/64")


def test_the_routes_of_all_nodes_are_approved_with_one_listing(at, headscale, counted):
    nodes = []
    for number in range(1, 6):
        made = headscale.add_node(f"node{number}")
        nodes.append({"node_key": made["nodeKey"], "routes": [f"10.244.{number}.0/24"]})
    done = at.twice("routes", nodes=nodes)
    assert len(done["routes"]) == 5
    assert headscale.approved("node3") == {"10.244.3.0/24"}
    counted.clear()
    assert not at("routes", nodes=nodes)["changed"]
    assert counted == ["GET /api/v1/node"]


def test_the_diff_says_what_each_node_had_and_has(at, headscale):
    one, two = headscale.add_node("node1"), headscale.add_node("node2")
    headscale.approve(one, "192.168.7.0/24")
    headscale.approve(two, "10.244.2.0/24")
    nodes = [
        {"name": "node1", "label": "alpha", "routes": list(OWN)},
        {"id": two["id"], "routes": ["10.244.2.0/24"]},
    ]
    done = at.twice("routes", nodes=nodes)
    assert done["diff"] == {
        "before": {"alpha": ["192.168.7.0/24"]},
        "after": {"alpha": ["10.244.1.0/24", "192.168.7.0/24", "fd44:0:0:1::/64"]},
    }
    assert [route["changed"] for route in done["routes"]] == [True, False]


def test_a_users_own_routes_stay(at, headscale):
    node = headscale.add_node("node1")
    headscale.approve(node, "192.168.7.0/24", "0.0.0.0/0", "::/0")
    wanted = [{"name": "node1", "routes": list(OWN)}]
    at.twice("routes", nodes=wanted)
    assert headscale.approved("node1") == {"192.168.7.0/24", "0.0.0.0/0", "::/0", *OWN}
    at.twice("routes", nodes=wanted, state="absent")
    assert headscale.approved("node1") == {"192.168.7.0/24", "0.0.0.0/0", "::/0"}


def test_purge_leaves_only_what_is_named(at, headscale):
    node = headscale.add_node("node1")
    headscale.approve(node, "192.168.7.0/24", *OWN)
    at.twice("routes", nodes=[{"name": "node1", "routes": [OWN[0]]}], purge=True)
    assert headscale.approved("node1") == {OWN[0]}
    at.twice("routes", nodes=[{"name": "node1", "routes": []}], purge=True)
    assert headscale.approved("node1") == set()


def test_check_mode_approves_nothing(at, headscale):
    headscale.add_node("node1")
    at("routes", check=True, nodes=[{"name": "node1", "routes": list(OWN)}])
    assert headscale.approved("node1") == set()


@pytest.mark.parametrize("check", [True, False])
def test_a_range_of_another_node_is_refused_before_anything_is_written(at, headscale, check):
    headscale.add_node("node1")
    stale = headscale.add_node("stale")
    headscale.approve(stale, "10.244.0.0/16")
    headscale.add_node("node2")
    nodes = [
        {"name": "node2", "routes": ["10.9.0.0/24"]},
        {"name": "node1", "routes": ["10.244.1.0/24"]},
    ]
    with pytest.raises(
        Failed,
        match=rf"10.244.1.0/24 for node1 overlaps 10.244.0.0/16 of node stale \(id {stale['id']}\)",
    ):
        at("routes", check=check, nodes=nodes)
    assert headscale.approved("node2") == set()


def test_all_missing_nodes_are_named_in_one_error_and_nothing_is_written(at, headscale):
    headscale.add_node("node1")
    nodes = [
        {"name": "node1", "routes": ["10.244.1.0/24"]},
        {"name": "ghost", "routes": ["10.244.2.0/24"]},
        {"node_key": "nodekey:dead", "label": "beta", "routes": ["10.244.3.0/24"]},
    ]
    with pytest.raises(Failed, match=r"know ghost; .* know beta \(node_key nodekey:dead\); see"):
        at("routes", nodes=nodes)
    assert headscale.approved("node1") == set()
    predicted = at("routes", check=True, nodes=nodes)
    assert set(predicted["diff"]["after"]) == {"node1", "ghost", "beta"}
    assert "ghost is not at Headscale yet" in str(predicted["warnings"])


def test_the_others_are_seen_to_if_what_is_wrong_is_to_be_reported(at, headscale, counted):
    one, two = headscale.add_node("node1"), headscale.add_node("node2")
    stale = headscale.add_node("stale")
    headscale.approve(stale, "10.244.2.0/24")
    headscale.approve(two, "192.168.7.0/24")
    nodes = [
        {"node_key": one["nodeKey"], "label": "alpha", "routes": ["10.244.1.0/24"]},
        {"node_key": two["nodeKey"], "label": "beta", "routes": ["10.244.2.0/24"]},
        {"node_key": "nodekey:dead", "label": "gamma", "routes": ["10.244.3.0/24"]},
        {"label": "delta", "routes": ["10.244.4.0/24"]},
    ]
    predicted = at("routes", check=True, nodes=nodes, problems="report")
    assert headscale.approved("node1") == set()
    assert set(predicted["problems"]) == {"beta", "delta"}  # gamma may be about to join
    counted.clear()
    done = at("routes", nodes=nodes, problems="report")
    assert counted == ["GET /api/v1/node", f"POST /api/v1/node/{one['id']}/approve_routes"]
    assert set(done["problems"]) == {"beta", "gamma", "delta"}
    assert f"of node stale (id {stale['id']}), offline" in done["problems"]["beta"]
    assert "does not know gamma (node_key nodekey:dead)" in done["problems"]["gamma"]
    assert "give one of node_key, id and name" in done["problems"]["delta"]
    assert done["diff"] == {"before": {"alpha": []}, "after": {"alpha": ["10.244.1.0/24"]}}
    assert [route["label"] for route in done["routes"]] == ["alpha"]
    assert headscale.approved("node1") == {"10.244.1.0/24"}
    assert headscale.approved("node2") == {"192.168.7.0/24"}
    again = at("routes", nodes=nodes, problems="report")
    assert (again["changed"], again["problems"]) == (False, done["problems"])


def test_what_fails_for_one_node_does_not_keep_the_others_waiting(at, headscale, monkeypatch):
    """One of three is removed by somebody else between the listing and the writing."""
    from ansible_collections.headcni.mesh.plugins.module_utils.headscale import Headscale

    made = {n: headscale.add_node(n) for n in ("node1", "node2", "node3")}
    listed = Headscale.nodes

    def then_one_goes(self):
        found = listed(self)
        headscale.ask("DELETE", f"node/{made['node2']['id']}")
        return found

    monkeypatch.setattr(Headscale, "nodes", then_one_goes)
    nodes = [{"name": f"node{n}", "routes": [f"10.244.{n}.0/24"]} for n in (1, 2, 3)]
    why = r"node2: Headscale at .* said: .*(NodeStore|not found)"
    with pytest.raises(Failed, match=f"1 could not be written, 2 were: {why}") as failed:
        at("routes", nodes=nodes)
    assert failed.value.result["changed"]
    assert set(failed.value.result["diff"]["after"]) == {"node1", "node3"}
    assert [bool(route["error"]) for route in failed.value.result["routes"]] == [False, True, False]
    assert headscale.approved("node3") == {"10.244.3.0/24"}
    assert set(failed.value.result["problems"]) == {"node2"}


def test_a_write_that_is_refused_is_reported_of_its_node(at, headscale, monkeypatch):
    from ansible_collections.headcni.mesh.plugins.module_utils.headscale import Headscale

    made = {n: headscale.add_node(n) for n in ("node1", "node2")}
    listed = Headscale.nodes

    def then_one_goes(self):
        found = listed(self)
        headscale.ask("DELETE", f"node/{made['node1']['id']}")
        return found

    monkeypatch.setattr(Headscale, "nodes", then_one_goes)
    nodes = [{"name": f"node{n}", "routes": [f"10.244.{n}.0/24"]} for n in (1, 2)]
    done = at("routes", nodes=nodes, problems="report")
    assert set(done["problems"]) == {"node1"}
    assert set(done["diff"]["after"]) == {"node2"}
    assert headscale.approved("node2") == {"10.244.2.0/24"}


def test_two_identities_of_one_machine_hand_a_range_over(at, headscale):
    headscale.add_node("host")
    headscale.add_node("daemon")
    headscale.add_node("other")
    at("routes", nodes=[{"name": "host", "routes": list(OWN)}])
    new = {"name": "daemon", "routes": list(OWN)}
    with pytest.raises(Failed, match="need same_machine_as"):
        at("routes", nodes=[new])
    at.twice("routes", nodes=[{**new, "same_machine_as": ["host"]}])
    with pytest.raises(Failed, match="for other overlaps"):
        at("routes", nodes=[{"name": "other", "routes": list(OWN), "same_machine_as": ["host"]}])
    at.twice("routes", nodes=[{"name": "host", "routes": list(OWN)}], state="absent")
    assert (headscale.approved("host"), headscale.approved("daemon")) == (set(), set(OWN))


def test_no_nodes_ask_nothing_of_the_server(at, headscale, counted):
    counted.clear()
    assert not at("routes", nodes=[])["changed"]
    assert counted == []


def test_routes_are_waited_for_until_a_real_node_serves_them(at, headscale, tailscaleds):
    key = at.tagged_key("tag:k8s")
    node = tailscaleds()
    node_key = node.join(headscale.url, key, "alpha")
    wanted = [{"node_key": node_key, "label": "alpha", "routes": [OWN[0]]}]
    began = time.monotonic()
    with pytest.raises(
        Failed, match=r"not within 2 s: alpha: 10.244.1.0/24 is not served: .* not advertise it"
    ) as failed:
        at("routes", nodes=wanted, wait_served=2)
    assert 2 <= time.monotonic() - began < 8
    assert failed.value.result["changed"]  # it is approved, only not served
    reported = at("routes", nodes=wanted, wait_served=1, problems="report")
    assert "not within 1 s: alpha: 10.244.1.0/24 is not served" in reported["problems"]["alpha"]
    node.tailscale("set", f"--advertise-routes={OWN[0]}")
    done = at("routes", nodes=wanted, wait_served=20)
    assert not done["changed"]
    (route,) = at("info", gather=["nodes"], node_key=node_key)["routes"]
    assert route == {
        "route": OWN[0],
        "node": "alpha",
        "id": route["id"],
        "advertised": True,
        "approved": True,
        "served": True,
    }


def test_two_real_identities_of_one_machine_count_as_served_by_either(at, headscale, tailscaleds):
    key = at.tagged_key("tag:k8s", reusable=True)
    host, daemon = tailscaleds(), tailscaleds()
    keys = [
        host.join(headscale.url, key, "host", OWN[0]),
        daemon.join(headscale.url, key, "daemon", OWN[0]),
    ]
    until(lambda: all(n["availableRoutes"] for n in headscale.nodes.values()))
    at("routes", nodes=[{"node_key": keys[0], "routes": [OWN[0]]}], wait_served=20)
    both = [{"node_key": keys[1], "routes": [OWN[0]], "same_machine_as": [keys[0]]}]
    at("routes", nodes=both, wait_served=20)
    assert headscale.nodes["daemon"]["subnetRoutes"] == []
    at("routes", nodes=[{"node_key": keys[0], "routes": [OWN[0]]}], state="absent")
    at("routes", nodes=[{"node_key": keys[1], "routes": [OWN[0]]}], wait_served=20)
    assert headscale.nodes["daemon"]["subnetRoutes"] == [OWN[0]]


def test_the_routes_of_a_node_that_was_removed_are_free_for_the_next(at, headscale, tailscaleds):
    """Up to 0.28, Headscale itself keeps them for a node that is gone, until it is restarted."""
    key = at.tagged_key("tag:k8s", reusable=True)
    for name in ("first", "second"):
        node_key = tailscaleds().join(headscale.url, key, name, OWN[0])
        at("routes", nodes=[{"node_key": node_key, "routes": [OWN[0]]}], wait_served=20)
        at("node", node_key=node_key, state="absent")
