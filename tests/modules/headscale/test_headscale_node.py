"""Nodes at a real Headscale: renamed, tagged, expired, removed."""

from __future__ import annotations

import pytest
from ansible_module import Failed, run
from headscale_server import VERSION, from_headscale
from stub_server import says, stub_server

pytestmark = from_headscale(0, 26)


def test_a_node_is_renamed_once_whatever_it_is_found_by(at, headscale):
    made = headscale.add_node("node1")
    for number, which in enumerate(
        ({"id": made["id"]}, {"node_key": made["nodeKey"]}, {"name": "node1"})
    ):
        done = at.twice("node", new_name=f"rack-{number}", **which)
        assert list(headscale.nodes) == [f"rack-{number}"]
        assert done["node"]["name"] == f"rack-{number}"
    before, after = done["diff"]["before"], done["diff"]["after"]
    assert (before["name"], after["name"]) == ("rack-1", "rack-2")


def test_a_renamed_node_is_found_by_its_new_name_too(at, headscale):
    headscale.add_node("node1")
    at("node", name="node1", new_name="rack")
    assert at("node", name="rack", new_name="rack-2")["changed"]
    assert not at("node", name="rack", new_name="rack-2")["changed"]


@pytest.mark.parametrize("check", [True, False])
def test_a_name_that_another_node_has_is_refused(at, headscale, check):
    headscale.add_node("node1")
    two = headscale.add_node("node2")
    with pytest.raises(Failed, match=rf"'node2' is the name of node node2 \(id {two['id']}\)"):
        at("node", check=check, name="node1", new_name="node2")


@pytest.mark.parametrize("state", ["present", "absent"])
def test_a_name_that_two_nodes_have_is_refused_with_their_ids(at, headscale, state):
    one, two = headscale.add_node("node1"), headscale.add_node("node1")
    with pytest.raises(
        Failed,
        match=rf"'node1' is ambiguous: id {one['id']} \(node1, offline\), "
        rf"id {two['id']} \({two['givenName']}, offline\); give the id",
    ):
        at("node", name="node1", state=state)
    assert len(headscale.nodes) == 2
    assert at("node", name=two["givenName"], state="absent")["changed"]
    assert list(headscale.nodes) == ["node1"]


def test_tags_are_set_if_the_policy_has_them(at, headscale):
    headscale.add_node("node1")
    at("policy", tag_owners={"tag:k8s": [], "tag:gpu": []})
    done = at.twice("node", name="node1", tags=["tag:k8s", "tag:gpu"])
    assert done["diff"]["after"]["tags"] == ["tag:gpu", "tag:k8s"]
    held = "tags" if VERSION >= (0, 28) else "forcedTags"
    assert set(headscale.nodes["node1"][held]) == {"tag:k8s", "tag:gpu"}
    at.twice("node", name="node1", tags=["tag:k8s"])
    assert headscale.nodes["node1"][held] == ["tag:k8s"]


@from_headscale(0, 28)
@pytest.mark.parametrize("check", [True, False])
def test_tags_that_headscale_would_refuse_are_refused_with_what_to_do(at, headscale, check):
    headscale.add_node("node1")
    with pytest.raises(Failed, match="tags: tag:unknown not in the policy's tagOwners: add it"):
        at("node", check=check, name="node1", tags=["tag:unknown"])
    at("policy", tag_owners={"tag:k8s": []})
    at("node", name="node1", tags=["tag:k8s"])
    with pytest.raises(Failed, match="tags: empty, and Headscale takes away no node's last tag"):
        at("node", check=check, name="node1", tags=[])


def test_a_node_expires_once(at, headscale):
    headscale.add_node("node1")
    predicted = at("node", check=True, name="node1", expiry="now")
    done = at("node", name="node1", expiry="now")
    assert predicted["changed"] and done["changed"]
    assert done["diff"]["after"]["expiry"]
    assert not at("node", name="node1", expiry="now")["changed"]


def test_a_node_may_be_told_never_to_expire(at, headscale):
    headscale.add_node("node1")
    at("node", name="node1", expiry="now")
    if VERSION < (0, 29):
        with pytest.raises(Failed, match=r"expiry: never, and Headscale 0\.\S+ cannot take an"):
            at("node", name="node1", expiry="never")
    else:
        at.twice("node", name="node1", expiry="never")
        assert headscale.nodes["node1"]["expiry"] is None


def test_artis3n_400_a_node_that_a_machine_left_behind_is_removed(at, headscale):
    stale = headscale.add_node("node1")
    headscale.add_node("node1")
    at.twice("node", id=stale["id"], state="absent")
    assert [node["id"] for node in headscale.nodes.values()] != [stale["id"]]
    assert len(headscale.nodes) == 1


def test_a_node_that_is_not_there_is_an_error_unless_it_should_not_be(at, headscale):
    for which in ({"name": "nobody"}, {"id": "999"}, {"node_key": "nodekey:0"}):
        with pytest.raises(Failed, match=r"Headscale has no node '.*'; see that it has joined"):
            at("node", **which, new_name="somebody")
        assert not at("node", **which, state="absent")["changed"]


def test_many_nodes_are_removed_with_one_listing(at, headscale, counted):
    keys = [headscale.add_node(f"node{number}")["nodeKey"] for number in range(4)]
    stays = headscale.add_node("stays")
    unknown = "nodekey:" + "0" * 64
    counted.clear()
    foretold = at("node", check=True, node_keys=[*keys, unknown], state="absent")
    assert len(headscale.nodes) == 5
    done = at("node", node_keys=[*keys, unknown], state="absent")
    assert (foretold["changed"], foretold["diff"]) == (done["changed"], done["diff"])
    assert done["changed"] and done["problems"] == {}
    assert list(headscale.nodes) == [stays["givenName"]]
    assert [one for one in counted if one == "GET /api/v1/node"] == ["GET /api/v1/node"] * 2
    assert [one.split()[0] for one in counted].count("DELETE") == 4
    again = at("node", node_keys=keys, state="absent")
    assert (again["changed"], again["diff"]) == (False, {"before": {}, "after": {}})


def test_many_nodes_can_only_be_removed(at, headscale):
    with pytest.raises(Failed, match="node_keys: only with state=absent"):
        at("node", node_keys=[headscale.add_node("node1")["nodeKey"]])
    with pytest.raises(Failed, match="mutually exclusive"):
        at("node", node_keys=[], name="node1", state="absent")


@pytest.mark.parametrize("problems", ["fail", "report"])
def test_a_node_that_cannot_be_removed_does_not_keep_the_others(problems):
    keys = {"nodekey:01": "1", "nodekey:02": "2"}
    nodes = [{"id": number, "nodeKey": key, "name": number} for key, number in keys.items()]
    with stub_server() as stub:
        stub.paths = {
            "GET /api/v1/node": says(
                200, {"nodes": [{**one, "approvedRoutes": []} for one in nodes]}
            ),
            "DELETE /api/v1/node/1": says(500, {"code": 13, "message": "database is locked"}),
            "DELETE /api/v1/node/2": says(200, {}),
        }
        stub.answers = [says(404, {})]
        given = {"node_keys": list(keys), "state": "absent", "problems": problems}
        try:
            result = run("headscale_node", url=stub.url, api_key="hskey-api-x", **given)
            assert problems == "report"
        except Failed as failed:
            assert problems == "fail"
            result = failed.result
            assert "1 of 2 nodes could not be removed" in result["msg"]
    assert "database is locked" in result["problems"]["nodekey:01"]
    assert list(result["problems"]) == ["nodekey:01"]
    assert list(result["diff"]["before"]) == ["2"]
