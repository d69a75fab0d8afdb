"""Nodes without internet access."""

from __future__ import annotations


def test_there_is_no_way_out_and_nobody_has_made_one(host):
    for family, somewhere in (("-4", "198.51.100.1"), ("-6", "2001:db8::1")):
        assert host.check_output(f"ip {family} route show default") == ""
        assert host.run(f"ip {family} route get {somewhere}").rc != 0


def test_there_is_nowhere_to_download_from(host):
    control = host.check_output("getent hosts control").split()[0]
    asked = host.run(f"curl -sS --max-time 5 http://{control}:8081/stable/")
    assert asked.rc == 7, asked  # refused


def test_a_pod_gets_out_no_further_than_its_node(nodes, pods):
    for host in nodes.values():
        assert host.run("ip netns exec pod ping -c 1 -W 1 198.51.100.1").rc != 0
