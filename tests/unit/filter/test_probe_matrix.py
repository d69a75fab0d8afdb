"""What verify.yml ends with."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from ansible_collections.headcni.mesh.plugins.filter.probe_matrix import (
    LATENCIES,
    MOST_LINES,
    NEXT,
    NODE_CHECKS,
    PAIR_CHECKS,
    SAME,
    matrix,
    of_hosts,
)
from ansible_collections.headcni.mesh.plugins.module_utils.pair_choice import chosen

GOOD = {"ok": True, "detail": "0.9 ms"}
BAD = {"ok": False, "detail": "10.1.2.3: no answer in 15 s"}
SKIPPED = {"ok": None, "detail": "pods have no nameserver of the tailnet's"}
DIRECT = {"kind": "direct", "through": "192.168.7.12:41641", "ms": 0.8}
RELAYED = {"kind": "relayed", "through": "DERP region lab (999)", "ms": 12.0}
RUNTIME = {"ok": True, "detail": "containerd"}
NO_CRICTL = {"ok": None, "detail": "there is no crictl on this node: install crictl"}


def reached(*others, beyond=None, runtime=None, **checks):
    return {
        "results": {other: {"v4": GOOD, "dns": SKIPPED, **checks} for other in others},
        "targets": others,
        "beyond": beyond or {},
        "runtime": runtime,
    }


def test_all_is_well():
    shown = matrix(
        {
            "node1": reached("node2", path=DIRECT, runtime=RUNTIME, beyond={"outside": GOOD}),
            "node2": reached("node1", path=RELAYED, runtime=NO_CRICTL, beyond={"outside": GOOD}),
        }
    )
    assert shown["failed"] == 0
    lines = shown["lines"]
    assert lines[:12] == [
        "from \\ to  node1              node2",
        "node1      -                  ok 0.9 ms direct",
        "node2      ok 0.9 ms relayed  -",
        "",
        "node   pod made by  outside",
        "node1  containerd   ok",
        "node2  plugins      ok",
        "",
        "pair            path     latency  through",
        "node1 -> node2  direct   0.8 ms   192.168.7.12:41641",
        "node2 -> node1  relayed  12.0 ms  DERP region lab (999)",
        "",
    ]
    assert lines[12] == "checked from each pod: v4, runtime, outside"
    assert lines[13].startswith("a relayed path is slower: let UDP through between the nodes")
    assert lines[14:] == [
        "not checked: dns: pods have no nameserver of the tailnet's (all 2 nodes)",
        "not checked: runtime: there is no crictl on this node: install crictl (node2)",
        "every pod reaches every other",
    ]


def test_a_red_cell_names_its_checks_and_has_a_line_below_and_what_to_do_next():
    shown = matrix({"node1": reached("node2", mtu4=BAD, port=BAD), "node2": reached("node1")})
    assert "FAIL mtu4 port" in shown["lines"][1]
    assert "node1 -> node2: mtu4: 10.1.2.3: no answer in 15 s" in shown["lines"]
    assert f"next, for mtu4: {NEXT['mtu4']}" in shown["lines"]
    assert f"next, for port: {NEXT['port']}" in shown["lines"]
    assert "every pod reaches every other" not in shown["lines"]
    assert shown["failed"] == 2


def test_every_check_that_can_fail_names_what_to_do_next():
    """The runtime's own failure is a problem of its node, and its message says what to do."""
    for check in {*PAIR_CHECKS, *NODE_CHECKS} - {"runtime"}:
        assert NEXT[SAME.get(check, check)]


def test_what_a_node_does_not_reach_outside_is_red():
    beyond = {"outside": BAD, "service": GOOD, "cluster_dns": BAD}
    shown = matrix({"node1": reached("node2", beyond=beyond), "node2": reached("node1")})
    assert shown["failed"] == 2
    assert "node1: outside: 10.1.2.3: no answer in 15 s" in shown["lines"]
    assert "node   pod made by  outside  service  cluster_dns" in shown["lines"]
    assert "node1  plugins      FAIL     ok       FAIL" in shown["lines"]
    assert f"next, for cluster_dns: {NEXT['cluster_dns']}" in shown["lines"]


