"""What the page shows of a mesh."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import report_mesh
from ansible_collections.headcni.mesh.plugins.plugin_utils.report import drawing
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.pairs import pairs
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.record import Report
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.view import View, view
from report_mesh import NOW


def shown(report: Report) -> View:
    return view(report, "mesh", None)


def found_of(report: Report) -> list[tuple[str, tuple[str, ...], str]]:
    return [(one.level, one.nodes, one.found) for one in shown(report).problems]


def with_status(number: int, size: int = 3, **changed):
    answer = report_mesh.survey(number, size)
    answer["status"].update(changed)
    return answer


@pytest.mark.parametrize("size", [3, 30])
def test_few_nodes_are_each_drawn_with_a_line_for_each_pair(size):
    made = shown(report_mesh.report(size)).drawing
    assert not made.by_site and len(made.spots) == size
    assert len(made.lines) == size * (size - 1) // 2
    relayed = [line for line in made.lines if line.kind == "relayed"]
    assert len(relayed) == size - 1 and made.lines[-len(relayed) :] == tuple(relayed)
    assert sum(bool(line.label) for line in made.lines) == (3 if size == 3 else 0)


@pytest.mark.parametrize("size", [31, 50, 500])
def test_many_nodes_are_drawn_by_site(size):
    made = shown(report_mesh.report(size)).drawing
    assert made.by_site and len(made.spots) == size
    assert len(made.sites) == 5 and sum(site.nodes for site in made.sites) == size
    assert len(made.lines) <= 10


@pytest.mark.parametrize("sites", [1, 2, 3, 5, 12, 40])
def test_boxes_never_touch_and_hold_their_nodes(sites):
    report = report_mesh.report(200)
    nodes = [replace(node, site=f"site {at * at % sites}") for at, node in enumerate(report.nodes)]
    found = drawing.drawing(nodes, pairs(report), {node.name: "good" for node in nodes})
    assert len(found.sites) <= drawing.MOST_SITES and len(found.spots) == 200
    for a, b in combinations(found.sites, 2):
        apart = (
            abs((a.x + a.width / 2) - (b.x + b.width / 2)) >= (a.width + b.width) / 2
            or abs((a.y + a.height / 2) - (b.y + b.height / 2)) >= (a.height + b.height) / 2
        )
        assert apart, (a, b)
    for spot in found.spots:
        inside = [
            box
            for box in found.sites
            if box.x <= spot.x <= box.x + box.width - drawing.SMALL
            and box.y + 30 <= spot.y <= box.y + box.height - drawing.SMALL
        ]
        assert len(inside) == 1
    assert found.left <= min(box.x for box in found.sites)


@pytest.mark.parametrize(("size", "rows"), [(3, 3), (50, 50), (51, 20), (500, 20)])
def test_the_heat_map_has_a_cell_for_each_pair_of_nodes_or_groups(size, rows):
    found = shown(report_mesh.report(size)).heat
    assert len(found.heads) == len(found.rows) <= rows
    assert {len(row.cells) for row in found.rows} == {len(found.heads)}
    assert sum(cell.measured for row in found.rows for cell in row.cells) == found.measured
    if size <= 50:
        assert sum(cell.measured > 0 for row in found.rows for cell in row.cells) == found.possible


def test_a_cell_says_latency_relay_and_loss():
    answer = report_mesh.survey(0, 3)
    answer["paths"][0] |= {"lost": 1}
    answer["paths"][1] |= {"path": "none", "lost": 5, "latency_ms": None, "through": ""}
    cells = shown(report_mesh.report(3, node001=answer)).heat.rows[0].cells
    by_title = {cell.title.partition(":")[0]: cell for cell in cells if cell.title}
    lossy, none = by_title["node001 → node002"], by_title["node001 → node003"]
    assert (lossy.text, lossy.loss, lossy.kind) == ("16", 20, "direct")
    assert (none.text, none.loss, none.kind, none.heat) == ("✕", 100, "none", -1)


def test_a_healthy_mesh_has_no_problem():
    report = report_mesh.report(2)
    report = replace(
        report,
        paths=tuple(replace(path, kind="direct") for path in report.paths),
        nodes=tuple(replace(node, pools=()) for node in report.nodes),
    )
    assert shown(report).problems == ()
    assert {tile.level for tile in shown(report).tiles} == {"good"}


def test_what_is_broken_comes_before_what_is_doubtful():
    report = report_mesh.report(50, node005={"unreachable": True})
    levels = [one.level for one in shown(report).problems]
    assert levels == sorted(levels) and set(levels) == {"bad", "doubtful"}
    assert found_of(report)[0][2].startswith("Headscale: 10.42.1.0/24 is not approved")
    assert ("bad", ("node005",), "no answer: Ansible cannot connect to it") in found_of(report)
    assert shown(report).nodes[0].state == "bad"


def test_the_same_problem_of_many_nodes_is_shown_once():
    finding = {
        "id": "clock-wrong",
        "found": "the clock is wrong",
        "run": "timedatectl",
        "sure": True,
    }
    answers = {
        f"node{at + 1:03}": report_mesh.survey(at, 20) | {"findings": [finding]} for at in range(20)
    }
    found = [
        one for one in shown(report_mesh.report(20, **answers)).problems if one.run == "timedatectl"
    ]
    assert len(found) == 1 and len(found[0].nodes) == 20
    assert found[0].names.endswith("node008 and 12 more")


def test_a_node_with_many_relayed_paths_is_named_as_the_cause():
    said = [one for one in found_of(report_mesh.report(20)) if "relayed" in one[2]]
    assert len(said) == 1 and said[0][1] == ("node020",)
    assert said[0][2].startswith("19 of the 19 measured paths of node020 (node001, node002")


def test_a_single_relayed_path_names_both_nodes_and_the_relay():
    said = [one for one in found_of(report_mesh.report(3)) if "relayed" in one[2]]
    assert said[0][1] == ("node001", "node003")
    assert "is relayed through DERP region lab (999), 41 ms" in said[0][2]


def test_pairs_without_an_answer_are_a_problem_unless_one_of_them_is_away():
    broken = report_mesh.survey(0, 3)
    broken["paths"][0] |= {"path": "none", "lost": 5, "latency_ms": None}
    assert ("bad", ("node001", "node002"), "no path between node001 and node002") in found_of(
        report_mesh.report(3, node001=broken)
    )
    away = report_mesh.report(3, node001=broken, node002={"unreachable": True})
    assert not [one for one in found_of(away) if one[2].startswith("no path")]


def test_the_advice_uses_the_tailscaled_of_the_nodes_mode():
    runs = [one.run for one in shown(report_mesh.report(20)).problems if "netcheck" in one.run]
    assert runs == ["tailscale --socket=/run/headcni/tailscaled.sock netcheck"]


def test_a_condition_is_not_repeated_if_diagnose_has_named_it():
    failing = [{"name": "routes", "ok": False, "reason": "no route"}]
    alone = with_status(0, ready=False, conditions=failing)
    named = alone | {
        "findings": [{"id": "condition-routes", "found": "routes: no route", "sure": True}]
    }
    for answer in (alone, named):
        said = [
            one[2]
            for one in found_of(report_mesh.report(3, node001=answer))
            if "no route" in one[2]
        ]
        assert len(said) == 1


def test_two_nodes_with_the_same_pod_cidr_are_a_problem():
    report = report_mesh.report(3, node002=with_status(1, pod_cidrs=["10.42.0.0/24"]))
    assert ("bad", ("node001", "node002"), "10.42.0.0/24 is the pod CIDR of 2 nodes") in found_of(
        report
    )


def test_nodes_with_a_rare_version_are_named():
    report = report_mesh.report(3, node002=with_status(1, version="0.3.0"))
    said = [one for one in found_of(report) if "versions of HeadCNI" in one[2]]
    assert said == [
        ("doubtful", ("node002",), "nodes run 2 versions of HeadCNI: 0.4.0 (2), 0.3.0 (1)")
    ]


def test_an_address_range_that_is_not_approved_is_shown_with_its_node():
    report = report_mesh.report(50)
    row = next(row for row in shown(report).nodes if row.name == "node002")
    assert row.cidrs == (("10.42.1.0/24", "not approved", False),)


def test_an_expired_key_is_shown():
    report = report_mesh.report(3, node001=with_status(0, key_expires=NOW - 5))
    assert next(row.key for row in shown(report).nodes if row.name == "node001") == "expired"


def test_a_pool_of_ipv6_is_shown_without_all_of_its_digits():
    answer = report_mesh.survey(0, 3)
    answer["pools"] = [
        {"network": "n", "subnet": "fd00::/64", "total": 2**64 - 2, "free": 2**64 - 12}
    ]
    row = next(
        row for row in shown(report_mesh.report(3, node001=answer)).pools if row.node == "node001"
    )
    assert (row.percent, row.said) == (0, "10 of about 2^63")


def test_changes_since_an_earlier_report_are_shown_the_worse_first():
    old = report_mesh.report(3, NOW - 60, node002=with_status(1, version="0.3.0", mode="daemon"))
    worse = with_status(0, ready=False)
    worse["paths"] = [dict(path, path="derp", through="DERP region 1") for path in worse["paths"]]
    worse["findings"] = [{"id": "pool-full", "found": "there is no free address", "sure": True}]
    found = view(report_mesh.report(3, node001=worse), "mesh", old)
    assert found.compared_with == "2026-09-21 14:12:20 UTC"
    said = [(one.direction, one.about, one.said) for one in found.changes]
    assert said == [
        ("worse", "node001", "is no longer ready"),
        ("worse", "node001", "new finding: there is no free address"),
        ("worse", "node001 ↔ node002", said[2][2]),
        ("neutral", "node002", "mode: daemon → host"),
        ("neutral", "node002", "version of HeadCNI: 0.3.0 → 0.4.0"),
    ]
    assert said[2][2].startswith("path: direct, 16 ms → relayed through DERP region 1")


def test_nodes_that_come_go_and_stop_answering_are_changes():
    old, new = report_mesh.report(3), report_mesh.report(4, node001={"unreachable": True})
    said = {(one.about, one.said) for one in view(new, "mesh", old).changes}
    assert {("node004", "new in the inventory"), ("node001", "no longer answers")} <= said
    back = {(one.about, one.said) for one in view(old, "mesh", new).changes}
    assert {("node004", "no longer in the inventory"), ("node001", "answers again")} <= back


def test_a_report_is_the_same_as_itself():
    report = report_mesh.report(50)
    assert view(report, "mesh", report).changes == ()
