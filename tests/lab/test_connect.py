"""What pods of all nodes reach: its measurements, its files, and what an interruption leaves.

The tests of this module use one lab, with a mesh that site.yml has set up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from xml.etree import ElementTree

import pytest
from lab_command import CHECKOUT, LabCommand
from leftovers import assert_nothing_left
from patience import until
from site_run import Site

NODES = ("node1", "node2")
PROBES = (
    "ip netns list; ls -d /run/headcni-probe*; ls /sys/class/net | grep ^hc | grep -v headcni;"
    " systemctl --no-legend list-units --all 'headcni-probe*'; nft list ruleset | grep 18473"
)


@pytest.fixture(scope="module")
def site():
    command = LabCommand("connect")
    command("down")
    before = command.listing()
    command("up", "--nodes", "2")
    mesh = Site(command)
    mesh()
    yield mesh
    command("down")
    assert_nothing_left(before, command.listing())


def left(site: Site) -> dict[str, str]:
    found = {node: site.lab.on(node, PROBES, check=False).strip() for node in NODES}
    return {node: text for node, text in found.items() if text}


def is_clean(site: Site) -> bool:
    return until(lambda: not left(site), 30, lambda: left(site), every=0.3)


def test_loss_throughput_and_path_of_each_pair_are_measured(site, tmp_path):
    files = {"headcni_verify_json": str(tmp_path / "it.json")}
    files["headcni_verify_junit"] = str(tmp_path / "it.xml")
    shown = site.verify(headcni_verify_perf=True, **files)
    assert "throughput" in shown.output and "Mbit/s" in shown.output
    found = json.loads((tmp_path / "it.json").read_text())
    assert found["version"] == 1 and found["failed"] == 0
    pairs = {(one["from"], one["to"]): one for one in found["pairs"]}
    assert set(pairs) == {("node1", "node2"), ("node2", "node1")}
    for one in pairs.values():
        assert one["path"] == "direct" and one["through"] and one["mtu"] == 1280
        assert one["loss_percent"] <= 10 and 0 < one["latency_ms"] < 200
        assert one["throughput_mbit"] > 1
    cases = list(ElementTree.parse(tmp_path / "it.xml").getroot().iter("testcase"))
    assert len(cases) == len(found["cases"])
    named = {(one.get("classname"), one.get("name")) for one in cases}
    assert len(named) == len(cases)
    assert ("headcni.node1 -> node2", "throughput") in named and (
        "headcni.node1",
        "outside",
    ) in named
    assert is_clean(site)


def test_the_files_are_written_if_a_check_fails_too(site, tmp_path):
    file = str(tmp_path / "it.xml")
    given = {"headcni_verify_outside": ["192.0.2.1:9"], "headcni_verify_timeout": 2}
    assert site.verify(check=False, headcni_verify_junit=file, **given).code == 2
    failed = {
        (one.get("classname"), one.get("name"))
        for one in ElementTree.parse(file).getroot().iter("testcase")
        if one.find("failure") is not None
    }
    assert failed == {("headcni.node1", "outside"), ("headcni.node2", "outside")}
    assert is_clean(site)


def interrupted(site: Site, command: list[str], how: signal.Signals) -> subprocess.Popen[bytes]:
    """A run that has started its pods, and gets a signal, as all processes of a terminal do."""
    worker = subprocess.Popen(
        command,
        cwd=CHECKOUT,
        env=site.lab.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    both = "ip netns list | grep -q headcni-probe"
    assert until(
        lambda: all(site.lab.on(n, f"{both} && echo yes", check=False) for n in NODES),
        90,
        lambda: worker.poll(),
        every=0.2,
    )
    os.killpg(worker.pid, how)
    return worker


def test_what_a_killed_run_has_left_is_removed_by_the_next_one(site):
    slow = {"headcni_verify_outside": ["192.0.2.1:9"], "headcni_verify_timeout": 60}
    command = site.command("playbooks/verify.yml", (), slow)
    interrupted(site, command, signal.SIGKILL).wait(20)
    assert set(left(site)) == set(NODES)
    site(playbook="playbooks/verify.yml", headcni_verify_remove=True)
    assert is_clean(site)
    interrupted(site, command, signal.SIGKILL).wait(20)
    assert site.verify().code == 0
    assert is_clean(site)
