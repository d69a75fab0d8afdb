"""The table of status.yml."""

from __future__ import annotations

from ansible_collections.headcni.mesh.plugins.filter.status_lines import of_hosts

WELL = {
    "ready": True,
    "mode": "daemon",
    "version": "0.4.0",
    "attachments": 3,
    "conditions": [],
    "pools": [],
    "peers": {"direct": 1, "peer-relay": 0, "derp": 0, "idle": 0, "none": 0},
    "key_expires": 0,
    "firewalls": [],
    "drift": {"repaired": {"routes": 2}, "last": 1.0},
    "alarms": [],
}


def test_a_node_that_did_not_answer_comes_first_with_the_reason():
    hostvars = {
        "a": {"headcni_status": {"status": WELL, "problem": ""}},
        "b": {"headcni_status": {"status": {}, "problem": "headcni-daemon does not answer"}},
        "c": {"headcni_status": {"unreachable": True, "msg": "no route to host"}},
    }
    found = of_hosts(["a", "b", "c"], hostvars)
    assert [line.split()[0] for line in found["lines"][:4]] == ["NODE", "b", "c", "a"]
    assert found["bad"] == ["b", "c"]
    assert "1 of 3 nodes are ready" in found["lines"]
    assert "b: headcni-daemon does not answer" in found["lines"]
    assert "c: it cannot be reached: see above" in found["lines"]
    assert found["nodes"]["a"] == WELL


def test_all_nodes_are_ready():
    found = of_hosts(["a"], {"a": {"headcni_status": {"status": WELL}}})
    assert found["bad"] == []
    assert found["lines"][-1] == "1 of 1 nodes are ready"
    assert found["lines"][1].split() == [
        *("a", "yes", "daemon", "0.4.0", "3", "0%", "1", "direct", "never", "-", "2"),
    ]
