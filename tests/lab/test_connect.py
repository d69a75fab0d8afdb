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


def headcnictl(site: Site, *words: str) -> list[str]:
    return ["bin/headcnictl", "-i", "inventories/lab", *words]


def test_an_interrupted_connect_test_removes_its_pods(site):
    slow = json.dumps({"headcni_verify_outside": ["192.0.2.1:9"], "headcni_verify_timeout": 60})
    worker = interrupted(site, headcnictl(site, "-e", slow, "connect-test"), signal.SIGINT)
    output, _unused = worker.communicate(timeout=120)
    assert worker.returncode == 130, output
    assert b"the pods are removed" in output
    assert is_clean(site)


def test_a_run_that_is_interrupted_while_its_pods_start_leaves_none_either(site):
    """The module on a node goes on after the connection has gone: what removes the pod waits."""
    worker = subprocess.Popen(
        headcnictl(site, "connect-test"),
        cwd=CHECKOUT,
        env=site.lab.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    begun = "for i in $(seq 3000); do ls /run/headcni-probe.lock && exit 0; sleep 0.02; done"
    assert site.lab.on("node1", f"{begun} 2>/dev/null"), "no module has begun to start a pod"
    os.killpg(worker.pid, signal.SIGINT)
    output, _unused = worker.communicate(timeout=120)
    assert worker.returncode == 130, output
    assert is_clean(site)


@pytest.fixture
def pods(site):
    """A pod on each node, with its address by name."""
    found = {}
    for node in NODES:
        site.lab.copy(CHECKOUT / "tests/support/named_pod.py", node, "/root/named_pod.py")
        name = f"web-{node[-1]}"
        found[name] = site.lab.on(node, f"python3 /root/named_pod.py ADD shop {name}").strip()
    yield found
    for node in NODES:
        site.lab.on(node, f"python3 /root/named_pod.py DEL shop web-{node[-1]}")


def mesh(site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    return site.lab.run(*headcnictl(site, *words), check=False)


def test_the_controller_shows_the_status_of_all_nodes(site):
    shown = mesh(site, "status", "--all")
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[:2] for line in shown.stdout.splitlines()[1:3]] == [
        ["node1", "yes"],
        ["node2", "yes"],
    ]
    assert "2 of 2 nodes are ready" in shown.stdout
    only = mesh(site, "-l", "node2", "status", "--json")
    assert list(json.loads(only.stdout)["nodes"]) == ["node2"]


def test_the_controller_shows_routes_and_pools_of_all_nodes(site, pods):
    routes = json.loads(mesh(site, "routes", "--json").stdout)["nodes"]
    wanted = {node: {one["state"] for one in routes[node]["answer"]["routes"]} for node in NODES}
    assert wanted == {"node1": {"ok"}, "node2": {"ok"}}
    pools = mesh(site, "ipam")
    assert pools.returncode == 0 and "node1:\n" in pools.stdout and "node2:\n" in pools.stdout


def test_a_trace_by_names_shows_both_ends(site, pods):
    shown = mesh(site, "trace", "shop/web-1", "shop/web-2")
    assert shown.returncode == 0, shown.stdout
    for node in NODES:
        assert f"{node}:\n{pods['web-1']} -> {pods['web-2']} (ping)" in shown.stdout


def test_what_is_wrong_with_one_node_is_shown_first_with_the_exit_code_of_a_no(site):
    site.lab.on("node2", "sysctl -qw net.ipv4.ip_forward=0")
    try:
        shown = mesh(site, "diagnose", "--all")
    finally:
        site.lab.on("node2", "sysctl -qw net.ipv4.ip_forward=1")
    assert shown.returncode == 1
    assert shown.stdout.startswith("node2:\n") and "forwarding" in shown.stdout
    assert shown.stdout.index("node1:\n") > 0
    assert mesh(site, "trace", "10.99.0.1", "10.99.0.2").returncode == 3
    assert mesh(site, "routes", "--nonsense").returncode == 2


def test_connect_test_of_all_nodes_ends_with_the_exit_code_of_the_checks(site, tmp_path):
    junit = tmp_path / "it.xml"
    well = mesh(site, "connect-test", "--junit", str(junit))
    assert well.returncode == 0 and "every pod reaches every other" in well.stdout
    assert max(map(len, well.stdout.splitlines())) <= 80
    assert ElementTree.parse(junit).getroot().get("failures") == "0"
    outside = json.dumps({"headcni_verify_outside": ["192.0.2.1:9"], "headcni_verify_timeout": 2})
    assert mesh(site, "-e", outside, "connect-test", "--json").returncode == 1
    assert is_clean(site)
