"""What Headscale's policy lets into a node."""

from __future__ import annotations

import time
from ipaddress import ip_network

import pytest
from tailscaled_stub import Tailscaled

from headcni.errors import CniError
from headcni.mesh import packet_filter
from headcni.mesh.localapi import LocalApi

PODS, OTHERS = ip_network("10.9.1.0/24"), ip_network("10.9.2.0/24")
NODES_ONLY = {
    "IPProto": [6, 17, 1, 58],
    "Srcs": ["100.64.0.2/32"],
    "Dsts": [{"Net": "100.64.0.1/32", "Ports": {"First": 0, "Last": 65535}}],
}
WEB = {
    "IPProto": ["tcp"],
    "Srcs": ["10.9.0.0/16"],
    "Dsts": [{"Net": "10.9.0.0/16", "Ports": {"First": 80, "Last": 443}}],
}
ANYTHING = {
    "IPProto": [6],
    "Srcs": ["0.0.0.0/0"],
    "Dsts": [{"Net": "0.0.0.0/0", "Ports": {"First": 0, "Last": 65535}}],
}


@pytest.fixture
def rules(tmp_path):
    server = Tailscaled(str(tmp_path / "sock"))

    def read(*wanted):
        server.filter = list(wanted)
        return packet_filter.read(LocalApi(str(tmp_path / "sock")))

    yield read
    server.end()


def test_a_rule_for_nodes_does_not_let_pods_in(rules):
    assert not packet_filter.allows(rules(NODES_ONLY), OTHERS, PODS)
    assert packet_filter.allows(rules(NODES_ONLY, ANYTHING), OTHERS, PODS)


def test_ports_and_protocols_count(rules):
    web = rules(WEB)
    assert packet_filter.allows(web, OTHERS, PODS, "tcp", 80)
    assert packet_filter.allows(web, OTHERS, PODS), "some port is open"
    assert not packet_filter.allows(web, OTHERS, PODS, "tcp", 8080)
    assert not packet_filter.allows(web, OTHERS, PODS, "udp", 80)
    assert not packet_filter.allows(web, OTHERS, PODS, "icmp")


def test_a_rule_without_protocols_lets_nothing_in(rules):
    assert not packet_filter.allows(rules({**ANYTHING, "IPProto": []}), OTHERS, PODS)


def test_a_rule_for_a_part_of_the_range_is_not_one_for_all_of_it(rules):
    some = {**ANYTHING, "Srcs": ["10.9.2.0/25"]}
    assert not packet_filter.allows(rules(some), OTHERS, PODS)
    assert packet_filter.allows(rules(some), ip_network("10.9.2.5"), PODS)


def test_another_answer_is_refused(rules, tmp_path):
    rules()
    with pytest.raises(CniError, match="is no list"):
        LocalApi(str(tmp_path / "sock")).read_list("packet-filter", "status")


def test_rules_for_thousands_of_nodes_are_compared_in_no_time(rules):
    """The daemon does it every minute."""
    nodes = [f"100.64.{n >> 8}.{n & 255}" for n in range(5000)]
    many = [{**ANYTHING, "Srcs": [*nodes, f"10.9.{n}.0/24"]} for n in range(40)]
    known = rules(*many)
    asked = [ip_network(f"10.9.{n}.0/24") for n in range(200)]
    began = time.process_time()
    allowed = [packet_filter.allows(known, one, PODS) for one in asked]
    took = time.process_time() - began
    assert allowed == [n < 40 for n in range(200)]
    print(f"{took:.2f} s")
    assert took < 5


def test_sources_may_have_host_bits_or_be_no_prefixes(rules):
    some = {**ANYTHING, "Srcs": ["10.9.2.7/24", "10.0.0.0/40", "x", "10.0.0.0/-1", "fd00::1/0"]}
    assert packet_filter.allows(rules(some), ip_network("10.9.2.128/25"), PODS)
    assert not packet_filter.allows(rules(some), ip_network("10.9.3.0/24"), PODS)
