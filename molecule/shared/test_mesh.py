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


RESOLVING = r"""
remove() { cnitool del headcni /run/netns/named; ip netns del named; rm -r /etc/netns/named; }
trap remove EXIT
ip netns add named
export CNI_PATH=/opt/cni/bin NETCONFPATH=/etc/cni/net.d PATH=$PATH:/opt/lab/cni
mkdir -p /etc/netns/named
cnitool add headcni /run/netns/named | python3 -c '
import json, sys
dns = json.load(sys.stdin)["dns"]
for address in dns["nameservers"]:
    print("nameserver", address)
print("search", *dns["search"])' > /etc/netns/named/resolv.conf || exit
for name in NAMES; do ip netns exec named getent -s dns ahostsv4 $name || exit; done
"""


def test_the_result_works_as_a_resolv_conf_for_names_of_the_tailnet(nodes, host):
    """As podman and others write it. Short names are completed by the search domain."""
    for node in nodes:
        script = RESOLVING.replace("NAMES", f"{node}.mesh.lab {node}")
        found = host.run("bash -c %s", script)
        lines = [line for line in found.stdout.splitlines() if "STREAM" in line]
        assert found.rc == 0 and len(lines) == 2, (found.stdout, found.stderr)
        assert all(line.startswith("100.64.") for line in lines), lines
