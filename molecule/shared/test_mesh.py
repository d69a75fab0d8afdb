"""What is true on every node of every mesh, in both modes."""

from __future__ import annotations

import json
from itertools import permutations

import pytest


def test_the_daemon_runs_and_is_ready(host):
    daemon = host.service("headcni-daemon")
    assert daemon.is_running and daemon.is_enabled
    assert host.run("headcnictl status").rc == 0
    assert host.check_output("systemctl --failed --plain --no-legend") == ""


def test_headcni_has_charge_of_the_pods(host):
    assert min(host.file("/etc/cni/net.d").listdir()) == "10-headcni.conflist"
    for program in ("headcni", "headcni-ipam"):
        assert host.file(f"/opt/cni/bin/{program}").linked_to.startswith("/opt/headcni/releases/")


@pytest.mark.parametrize(("family", "port"), [("-4", 7), ("-6", 8)])
def test_pods_of_every_pair_talk_and_know_each_other_by_their_own_addresses(
    nodes, pods, family, port
):
    own = {}
    for node, host in nodes.items():
        shown = f"ip -j {family} -n pod address show dev eth0 scope global"
        own[node] = json.loads(host.check_output(shown))[0]["addr_info"][0]["local"]
        echo = f"ip netns exec pod python3 /run/echo.py serve tcp {own[node]} {port}"
        host.check_output(f"systemd-run --quiet --collect --unit=echo-{port} {echo}")
    try:
        for source, target in permutations(nodes, 2):
            ask = f"ip netns exec pod python3 /run/echo.py ask tcp {own[target]} {port}"
            retried = f"for i in $(seq 30); do {ask} && exit; sleep 1; done; exit 1"
            seen = nodes[source].run(retried)
            assert seen.stdout.strip() == own[source], f"{source}→{target}: {seen.stderr}"
    finally:
        for host in nodes.values():
            host.run(f"systemctl stop echo-{port}")
