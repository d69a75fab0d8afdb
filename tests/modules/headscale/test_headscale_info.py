"""What can be read of a real Headscale."""

from __future__ import annotations

import json

import pytest
from headscale_server import HEADSCALE, VERSION, from_headscale

from lab import tools

pytestmark = from_headscale(0, 26)


def test_the_version_users_nodes_and_routes_are_read(at, headscale):
    made = headscale.add_node("node1")
    headscale.add_node("node2", "other")
    headscale.approve(made, "10.244.1.0/24")
    found = at("info")
    assert found["version"] in (tools.headscale_version(HEADSCALE), "0.26")  # 0.26 does not say
    assert {user["name"] for user in found["users"]} == {"headcni", "other"}
    assert [node["name"] for node in found["nodes"]] == ["node1", "node2"]
    assert found["nodes"][0]["node_key"] == made["nodeKey"]
    assert found["routes"] == [
        {
            "route": "10.244.1.0/24",
            "node": "node1",
            "id": made["id"],
            "advertised": False,
            "approved": True,
            "served": False,
        }
    ]
    assert abs(found["clock_skew"]) <= 2
    assert (found["changed"], at("info", check=True)["nodes"]) == (False, found["nodes"])


@pytest.mark.parametrize(
    ("which", "names"),
    [
        ({"user": "other"}, ["node2"]),
        ({"name": "node1"}, ["node1"]),
        ({"name": "nobody"}, []),
        ({"online": True}, []),
        ({"online": False}, ["node1", "node2"]),
        ({"tag": "tag:k8s"}, []),
    ],
)
def test_nodes_are_filtered(at, headscale, which, names):
    headscale.add_node("node1")
    headscale.add_node("node2", "other")
    assert [node["name"] for node in at("info", gather=["nodes"], **which)["nodes"]] == names


def test_only_what_is_asked_for_is_asked_of_the_server(at, headscale, counted):
    counted.clear()
    found = at("info", gather=["nodes"])
    assert counted == ["GET /api/v1/node"]
    assert "version" not in found and "users" not in found
    counted.clear()
    at("info", gather=["version"])
    # The key is tried all the same. Before 0.27 only the description of the API has a version.
    older = ["GET /swagger/v1/openapiv2.json"] if VERSION < (0, 27) else []
    assert counted == ["GET /api/v1/user", "GET /version", *older]


def test_no_key_is_in_the_answer(at, headscale, tailscaleds):
    key = at.tagged_key("tag:k8s")
    tailscaleds().join(headscale.url, key, "alpha")
    assert "hskey" not in json.dumps(at("info"))