def test_a_node_without_a_probe_is_red():
    shown = matrix({"node1": reached(), "node2": {"problem": "unreachable"}})
    assert shown["lines"][2] == "node2      NONE   NONE"
    assert "node2: unreachable" in shown["lines"]
    assert shown["failed"] == 1


def test_a_pair_that_was_to_be_tested_and_has_no_ping_is_red():
    """Neither a result that is missing nor a pod without addresses may look like success."""
    lacking = {"results": {}, "targets": ("node2",)}
    shown = matrix({"node1": lacking, "node2": reached("node1")})
    assert "node1 -> node2: no ping was tried" in shown["lines"] and shown["failed"] == 1
    silent = {"results": {"node2": {"route": GOOD}}, "targets": ("node2",)}
    shown = matrix({"node1": silent, "node2": reached("node1")})
    assert shown["lines"][1] == "node1      -          NONE" and shown["failed"] == 1


def test_one_node_has_nobody_to_reach():
    assert matrix({"node1": reached()})["failed"] == 0


def test_nodes_that_failed_or_were_not_reached_are_in_it_too():
    known = {
        "node1": {"headcni_probed": {"reached": reached("node2")["results"]}},
        "node2": {"headcni_probe_problem": "there is no conflist"},
    }
    shown = of_hosts(["node1", "node2", "node3"], known, {})
    assert "node2: there is no conflist" in shown["lines"]
    assert "node3: it cannot be reached" in shown["lines"]
    assert shown["failed"] == 2


def fleet(size, every=False, **checks):
    targets = chosen([f"node{number}" for number in range(size)], every)
    return {name: reached(*others, **checks) for name, others in targets.items()}


def test_above_twenty_nodes_there_are_totals_and_failures_only():
    found = fleet(100, path=DIRECT)
    others = found["node7"]["results"]
    others["node8"] = {"v4": BAD, "path": RELAYED}
    shown = matrix(found)
    assert shown["failed"] == 1
    assert shown["lines"][:4] == [
        "",
        "checked from each pod: v4",
        "1,200 of 9,900 pairs were tested, each in both directions "
        "(-e headcni_verify_all=true tests all)",
        "paths: 1,199 direct, 1 relayed",
    ]
    assert [line for line in shown["lines"] if "node" in line and "->" in line] == [
        "node7 -> node8: v4: 10.1.2.3: no answer in 15 s"
    ]


def test_a_sample_without_failures_does_not_claim_more_than_was_tested():
    assert matrix(fleet(30))["lines"][-1] == "every pod that was asked has answered"
    shown = matrix(fleet(30, every=True))["lines"]
    assert "all 870 pairs were tested" in shown and shown[-1] == "every pod reaches every other"


def test_a_thousand_failures_are_counted_and_not_all_shown():
    shown = matrix(fleet(100, v4=BAD))
    assert shown["failed"] == 1200
    assert f"{1200 - MOST_LINES:,} more failures" in shown["lines"]
    assert len(shown["lines"]) < MOST_LINES + 20


LOSS = {"ok": True, "detail": "1 of 20 pings were lost", "percent": 5.0, "ms": 1.26}
SENT = {"ok": True, "detail": "945 Mbit/s", "mbit": 945.2}
FULL = {"mtu4": GOOD, "mtu": 1280, "loss": LOSS, "throughput": SENT}


