"""The page as text: escaped, bounded, and in need of nothing else."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser

import pytest
import report_mesh
from ansible_collections.headcni.mesh.plugins.plugin_utils.report import folder, record
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.page import page
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.record import ReportError
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.view import view
from report_mesh import HOSTILE, NOW

VOID = {"meta", "input", "img", "br", "link"}


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags(content: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(content)
    assert parser.open == []
    return parser.found


def made(report: record.Report, title: str = "mesh") -> str:
    return page(view(report, title, None))


def hostile(value: object) -> object:
    """The same answer with a hostile text in place of each text."""
    if isinstance(value, dict):
        return {key: hostile(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


@pytest.mark.parametrize("size", [3, 40])
def test_a_hostile_text_never_becomes_markup(size):
    answers = report_mesh.surveys(size)
    for name, answer in answers.items():
        addresses, paths = answer["tailnet"]["addresses"], answer["paths"]
        answers[name] = hostile(answer | {"problems": {HOSTILE: HOSTILE}})
        answers[name]["tailnet"]["addresses"] = addresses
        answers[name]["findings"] = [
            {"id": HOSTILE, "found": HOSTILE, "run": HOSTILE, "where": HOSTILE}
        ]
        answers[name]["paths"] = [
            dict(path, through=HOSTILE, path=path["path"], name=HOSTILE) for path in paths
        ]
    report = report_mesh.report(size, **answers)
    renamed = record.read(
        record.written(report).replace('"node00', '"<b onclick=x>node00').encode()
    )
    content = made(renamed, HOSTILE)
    assert "&lt;img src=x onerror=" in content and "&lt;b onclick=x&gt;node00" in content
    found = tags(content)
    assert not {tag for tag, _ in found} & {"img", "b", "iframe", "object", "embed"}
    assert [tag for tag, _ in found].count("script") == 1
    for tag, attributes in found:
        assert not {name for name in attributes if name.startswith("on") or name == "style"}, tag


def test_the_page_refers_to_nothing_outside_of_it():
    for tag, attributes in tags(made(report_mesh.report(50))):
        for name in ("src", "href", "action", "srcset", "data", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    content = made(report_mesh.report(3))
    assert not re.search(r"url\(|@import|https?://", content)
    assert "default-src &#39;none&#39;" in content


@pytest.mark.parametrize(("size", "kilobytes"), [(3, 60), (50, 500), (500, 900)])
def test_size_and_time_are_bounded(size, kilobytes):
    report = report_mesh.report(size)
    began = time.process_time()
    content = made(report)
    assert time.process_time() - began < 20
    assert len(content.encode()) < kilobytes * 1024


def test_two_thousand_nodes_are_no_more_than_twelve_lists_of_paths_each():
    """The largest report that is allowed, with the longest texts that nodes may send."""
    answers = {f"n{at}": {"unreachable": True, "msg": f"{at}" + "x" * 5000} for at in range(2000)}
    report = report_mesh.report(0, **answers)
    assert len(made(report).encode()) < 4 << 20


def test_a_mesh_without_nodes_and_one_with_a_single_node_can_be_shown():
    for size in (0, 1):
        tags(made(report_mesh.report(size)))


def test_every_id_that_a_link_or_label_names_is_there_once():
    for size in (3, 50):
        found = tags(made(report_mesh.report(size)))
        ids = [attributes["id"] for _, attributes in found if "id" in attributes]
        assert len(ids) == len(set(ids))
        for tag, attributes in found:
            wanted = (attributes.get("aria-labelledby") or "").split()
            wanted += [attributes["href"][1:]] if tag == "a" else []
            assert set(wanted) <= set(ids)


def test_the_data_of_reports_is_kept_and_only_old_data_is_deleted(tmp_path):
    (tmp_path / "notes.json").write_text("mine")
    for at in range(5):
        report = report_mesh.report(3, NOW + at)
        before, why = folder.earlier(tmp_path, report)
        assert (before is None) is (at == 0) and not why
        folder.save(tmp_path, report, made(report), keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.json",
        *(folder.data_name(report_mesh.report(3, NOW + at)) for at in (2, 3, 4)),
        "report.html",
    ]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("report*")} == {0o600}
    newest, _ = folder.earlier(tmp_path, report_mesh.report(3, NOW + 9))
    assert newest == report_mesh.report(3, NOW + 4)


def test_damaged_data_is_named_and_the_report_is_made(tmp_path):
    report = report_mesh.report(3, NOW + 1)
    (tmp_path / folder.data_name(report_mesh.report(3))).write_text("{")
    before, why = folder.earlier(tmp_path, report)
    assert before is None and why.endswith("cannot be used: it is not JSON")
    assert "it is not JSON" in page(view(report, "mesh", before, why))


def test_data_that_is_too_large_is_not_read():
    with pytest.raises(ReportError, match="expected at most"):
        record.read(b" " * (record.MOST_BYTES + 1))
