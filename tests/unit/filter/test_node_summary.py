"""The table that site.yml ends with."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.filter.node_summary import (
    ANNOTATION,
    RIGHTS,
    summary,
)

CONFIGURED = {
    "mode": "host",
    "pod_cidrs": ["10.1.1.0/24", "fd00:1::/64"],
    "pod_cidr_source": "hash",
    "pod_cidr_guessed": True,
}
FOUND = {
    "mode": "daemon",
    "pod_cidrs": ["10.1.2.0/24"],
    "pod_cidr_source": "config",
    "current": {"version": "0.2.0"},
}


def test_a_line_for_each_node():
    known = {
        "node1": {
            "headcni_node_preflight": FOUND,
            "headcni_node_configured": CONFIGURED,
            "_headcni_node_release": {"current": {"version": "0.1.0"}},
            "_headcni_node_service": {"conditions": [{"name": "store", "ok": True}]},
        }
    }
    assert summary(["node1", "node2"], known, ["node1"]) == [
        "node   mode  pod CIDR                  from            runtime  state",
        "node1  host  10.1.1.0/24, fd00:1::/64  hash (a guess)  0.1.0    ready",
        "node2                                                           NOT FINISHED: see above",
        "Good to know:",
        f"- node1: {RIGHTS}",
        f"- node1: {ANNOTATION}",
    ]


def test_of_a_node_that_needed_nothing_it_is_what_preflight_found():
    skipped = {"changed": False, "skipped": True}
    known = {"headcni_node_preflight": FOUND, "_headcni_node_release": skipped}
    assert summary(["node1"], {"node1": known}, ["node1"])[1] == (
        "node1  daemon  10.1.2.0/24  config  0.2.0    as asked for by tags"
    )


@pytest.mark.parametrize(
    ("known", "state"),
    [
        ({"_headcni_node_service": {"action": "started"}, "ansible_check_mode": True}, "would be"),
        ({"_headcni_node_service": {"action": "none"}}, "running"),
        ({}, "as asked for by tags"),
    ],
)
def test_what_is_said_of_a_node_that_is_done(known, state):
    assert state in summary(["a"], {"a": known}, ["a"])[1]


RUNS = {"_headcni_node_service": {"conditions": [{"name": "store", "ok": True}]}}


def test_defaults_that_somebody_might_not_expect_are_told_where_they_apply():
    known = {
        "a": RUNS,
        "b": {**RUNS, "headcni_node_tailnet_access": "pods"},
        "c": {**RUNS, "headcni_node_ip_annotation_namespaces": ["shop"]},
        "d": {**RUNS, "headcni_node_extra_config": {"network": {"tailnetAccess": "pods"}}},
    }
    assert shown(known) == ["Good to know:", f"- a, c: {RIGHTS}", f"- a, b, d: {ANNOTATION}"]


def test_nothing_is_told_where_the_operator_has_decided():
    chosen = {
        "headcni_node_tailnet_access": ["100.64.0.7:443"],
        "headcni_node_ip_annotation_namespaces": ["*"],
    }
    assert shown({"a": {**RUNS, **chosen}}) == []


def noted(*notes: str) -> dict:
    return {"headcni_node_preflight": {**FOUND, "notes": list(notes)}}


def shown(known: dict) -> list[str]:
    lines = summary(list(known), known, list(known))
    return lines[1 + len(known) :]


def test_warnings_follow_with_the_nodes_that_they_are_about():
    known = {
        "node1": noted("firewall: ufw is active", "clock: nobody keeps it"),
        "node2": noted("clock: nobody keeps it"),
        "node3": {},  # it was not reached
    }
    assert shown(known) == [
        "Warnings:",
        "- node1: firewall: ufw is active",
        "- node1, node2: clock: nobody keeps it",
    ]


def test_a_warning_of_a_thousand_nodes_is_one_line():
    known = {f"node{at}": noted(*("same", "half")[: 2 if at < 500 else 1]) for at in range(1000)}
    assert shown(known) == [
        "Warnings:",
        "- all 1000 nodes: same",
        "- node0, node1, node2 and 497 more: half",
    ]


def test_warnings_that_no_two_nodes_share_do_not_fill_the_screen():
    known = {f"node{number}": noted(f"only {number}") for number in range(1000)}
    lines = shown(known)
    assert len(lines) == 42
    assert lines[-1] == "- 960 more: see headcni_node_preflight.notes of each node"


def test_what_headscale_was_asked_about_is_shown_once():
    known = {name: {**noted(), "headscale_routes_notes": ["the policy"]} for name in ("a", "b")}
    assert shown(known) == ["Warnings:", "- Headscale: the policy"]


def test_routes_to_the_nodes_own_networks_are_shown_too():
    clashes = {"b": {"problems": [], "notes": ["the LAN"]}}
    known = {name: {**noted("x"), "headcni_route_clashes": clashes} for name in ("a", "b")}
    assert shown(known) == ["Warnings:", "- all 2 nodes: x", "- b: the LAN"]


def test_one_node_is_called_by_its_name():
    assert shown({"node1": noted("x")}) == ["Warnings:", "- node1: x"]
    known = {name: noted("x") for name in ("a", "b", "c", "d")} | {"e": noted()}
    assert shown(known) == ["Warnings:", "- a, b, c, d: x"]


def test_whether_a_node_is_finished_is_not_looked_for_in_the_whole_list_each_time():
    """Ansible's lists compare one by one: for a thousand nodes a million times."""

    class Counted(list):
        searches = 0

        def __contains__(self, item):
            Counted.searches += 1
            return super().__contains__(item)

    names = [f"node{number}" for number in range(50)]
    lines = summary(names, {}, Counted(names))
    assert len(lines) == 51 and not any("NOT FINISHED" in line for line in lines)
    assert Counted.searches == 0