def test_a_pair_has_its_latency_loss_mtu_and_throughput():
    shown = matrix(
        {
            "node1": reached("node2", path=DIRECT, **FULL),
            "node2": reached("node1", path=RELAYED, mtu4=BAD, mtu=1280),
        }
    )
    start = next(at for at, line in enumerate(shown["lines"]) if line.startswith("pair"))
    assert shown["lines"][start : start + 3] == [
        "pair            path     latency  loss  MTU   throughput  through",
        "node1 -> node2  direct   1.3 ms   5 %   1280  945 Mbit/s  192.168.7.12:41641",
        "node2 -> node1  relayed  12.0 ms                          DERP region lab (999)",
    ]
    assert shown["pairs"][0] == {
        "from": "node1",
        "to": "node2",
        "path": "direct",
        "through": "192.168.7.12:41641",
        "latency_ms": 1.26,
        "loss_percent": 5.0,
        "mtu": 1280,
        "throughput_mbit": 945.2,
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 12, 20])
@pytest.mark.parametrize("name", ["n{}", "node{}", "a-very-long-name-of-a-machine-{}.example.com"])
@pytest.mark.parametrize("path", [DIRECT, RELAYED, {**DIRECT, "through": "[2001:db8::7:12]:41641"}])
def test_the_tables_are_at_most_80_columns_wide(size, name, path):
    names = [name.format(number) for number in range(1, size + 1)]
    found = {one: reached(*others, path=path, **FULL) for one, others in chosen(names).items()}
    lines = matrix(found)["lines"]
    tables = lines[: next(at for at, line in enumerate(lines) if line.startswith("checked"))]
    assert max(map(len, tables)) <= 80, max(tables, key=len)


def test_a_matrix_of_many_nodes_has_numbers_and_latencies_and_a_legend():
    found = fleet(8, path=DIRECT, **FULL)
    found["node3"]["results"]["node5"]["v4"] = BAD
    found["node1"]["results"]["node2"] = {"v4": GOOD, "path": RELAYED}
    found["node7"] = {"problem": "unreachable"}
    lines = matrix(found)["lines"]
    assert lines[0] == "to        1   2   3   4   5   6   7   8"
    assert lines[1] == "1 node0   - 1.3 1.3 1.3 1.3 1.3 1.3 1.3"
    assert lines[2].startswith("2 node1 1.3   - 12r 1.3")
    assert lines[4].split()[7] == "X"
    assert lines[8].split()[2:] == ["?"] * 8
    assert lines[9] == LATENCIES


def test_every_check_of_every_pair_is_a_case_of_the_junit_file():
    found = {
        "node1": reached("node2", mtu4=BAD, loss=LOSS, beyond={"outside": GOOD}),
        "node2": {"problem": "it cannot be reached <&>\x1b"},
        "node3": {"results": {}, "targets": ("node1",)},
    }
    made = matrix(found)
    top = ElementTree.fromstring(made["junit"])
    cases = {(one.get("classname"), one.get("name")): one for one in top.iter("testcase")}
    assert list(cases) == [
        ("headcni.node1", "pod"),
        ("headcni.node1", "outside"),
        ("headcni.node2", "pod"),
        ("headcni.node3", "pod"),
        ("headcni.node3 -> node1", "ping"),
        ("headcni.node1 -> node2", "v4"),
        ("headcni.node1 -> node2", "mtu4"),
        ("headcni.node1 -> node2", "dns"),
        ("headcni.node1 -> node2", "loss"),
    ]
    failed = {key for key, one in cases.items() if one.find("failure") is not None}
    assert len(failed) == made["failed"] == 3 and ("headcni.node1 -> node2", "mtu4") in failed
    assert cases["headcni.node1 -> node2", "dns"].find("skipped") is not None
    assert cases["headcni.node2", "pod"].find("failure").text == "it cannot be reached <&>?"
    assert top.attrib == {"tests": "9", "failures": "3", "errors": "0", "skipped": "1"}


def test_throughput_is_part_of_the_results_of_a_pair():
    known = {
        "node1": {
            "headcni_probed": {"reached": reached("node2")["results"]},
            "headcni_measured": {"throughput": {"node2": {**SENT, "ok": False, "mbit": None}}},
        }
    }
    assert of_hosts(["node1"], known, {})["failed"] == 1
