"""report.yml on real nodes, with one path forced through the relay."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from chromium import chromium
from forced_relay import only_relayed
from lab_command import CHECKOUT, LabCommand
from leftovers import assert_nothing_left
from patience import until
from site_run import Run, Site

NODES = ("node1", "node2", "node3")
PICTURE = CHECKOUT / "docs/report.png"
SECONDS = 30.0  # until the report shows that a path has changed
pytestmark = pytest.mark.timeout(600)


@dataclass
class Mesh:
    lab: LabCommand
    site: Site
    folder: Path
    reports: list[dict[str, Any]] = field(default_factory=list)

    def report(self, **given: Any) -> dict[str, Any]:
        done = self.run(**given)
        newest = sorted(self.folder.glob("report-*.json"))[-1]
        found: dict[str, Any] = json.loads(newest.read_text())
        assert f"{self.folder}/report.html" in done.output
        self.reports.append(found)
        return found

    def run(self, **given: Any) -> Run:
        return self.site(
            playbook="playbooks/report.yml", headcni_report_dir=str(self.folder), **given
        )

    @property
    def page(self) -> str:
        return (self.folder / "report.html").read_text()


def kinds(report: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(path["source"], path["target"]): path["kind"] for path in report["paths"]}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    lab = LabCommand("report")
    lab("down")
    before = lab.listing()
    lab("up", "--nodes", str(len(NODES)))
    site = Site(lab)
    site()
    cnitool = "CNI_PATH=/opt/cni/bin /opt/lab/cni/cnitool"
    for node in NODES:
        lab.on(node, f"ip netns add pod && {cnitool} add headcni /run/netns/pod")
    yield Mesh(lab, site, tmp_path_factory.mktemp("reports"))
    lab("down")
    assert_nothing_left(before, lab.listing())


def test_the_report_shows_every_node_every_path_and_every_approval(mesh):
    done: list[dict[str, Any]] = []

    def direct() -> bool:
        done.append(mesh.report())
        return set(kinds(done[-1]).values()) == {"direct"}

    until(direct, 90)
    report = done[-1]
    assert [node["name"] for node in report["nodes"]] == list(NODES)
    assert len(kinds(report)) == 6 and not report["strangers"]
    for number, node in enumerate(report["nodes"], 1):
        assert (node["problem"], node["ready"], node["mode"], node["pods"]) == ("", True, "host", 1)
        cidrs = {one["cidr"]: one for one in node["approvals"]}
        assert set(cidrs) == {f"10.55.{number}.0/24", f"fd55:0:0:{number}::/64"}
        assert all(one["approved"] and one["served"] for one in cidrs.values())
        assert {pool["total"] - pool["free"] for pool in node["pools"]} == {1}
        assert not node["unanswered"] and re.match(r"\d+\.\d+\.\d+", node["tailscaled"])
    assert all(path["latency_ms"] > 0 and path["lost"] == 0 for path in report["paths"])
    assert report["headscale"].startswith("0.")


def test_the_files_are_for_their_owner_only(mesh):
    for path in (mesh.folder / "report.html", *mesh.folder.glob("report-*.json")):
        assert path.stat().st_mode & 0o777 == 0o600


def test_check_mode_writes_nothing(mesh):
    before = sorted(os.listdir(mesh.folder))
    assert mesh.site(
        "--check", playbook="playbooks/report.yml", headcni_report_dir=str(mesh.folder)
    )
    assert sorted(os.listdir(mesh.folder)) == before


def test_a_path_that_is_forced_through_the_relay_is_shown_and_so_is_its_return(mesh):
    with only_relayed(mesh.lab, "node1"):

        def relayed() -> bool:
            found = kinds(mesh.report())
            return {kind for pair, kind in found.items() if "node1" in pair} == {"derp"}

        until(relayed, SECONDS)
        assert kinds(mesh.reports[-1])["node2", "node3"] == "direct"
        for node in ("node2", "node3"):
            said = f"the path between node1 and {node} is relayed through DERP region"
            assert said in mesh.page
        with chromium() as browser:
            browser.open(mesh.folder / "report.html")
            lines = browser.value(
                "[...document.querySelectorAll('#mesh line')].map(l => [l.dataset.a, l.dataset.b,"
                " l.classList.contains('relayed')])"
            )
            assert sorted(lines) == [
                ["node1", "node2", True],
                ["node1", "node3", True],
                ["node2", "node3", False],
            ]
            assert browser.said == []
            if os.environ.get("HEADCNI_WRITE_DOCS"):
                browser.size(1000, 900)
                top, bottom = browser.value(
                    "[document.querySelector('#topology').getBoundingClientRect().top + scrollY,"
                    " document.querySelector('#mesh').getBoundingClientRect().bottom + scrollY]"
                )
                picture = browser.picture_of(0, top, 1000, bottom - top + 20)
                assert len(picture) < 150_000
                PICTURE.write_bytes(picture)

    changes = []

    def direct() -> bool:
        found = kinds(mesh.report())
        changes.append(mesh.page.partition('id="changes"')[2])
        return set(found.values()) == {"direct"}

    until(direct, SECONDS)
    assert any(re.search(r"path: relayed through DERP region .* → direct", one) for one in changes)


def test_a_broken_node_comes_first_with_its_fix_and_a_stopped_one_is_not_forgotten(mesh):
    mesh.lab.on("node2", "sysctl -qw net.ipv4.ip_forward=0; systemctl stop headcni-daemon")
    mesh.lab("stop", "node3")
    try:
        report = mesh.report()
        nodes = {node["name"]: node for node in report["nodes"]}
        assert "Ansible cannot connect" in nodes["node3"]["problem"]
        found = {finding["id"] for finding in nodes["node2"]["findings"]}
        assert {"daemon-down", "forwarding-off-ipv4"} <= found
        problems = mesh.page.partition('id="topology"')[0]
        assert "sysctl -w net.ipv4.ip_forward=1" in problems
        assert "systemctl restart headcni-daemon" in problems
        assert "no answer: Ansible cannot connect" in problems
        assert "no longer answers" in mesh.page.partition('id="changes"')[2]
    finally:
        mesh.lab.on("node2", "sysctl -qw net.ipv4.ip_forward=1; systemctl start headcni-daemon")
        mesh.lab("start", "node3")


def test_without_headscale_the_report_says_that_it_does_not_know_the_approvals(mesh):
    report = mesh.report(headcni_headscale_api_key="", headscale_routes_api_key="")
    assert "are not set" in report["headscale_problem"]
    assert "approvals are not known" in mesh.page
    assert not any(node["approvals"] for node in report["nodes"])


def test_old_data_is_deleted(mesh):
    shutil.copy(mesh.folder / "report.html", mesh.folder / "mine.html")
    mesh.report(headcni_report_keep=2)
    assert len(list(mesh.folder.glob("report-*.json"))) == 2
    assert (mesh.folder / "mine.html").exists()
