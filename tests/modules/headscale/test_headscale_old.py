"""The modules at a real Headscale 0.25, which has another API for routes and keys."""

from __future__ import annotations

import threading
from datetime import datetime, timezone

import pytest
from ansible_module import Failed
from headscale_server import HeadscaleServer, before_headscale

pytestmark = before_headscale(0, 26)


def enabled(server: HeadscaleServer, name: str) -> set[str]:
    return {
        route["prefix"]
        for route in server.ask("GET", "routes")["routes"]
        if route["enabled"] and route["node"]["givenName"] == name
    }


def test_it_is_known_for_what_it_is(at):
    assert at("info")["version"] == "0.24"  # of the API, which is that of 0.24


def test_routes_are_approved_and_withdrawn_and_others_stay(at, headscale):
    own, other = "10.244.1.0/24", "192.168.7.0/24"
    headscale.add_node("node1", "headcni", own, other)
    headscale.add_node("node2", "headcni", "10.244.2.0/24")
    nodes = [
        {"name": "node1", "routes": [own]},
        {"name": "node2", "routes": ["10.244.2.0/24"]},
    ]
    done = at.twice("routes", nodes=nodes)
    assert done["diff"]["after"] == {"node1": [own], "node2": ["10.244.2.0/24"]}
    assert (enabled(headscale, "node1"), enabled(headscale, "node2")) == ({own}, {"10.244.2.0/24"})
    at.twice("routes", nodes=[{"name": "node1", "routes": [other]}])
    assert enabled(headscale, "node1") == {own, other}
    at.twice("routes", nodes=[{"name": "node1", "routes": [own]}], state="absent")
    assert enabled(headscale, "node1") == {other}
    at.twice("routes", nodes=[{"name": "node1", "routes": [own]}], purge=True)
    assert enabled(headscale, "node1") == {own}


def test_check_mode_approves_nothing(at, headscale):
    headscale.add_node("node1", "headcni", "10.244.1.0/24")
    nodes = [{"name": "node1", "routes": ["10.244.1.0/24"]}]
    assert at("routes", check=True, nodes=nodes)["changed"]
    assert enabled(headscale, "node1") == set()


def test_the_same_range_for_two_nodes_is_refused(at, headscale):
    headscale.add_node("node1", "headcni", "10.244.1.0/24")
    headscale.add_node("node2", "headcni", "10.244.0.0/16")
    at("routes", nodes=[{"name": "node2", "routes": ["10.244.0.0/16"]}])
    with pytest.raises(Failed, match=r"for node1 overlaps 10\.244\.0\.0/16 of node node2"):
        at("routes", nodes=[{"name": "node1", "routes": ["10.244.1.0/24"]}])


def test_a_route_that_was_never_advertised_cannot_be_approved_and_the_error_says_why(at, headscale):
    headscale.add_node("node1")
    nodes = [{"name": "node1", "routes": ["10.244.1.0/24"]}]
    with pytest.raises(
        Failed, match=r"approves only what a node has advertised, .*: node1 10\.244\.1\.0/24; wait"
    ):
        at("routes", nodes=nodes, wait_served=1)


def test_a_node_that_advertises_nothing_does_not_keep_the_others_from_their_routes(at, headscale):
    headscale.add_node("node1")
    headscale.add_node("node2", "headcni", "10.244.2.0/24")
    nodes = [{"name": f"node{n}", "routes": [f"10.244.{n}.0/24"]} for n in (1, 2)]
    done = at("routes", nodes=nodes, problems="report")
    assert list(done["problems"]) == ["node1"]
    assert "this one has not: node1 10.244.1.0/24; wait" in done["problems"]["node1"]
    assert set(done["diff"]["after"]) == {"node2"}
    assert enabled(headscale, "node2") == {"10.244.2.0/24"}


def test_users_are_made_renamed_and_removed(at, headscale):
    at.twice("user", name="headcni")
    at.twice("user", name="kubernetes", renamed_from="headcni")
    headscale.add_node("node1", "kubernetes")
    with pytest.raises(Failed, match="owns 1 nodes"):
        at("user", name="kubernetes", state="absent")
    at.twice("user", name="kubernetes", state="absent", remove_nodes=True)
    assert headscale.users == {}


def test_keys_are_minted_and_expired_but_not_deleted(at, headscale):
    headscale.add_user("headcni")
    made = at("preauth_key", user="headcni", tags=["tag:k8s"], reusable=True)
    assert made["key"]
    done = at.twice("preauth_key", state="expired", user="headcni", id=made["id"])
    assert [key["id"] for key in done["keys"]] == [made["id"]]
    (held,) = headscale.ask("GET", "preauthkey?user=headcni")["preAuthKeys"]
    assert held["aclTags"] == ["tag:k8s"]
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    assert held["expiration"][:19] <= now
    for given, said in (
        ({"state": "expired", "id": "1"}, "user: missing, and Headscale 0.24 lists keys by user"),
        (
            {"state": "absent", "user": "headcni", "id": made["id"]},
            "deletes no keys: use state=exp",
        ),
        ({"tags": ["tag:k8s"]}, "user: missing, and Headscale 0.24 makes no key without one"),
    ):
        with pytest.raises(Failed, match=said):
            at("preauth_key", **given)


def test_nodes_are_renamed_tagged_and_removed(at, headscale):
    headscale.add_node("node1")
    done = at.twice("node", name="node1", new_name="rack", tags=["tag:k8s"])
    assert done["node"]["tags"] == ["tag:k8s"]
    assert headscale.nodes["rack"]["forcedTags"] == ["tag:k8s"]
    at("node", name="rack", expiry="now")
    assert not at("node", name="rack", expiry="now")["changed"]
    with pytest.raises(Failed, match=r"expiry: never, and Headscale 0.24 cannot take"):
        at("node", name="rack", expiry="never")
    at.twice("node", name="rack", state="absent")


def test_a_policy_made_anew_still_allows_everything(at, headscale):
    at.twice("policy", routes={"10.244.0.0/16": ["tag:k8s"]}, tag_owners={"tag:k8s": ["headcni"]})
    assert '"acls"' in headscale.policy and '"*:*"' in headscale.policy
    at.twice("policy", routes={"10.244.0.0/16": ["tag:k8s"]}, state="absent")
    assert "10.244.0.0/16" not in headscale.policy


def test_a_real_node_is_waited_for_until_it_advertises_and_serves(at, headscale, tailscaleds):
    headscale.add_user("headcni")
    key = at("preauth_key", user="headcni")["key"]
    node = tailscaleds()
    node_key = node.join(headscale.url, key, "alpha")
    later = threading.Timer(3, node.tailscale, ["set", "--advertise-routes=10.244.1.0/24"])
    later.start()
    nodes = [{"node_key": node_key, "routes": ["10.244.1.0/24"]}]
    assert at("routes", nodes=nodes, wait_served=30)["changed"]
    later.join()
    (route,) = at("info", gather=["nodes"])["routes"]
    assert (route["advertised"], route["approved"], route["served"]) == (True, True, True)
