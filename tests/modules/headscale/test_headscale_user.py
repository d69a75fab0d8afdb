"""Users at a real Headscale."""

from __future__ import annotations

import pytest
from ansible_module import Failed
from headscale_server import from_headscale

pytestmark = from_headscale(0, 26)


def test_a_user_is_made_once(at, headscale):
    done = at.twice("user", name="headcni")
    assert done["user"] == {"id": headscale.users["headcni"]["id"], "name": "headcni"}
    assert done["diff"] == {"before": {}, "after": {"name": "headcni"}}


def test_check_mode_makes_none(at, headscale):
    assert at("user", check=True, name="headcni")["changed"]
    assert headscale.users == {}


def test_a_user_is_renamed_with_its_nodes(at, headscale):
    headscale.add_node("node1", "old")
    number = headscale.users["old"]["id"]
    done = at.twice("user", name="new", renamed_from="old")
    assert done["diff"] == {"before": {"name": "old"}, "after": {"name": "new"}}
    assert (done["user"]["id"], list(headscale.users)) == (number, ["new"])
    # A node's listing may have the old name still; whose it is is known all the same.
    with pytest.raises(Failed, match=r"'new' owns 1 nodes: node1"):
        at("user", name="new", state="absent")


def test_a_rename_onto_another_user_is_refused(at, headscale):
    headscale.add_user("old")
    headscale.add_user("new")
    with pytest.raises(Failed, match="'old' is there, and so is 'new'"):
        at("user", name="new", renamed_from="old")


def test_a_user_goes_and_a_second_time_it_is_gone(at, headscale):
    headscale.add_user("headcni")
    done = at.twice("user", name="headcni", state="absent")
    assert (done["changed"], headscale.users) == (True, {})


@pytest.mark.parametrize("check", [True, False])
def test_a_user_with_nodes_stays_unless_told_otherwise(at, headscale, check):
    headscale.add_node("node1")
    headscale.add_node("node2")
    with pytest.raises(Failed, match=r"owns 2 nodes: node1 \(id \d+\), node2 \(id \d+\); remove"):
        at("user", check=check, name="headcni", state="absent")
    assert len(headscale.nodes) == 2


def test_a_user_goes_with_its_own_nodes_if_told_so(at, headscale):
    headscale.add_node("node1", "headcni")
    headscale.add_node("node2", "other")
    done = at.twice("user", name="headcni", state="absent", remove_nodes=True)
    assert len(done["removed_nodes"]) == 1
    assert (list(headscale.nodes), list(headscale.users)) == (["node2"], ["other"])
