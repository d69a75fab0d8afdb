"""The modules at a real Headscale 0.25, which has another API for routes and keys.

`make test-headscale-old` builds it first; that takes minutes, so without it these are skipped.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from ansible_module import Failed
from headscale_server import HeadscaleServer

from lab import tools
from tests.modules.conftest import At

OLD = tools.Tool("headscale-0.25")

pytestmark = pytest.mark.skipif(not OLD.built, reason="run make test-headscale-old")


@pytest.fixture(scope="module")
def old_server() -> Iterator[HeadscaleServer]:
    home = Path(tempfile.mkdtemp(prefix="hct-"))
    server = HeadscaleServer(home, OLD)
    try:
        server.start()
        server.key = server.make_key()
        yield server
    finally:
        server.stop()
        shutil.rmtree(home)


@pytest.fixture
def old(old_server) -> HeadscaleServer:
    old_server.forget()
    return old_server


@pytest.fixture
def at(old) -> At:
    return At(old)


def enabled(server: HeadscaleServer, name: str) -> set[str]:
    return {
        route["prefix"]
        for route in server.ask("GET", "routes")["routes"]
        if route["enabled"] and route["node"]["givenName"] == name
    }


def test_it_is_known_for_what_it_is(at):
    assert at("info")["version"] == "0.24"  # of the API, which is that of 0.24


def test_routes_are_approved_and_withdrawn_and_others_stay(at, old):
    own, other = "10.244.1.0/24", "192.168.7.0/24"
    old.add_node("node1", "headcni", own, other)
    old.add_node("node2", "headcni", "10.244.2.0/24")
    nodes = [
        {"name": "node1", "routes": [own]},
        {"name": "node2", "routes": ["10.244.2.0/24"]},
    ]
    done = at.twice("routes", nodes=nodes)
    assert done["diff"]["after"] == {"node1": [own], "node2": ["10.244.2.0/24"]}
    assert (enabled(old, "node1"), enabled(old, "node2")) == ({own}, {"10.244.2.0/24"})
    at.twice("routes", nodes=[{"name": "node1", "routes": [other]}])
    assert enabled(old, "node1") == {own, other}
    at.twice("routes", nodes=[{"name": "node1", "routes": [own]}], state="absent")
    assert enabled(old, "node1") == {other}
    at.twice("routes", nodes=[{"name": "node1", "routes": [own]}], purge=True)
    assert enabled(old, "node1") == {own}


def test_check_mode_approves_nothing(at, old):
    old.add_node("node1", "headcni", "10.244.1.0/24")
    nodes = [{"name": "node1", "routes": ["10.244.1.0/24"]}]
    assert at("routes", check=True, nodes=nodes)["changed"]
    assert enabled(old, "node1") == set()


def test_the_same_range_for_two_nodes_is_refused(at, old):
    old.add_node("node1", "headcni", "10.244.1.0/24")
    old.add_node("node2", "headcni", "10.244.0.0/16")
    at("routes", nodes=[{"name": "node2", "routes": ["10.244.0.0/16"]}])
    with pytest.raises(Failed, match=r"for node1 overlaps 10\.244\.0\.0/16 of node node2"):
        at("routes", nodes=[{"name": "node1", "routes": ["10.244.1.0/24"]}])


def test_a_route_that_was_never_advertised_cannot_be_approved_and_the_error_says_why(at, old):
    old.add_node("node1")
    nodes = [{"name": "node1", "routes": ["10.244.1.0/24"]}]
    with pytest.raises(
        Failed, match=r"approves only what a node has advertised, .*: node1 10\.244\.1\.0/24; wait"
    ):
        at("routes", nodes=nodes, wait_served=1)


def test_a_node_that_advertises_nothing_does_not_keep_the_others_from_their_routes(at, old):
    old.add_node("node1")
    old.add_node("node2", "headcni", "10.244.2.0/24")
    nodes = [{"name": f"node{n}", "routes": [f"10.244.{n}.0/24"]} for n in (1, 2)]
    done = at("routes", nodes=nodes, problems="report")
    assert list(done["problems"]) == ["node1"]
    assert "this one has not: node1 10.244.1.0/24; wait" in done["problems"]["node1"]
    assert set(done["diff"]["after"]) == {"node2"}
    assert enabled(old, "node2") == {"10.244.2.0/24"}


def test_users_are_made_renamed_and_removed(at, old):
    at.twice("user", name="headcni")
    at.twice("user", name="kubernetes", renamed_from="headcni")
    old.add_node("node1", "kubernetes")
    with pytest.raises(Failed, match="owns 1 nodes"):
        at("user", name="kubernetes", state="absent")
    at.twice("user", name="kubernetes", state="absent", remove_nodes=True)
    assert old.users == {}


def test_keys_are_minted_and_expired_but_not_deleted(at, old):
    old.add_user("headcni")
    made = at("preauth_key", user="headcni", tags=["tag:k8s"], reusable=True)
    assert made["key"]
    done = at.twice("preauth_key", state="expired", user="headcni", id=made["id"])
    assert [key["id"] for key in done["keys"]] == [made["id"]]
    (held,) = old.ask("GET", "preauthkey?user=headcni")["preAuthKeys"]
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


def test_nodes_are_renamed_tagged_and_removed(at, old):
    old.add_node("node1")
    done = at.twice("node", name="node1", new_name="rack", tags=["tag:k8s"])
    assert done["node"]["tags"] == ["tag:k8s"]
    assert old.nodes["rack"]["forcedTags"] == ["tag:k8s"]
    at("node", name="rack", expiry="now")
    assert not at("node", name="rack", expiry="now")["changed"]
    with pytest.raises(Failed, match=r"expiry: never, and Headscale 0.24 cannot take"):
        at("node", name="rack", expiry="never")
    at.twice("node", name="rack", state="absent")


def test_a_policy_made_anew_still_allows_everything(at, old):
    at.twice("policy", routes={"10.244.0.0/16": ["tag:k8s"]}, tag_owners={"tag:k8s": ["headcni"]})
    assert '"acls"' in old.policy and '"*:*"' in old.policy
    at.twice("policy", routes={"10.244.0.0/16": ["tag:k8s"]}, state="absent")
    assert "10.244.0.0/16" not in old.policy


def test_a_real_node_is_waited_for_until_it_advertises_and_serves(at, old, tailscaleds):
    old.add_user("headcni")
    key = at("preauth_key", user="headcni")["key"]
    node = tailscaleds()
    node_key = node.join(old.url, key, "alpha")
    later = threading.Timer(3, node.tailscale, ["set", "--advertise-routes=10.244.1.0/24"])
    later.start()
    nodes = [{"node_key": node_key, "routes": ["10.244.1.0/24"]}]
    assert at("routes", nodes=nodes, wait_served=30)["changed"]
    later.join()
    (route,) = at("info", gather=["nodes"])["routes"]
    assert (route["advertised"], route["approved"], route["served"]) == (True, True, True)
