"""What nodes answer, checked and bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest
import report_mesh
from ansible_collections.headcni.mesh.plugins.plugin_utils.report import gathered, record
from hypothesis import given
from hypothesis import strategies as st
from report_mesh import HOSTILE, NOW

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=20,
)
PARTS = ("status", "routes", "pools", "findings", "tailnet", "system", "paths", "problems")


@pytest.mark.parametrize("size", [3, 50, 500])
def test_every_node_and_every_measured_path_is_in_the_report(size):
    found = report_mesh.report(size)
    assert [node.name for node in found.nodes] == [report_mesh.name_of(at) for at in range(size)]
    each = size - 1 if size <= 50 else 12
    assert len(found.paths) == size * each
    assert len({(path.source, path.target) for path in found.paths}) == size * each
    assert {node.site for node in found.nodes} <= set(report_mesh.SITES)


@pytest.mark.parametrize("size", [3, 50])
def test_a_report_that_is_written_is_read_again_unchanged(size):
    found = report_mesh.report(size)
    assert record.read(record.written(found).encode()) == found


def test_a_node_that_cannot_be_reached_is_in_the_report_with_the_reason():
    gone = {"unreachable": True, "msg": "Failed to connect\nto the host via ssh"}
    node = report_mesh.report(3, node002=gone).nodes[1]
    assert node.problem == "Ansible cannot connect to it: Failed to connect to the host via ssh"
    assert not node.ready and node.headscale_online is True  # found at Headscale by its name


def test_a_module_that_failed_gives_its_message():
    assert report_mesh.report(3, node002={"failed": True, "msg": "no"}).nodes[1].problem == "no"


def test_a_part_that_is_missing_is_named():
    answer = report_mesh.survey(0, 3) | {"problems": {"ipam": "the store is locked"}}
    assert report_mesh.report(3, node001=answer).nodes[0].unanswered == (
        "ipam: the store is locked",
    )


def test_a_peer_that_is_not_in_the_inventory_is_a_stranger():
    answer = report_mesh.survey(0, 3)
    answer["paths"].append(dict(answer["paths"][0], name="other", address="100.64.9.9"))
    found = report_mesh.report(3, node001=answer)
    assert found.strangers == ("other",) and len(found.paths) == 6


def test_without_a_site_the_nearest_relay_is_the_site():
    answers = report_mesh.surveys(3)
    answers["node002"]["tailnet"]["relay"] = ""
    found = gathered.report(list(answers), answers, {}, {}, NOW)
    assert [node.site for node in found.nodes] == ["near relay lab", "no site", "near relay lab"]


def test_why_headscale_was_not_asked():
    assert "are not set" in report_mesh.report(3, headscale={"skipped": True}).headscale_problem
    refused = {"failed": True, "msg": "the API key was refused"}
    assert report_mesh.report(3, headscale=refused).headscale_problem == "the API key was refused"


@given(st.sampled_from(PARTS), ANYTHING)
def test_a_hostile_node_cannot_break_the_report(part, value):
    answer: Any = report_mesh.survey(1, 3) | {part: value}
    found = report_mesh.report(3, node002=answer)
    assert [node.name for node in found.nodes] == ["node001", "node002", "node003"]
    assert record.read(record.written(found).encode()) == found


@given(ANYTHING)
def test_a_hostile_status_cannot_break_the_report(value):
    for name in ("pools", "alarms", "warnings", "conditions", "pod_cidrs", "drift", "key_expires"):
        answer = report_mesh.survey(1, 3)
        answer["status"][name] = value
        assert len(report_mesh.report(3, node002=answer).nodes) == 3


def test_lists_and_texts_of_a_node_are_bounded():
    answer = report_mesh.survey(1, 3)
    answer["findings"] = [{"id": "x" * 10_000, "found": "y" * 100_000}] * 10_000
    answer["paths"] = answer["paths"] * 10_000
    answer["status"]["pod_cidrs"] = ["z" * 10_000] * 10_000
    found = report_mesh.report(3, node002=answer)
    assert len(json.dumps(record.written(found))) < 1_500_000
    assert max(len(one.found) for one in found.nodes[1].findings) <= record.MOST_TEXT


def test_text_keeps_words_and_drops_what_cannot_be_printed():
    assert record.text(HOSTILE) == HOSTILE
    assert record.text("a\x1b[31mb\x00c\u202ed") == "a [31mb c d"
    assert record.text(None) == ""


def test_more_nodes_than_the_report_can_show_are_refused():
    hosts = [str(number) for number in range(record.MOST_NODES + 1)]
    with pytest.raises(record.ReportError, match="2001 nodes, expected at most 2000"):
        gathered.report(hosts, {}, {}, {}, NOW)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "it is not JSON"),
        (b"[]", "it is not of format 1"),
        (b'{"format": 2}', "it is not of format 1"),
        (b'{"format": 1}', "report: headscale.* missing|missing"),
        (b'{"format": 1, "made_at": "x"}', "report.made_at: expected float, not 'x'"),
        (b'{"format": 1, "made_at": 1, "nodes": {}, "paths": []}', "report.nodes: expected a list"),
        (b'{"format": 1, "made_at": 1, "nodes": [1], "paths": []}', "expected an object"),
        (b"[" * 100_000, "it is not JSON"),
    ],
)
def test_data_that_is_damaged_is_refused_with_the_reason(content, said):
    with pytest.raises(record.ReportError, match=said):
        record.read(content)
