"""The matrix that verify.yml ends with."""

from __future__ import annotations

from ansible_collections.headcni.mesh.plugins.filter.probe_matrix import matrix, of_hosts

GOOD = {"ok": True, "detail": "0.9 ms"}
BAD = {"ok": False, "detail": "10.1.2.3: no answer in 15 s"}
SKIPPED = {"ok": None, "detail": "pods have no nameserver of the tailnet's"}


def reached(*others, **checks):
    return {"results": {other: {"v4": GOOD, "dns": SKIPPED, **checks} for other in others}}


def test_all_is_well():
    shown = matrix({"node1": reached("node2"), "node2": reached("node1")})
    assert shown["failed"] == 0
    assert shown["lines"] == [
        "from \\ to  node1      node2",
        "node1      -          ok 0.9 ms",
        "node2      ok 0.9 ms  -",
        "",
        "checked from each pod: v4",
        "not checked: dns: pods have no nameserver of the tailnet's",
        "every pod reaches every other",
    ]


def test_a_red_cell_names_its_checks_and_has_a_line_below():
    shown = matrix({"node1": reached("node2", mtu4=BAD, port=BAD), "node2": reached("node1")})
    assert "FAIL mtu4 port" in shown["lines"][1]
    assert "node1 -> node2: mtu4: 10.1.2.3: no answer in 15 s" in shown["lines"]
    assert "every pod reaches every other" not in shown["lines"]
    assert shown["failed"] == 2


def test_a_node_without_a_probe_is_red():
    shown = matrix({"node1": reached("node2"), "node2": {"problem": "unreachable"}})
    assert shown["lines"][2] == "node2      NONE   NONE"
    assert "node2: unreachable" in shown["lines"]
    assert shown["failed"] == 1


def test_one_node_has_nobody_to_reach():
    assert matrix({"node1": {"results": {}}})["failed"] == 0


def test_nodes_that_failed_or_were_not_reached_are_in_it_too():
    known = {
        "node1": {"headcni_probed": {"reached": reached("node2")["results"]}},
        "node2": {"headcni_probe_problem": "there is no conflist"},
    }
    shown = of_hosts(["node1", "node2", "node3"], known)
    assert "node2: there is no conflist" in shown["lines"]
    assert "node3: it cannot be reached" in shown["lines"]
    assert shown["failed"] == 2
