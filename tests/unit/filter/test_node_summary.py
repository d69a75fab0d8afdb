"""The table that site.yml ends with."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.filter.node_summary import summary

CONFIGURED = {"mode": "host", "pod_cidr_source": "hash", "pod_cidr_guessed": True}


def test_a_line_for_each_node():
    known = {
        "node1": {
            "headcni_node_pod_cidrs": ["10.1.1.0/24", "fd00:1::/64"],
            "_headcni_node_configured": CONFIGURED,
            "_headcni_node_release": {"current": {"version": "0.1.0"}},
            "_headcni_node_service": {"conditions": [{"name": "store", "ok": True}]},
        }
    }
    assert summary(["node1", "node2"], known, ["node1"]) == [
        "node   mode  pod CIDR                  from            runtime  state",
        "node1  host  10.1.1.0/24, fd00:1::/64  hash (a guess)  0.1.0    ready",
        "node2                                                           NOT FINISHED: see above",
    ]


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
