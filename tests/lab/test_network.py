"""The lab's wires can be cut, healed and slowed, and lead no further than the host goes."""

from __future__ import annotations

import json
import subprocess
from urllib.parse import urlsplit

import pytest


def pings(lab, target: str = "node2") -> bool:
    return " 0% packet loss" in lab.on("node1", f"ping -c 2 -i 0.2 -W 1 {target}", check=False)


@pytest.mark.parametrize("silent", [False, True], ids=["cable pulled", "packets lost"])
def test_a_node_that_is_cut_off_is_reached_by_nobody_until_it_is_healed(lab, silent):
    assert pings(lab)
    try:
        lab("cut", "node2", *(["--silent"] if silent else []))
        assert not pings(lab)
        assert pings(lab, "control")
    finally:
        lab("heal", "node2")
    assert pings(lab)
    assert "default" in lab.on("node2", "ip -4 route show default; ip -6 route show default")


def test_the_cable_shows_a_pulled_plug_but_not_lost_packets(lab):
    netns = f"hclab-{lab.id}-node2"
    try:
        lab("cut", "node2", "--silent")
        assert "LOWER_UP" in lab.run("ip", "-n", netns, "link", "show", "eth0").stdout
        lab("cut", "node2")
        assert "NO-CARRIER" in lab.run("ip", "-n", netns, "link", "show", "eth0").stdout
    finally:
        lab("heal", "node2")


def test_a_slowed_link_carries_no_more_than_its_rate_in_either_direction(lab):
    lab.on("node2", "pkill iperf3; iperf3 --server --daemon")
    try:
        lab("slow", "node2", "--rate", "8mbit")
        for direction in ("", "--reverse"):
            report = lab.on("node1", f"iperf3 --client node2 --time 2 --json {direction}")
            assert 0 < json.loads(report)["end"]["sum_received"]["bits_per_second"] < 10e6
    finally:
        lab("heal", "node2")
        lab.on("node2", "pkill iperf3")
    assert "tbf" not in lab.on("node2", "tc qdisc show dev eth0")


def test_a_node_resolves_the_names_that_the_host_resolves(lab):
    """Those of the package mirrors that this machine is set up for."""
    uris = lab.run("apt-get", "indextargets", "--format", "$(URI)").stdout.split()
    names = {urlsplit(uri).hostname for uri in uris} - {None}
    assert names, "apt knows no mirror: run apt-get update"
    for name in sorted(names):
        lookup = f"import socket; print('found', socket.gethostbyname('{name}'))"
        for _ in range(5):  # a name server far away may miss a question
            host = "found" in lab.run("python3", "-c", lookup, check=False).stdout
            said = lab.on("node1", f'python3 -c "{lookup}" 2>&1 | tail -1', check=False)
            if host == said.startswith("found"):
                break
        assert host == said.startswith("found"), f"{name}: the node says {said!r}"


def test_a_node_cannot_reach_the_hosts_loopback(lab):
    listener = (
        "import socket; s = socket.create_server(('127.0.0.1', 0));"
        "print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen(
        ["python3", "-c", listener], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        port = server.stdout.readline().strip()
        answer = lab.on("node1", f"nc -z -w 2 10.0.2.2 {port} && echo reached", check=False)
        server.communicate("\n", timeout=10)
    assert answer == ""


def test_the_host_gains_one_link_and_no_rule(lab):
    links = lab.run("ip", "-br", "link").stdout
    lab_id = lab.id
    assert [line.split("@")[0] for line in links.splitlines() if lab_id in line] == [
        f"hclab-{lab_id}"
    ]
    assert "hclab" not in lab.run("nft", "list", "ruleset").stdout


@pytest.mark.parametrize("command", [["cut"], ["heal"], ["stop"], ["shell"]])
def test_a_machine_that_is_not_there_is_named_with_those_that_are(lab, command):
    done = lab(*command, "node9", check=False)
    assert done.returncode == 1
    assert done.stderr == ("lab: there is no machine 'node9': choose from control, node1, node2\n")
