"""The table that site.yml ends with."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.filter.node_summary import summary

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
