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


CONNECT = (
    "ip netns list | grep headcni; ls -d /run/headcni-connect*; nft list ruleset | grep 18474;"
    " systemctl --no-legend list-units --all 'headcni-connect*'; headcnictl pods | grep connect"
)


def node1_is_clean(site: Site) -> bool:
    def found() -> str:
        return site.lab.on("node1", CONNECT, check=False)

    return until(lambda: not found(), 30, found, every=0.3)


def on_node1(site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    return site.lab.run(*site.lab._ssh("node1", " ".join(words)), check=False)


def test_on_a_node_two_pods_test_what_one_node_can_test(site, pods):
    command = ("headcnictl", "connect-test", "--json", "--perf", "--to", pods["web-2"])
    done = on_node1(site, *command, "--junit", "/tmp/it.xml")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    pairs = {one["to"]: one for one in found["pairs"]}
    assert set(pairs) == {"node1", "node2", pods["web-2"]}
    assert pairs["node1"]["throughput_mbit"] > 1 and pairs["node1"]["path"] == "local"
    assert pairs[pods["web-2"]]["mtu"] == 1280 and pairs[pods["web-2"]]["loss_percent"] <= 10
    assert pairs["node2"]["path"] in ("direct", "derp") and pairs["node2"]["latency_ms"] > 0
    checks = {(one["to"], one["check"]): one["ok"] for one in found["cases"]}
    for check in ("v4", "v6", "mtu4", "mtu6", "port", "loss", "throughput"):
        assert checks["node1", check] is True
    assert checks["", "outside"] is True and checks["", "dns"] is True
    assert checks[pods["web-2"], "throughput"] is None
    text = site.lab.on("node1", "cat /tmp/it.xml; rm /tmp/it.xml")
    cases = ElementTree.fromstring(text.split("\n", 1)[1]).iter("testcase")
    assert len(list(cases)) == len(found["cases"])
    assert node1_is_clean(site)


def test_what_a_node_does_not_reach_is_a_no_and_its_pods_are_removed(site):
    done = on_node1(site, "headcnictl connect-test --outside 192.0.2.1:9 --timeout 2")
    assert done.returncode == 1 and "FAIL: node1: outside: the pod does not reach" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert node1_is_clean(site)
    assert on_node1(site, "headcnictl connect-test --conf-dir /nowhere").returncode == 1
    assert on_node1(site, "headcnictl connect-test --to nowhere").returncode == 3
    assert node1_is_clean(site)


@pytest.mark.parametrize("how", ["INT", "TERM", "HUP"])
def test_on_a_node_an_interruption_removes_the_pods(site, how):
    slow = "headcnictl connect-test --outside 192.0.2.1:9 --timeout 60"
    begun = "until ip netns | grep -q headcni-connect-2; do sleep 0.05; done; sleep 1"
    # A shell would start a process in the background with SIGINT ignored.
    script = (
        "import signal, subprocess\n"
        f"worker = subprocess.Popen({slow.split()!r}, stdout=-1, text=True)\n"
        f'subprocess.run(["sh", "-c", {begun!r}], timeout=30)\n'
        f"worker.send_signal(signal.SIG{how})\n"
        "said = worker.communicate(timeout=60)[0]\n"
        "print(worker.returncode, said)\n"
    )
    site.lab.write("node1", "/root/interrupt.py", script.encode())
    assert site.lab.on("node1", "python3 /root/interrupt.py").split() == [
        "130",
        *["interrupted;", "the", "pods", "are", "removed"],
    ]
    assert node1_is_clean(site)


def test_what_a_killed_connect_test_has_left_is_removed_by_the_next_one(site):
    slow = "headcnictl connect-test --outside 192.0.2.1:9 --timeout 60"
    begun = "until ip netns | grep -q headcni-connect-2; do sleep 0.05; done; sleep 1"
    on_node1(site, f"({slow} >/dev/null 2>&1 & pid=$!; {begun}; kill -KILL $pid)")
    assert "headcni-connect-2" in site.lab.on("node1", "ip netns")
    assert on_node1(site, "headcnictl connect-test").returncode == 0
    assert node1_is_clean(site)


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
    # The lock is there for a moment, so this does not sleep.
    begun = "until [ -e /run/headcni-probe.lock ]; do :; done"
    site.lab.on("node1", f"timeout 60 sh -c '{begun}'")
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
    endless = mesh(site, "events", "--follow")
    assert endless.returncode == 3 and "does not end: run it on the node" in endless.stdout


def test_the_documentations_captures_are_what_a_lab_shows(site, tmp_path):
    page = tmp_path / "captures.md"
    page.write_text((CHECKOUT / "docs/captures.md").read_text())
    # A daemon that looked while another test had broken its node looks again within a minute.
    until(lambda: "FAULT" not in mesh(site, "status", "--all").stdout, 120, "nodes without a fault")
    site.lab.run(".venv/bin/python", "-m", "lab.captures", "--page", str(page))
    shown = page.read_text()
    assert "2 of 2 nodes are ready" in shown and "shop/db-1" in shown
    assert "forwarding    BROKEN   net.ipv4.ip_forward is 0" in shown
    assert "every pod reaches every other" in shown
    assert site.lab.underlay().rpartition(".")[0] not in shown
    assert is_clean(site)
    assert mesh(site, "diagnose", "--all").returncode == 0


def test_connect_test_of_all_nodes_ends_with_the_exit_code_of_the_checks(site, tmp_path):
    junit = tmp_path / "it.xml"
    well = mesh(site, "connect-test", "--junit", str(junit))
    assert well.returncode == 0 and "every pod reaches every other" in well.stdout
    assert max(map(len, well.stdout.splitlines())) <= 80
    assert ElementTree.parse(junit).getroot().get("failures") == "0"
    outside = json.dumps({"headcni_verify_outside": ["192.0.2.1:9"], "headcni_verify_timeout": 2})
    assert mesh(site, "-e", outside, "connect-test", "--json").returncode == 1
    assert is_clean(site)
