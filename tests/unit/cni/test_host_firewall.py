"""Which filters block by default, from the listings of the programs that write them."""

from __future__ import annotations

import json
from ipaddress import ip_address, ip_network

import pytest

from headcni import port_ranges
from headcni.datapath import blocked
from headcni.datapath.host_firewall import PodTraffic, chains, firewalld, iptables
from headcni.errors import LIMITED
from headcni.plugins.headcni.plugin import run

TRAFFIC = PodTraffic(
    pod_cidrs=(ip_network("10.42.1.0/24"),), cluster_cidrs=(ip_network("10.42.0.0/16"),)
)
ACCEPTING = "-P INPUT ACCEPT\n-P FORWARD ACCEPT\n-P OUTPUT ACCEPT\n"
DOCKER = (
    "-P INPUT ACCEPT\n-P FORWARD DROP\n-P OUTPUT ACCEPT\n-N DOCKER\n-N DOCKER-USER\n"
    "-A FORWARD -j DOCKER-USER\n-A FORWARD -i docker0 -j ACCEPT\n-A DOCKER-USER -j RETURN\n"
)


def hooks(listing: str) -> list[str]:
    return [chain.hook for chain in chains.from_listing("ip", listing).blocking()]


@pytest.mark.parametrize(
    ("listing", "blocking"),
    [
        (ACCEPTING, []),
        (DOCKER, ["forward"]),
        (ACCEPTING + "-A FORWARD -j REJECT --reject-with icmp-host-prohibited\n", ["forward"]),
        (ACCEPTING + '-A INPUT -m comment --comment "no more" -j DROP\n', ["input"]),
        (ACCEPTING + "-A FORWARD -s 192.0.2.0/24 -j DROP\n", []),
        (ACCEPTING + "-N MINE\n-A FORWARD -j MINE\n-A MINE -j DROP\n", ["forward"]),
        (ACCEPTING + "-N MINE\n-A FORWARD -i eth0 -j MINE\n-A MINE -j DROP\n", []),
        (ACCEPTING + "-N MINE\n-A FORWARD -g MINE\n-A FORWARD -j DROP\n", []),
        (ACCEPTING + "-N MINE\n-A FORWARD -j MINE\n-A MINE -j RETURN\n-A MINE -j DROP\n", []),
        ("-P INPUT DROP\n-A INPUT -j ACCEPT\n", []),
        ("-P INPUT DROP\n-N A\n-A INPUT -j A\n-A A -j A\n", ["input"]),
        (
            '-P INPUT DROP\n-A INPUT -m comment --comment "a \x0c \u2028 b" -j ACCEPT\n',
            [],
        ),
        (
            '-P INPUT DROP\n-A INPUT -m comment --comment "two\nlines" -j ACCEPT\n',
            ["input"],
        ),
    ],
    ids=[
        "accepts",
        "Docker",
        "last rule rejects",
        "last rule drops, with a comment",
        "drops some",
        "a chain that drops",
        "a chain that drops some",
        "goto skips what follows",
        "return skips what follows",
        "accepts all in spite of its policy",
        "a chain that leads to itself",
        "a comment with odd characters",
        "a comment of two lines, which cannot be read",
    ],
)
def test_a_filter_blocks_by_default_if_nothing_passes_that_nobody_allowed(listing, blocking):
    assert hooks(listing) == blocking


def test_what_is_missing_is_said_and_what_is_there_is_not():
    table = chains.from_listing("ip", DOCKER)
    (ours,) = iptables.wanted(table, TRAFFIC).values()
    missing = iptables.differences(table, TRAFFIC)
    assert missing == [
        "iptables-legacy: chain HEADCNI-FORWARD is missing or differs",
        "iptables-legacy: FORWARD does not jump to HEADCNI-FORWARD in time",
        "iptables-legacy: DOCKER-USER does not jump to HEADCNI-FORWARD in time",
    ]
    jump = "-m comment --comment HeadCNI -j HEADCNI-FORWARD\n"
    told = DOCKER.replace(
        "-A FORWARD -j DOCKER-USER", f"-A FORWARD {jump}-A FORWARD -j DOCKER-USER"
    )
    told = told.replace("-A DOCKER-USER", f"-A DOCKER-USER {jump}-A DOCKER-USER")
    told += f"-N HEADCNI-FORWARD\n-A HEADCNI-FORWARD -m comment --comment {ours.comment}\n"
    told += "".join(f"-A HEADCNI-FORWARD {rule}\n" for rule in ours.rules)
    assert iptables.differences(chains.from_listing("ip", told), TRAFFIC) == []


ACCEPTED = "-A FORWARD -i headcni0 -j ACCEPT\n-A FORWARD -o headcni0 -j ACCEPT\n"


@pytest.mark.parametrize(
    ("rules", "passes"),
    [
        ("", False),
        (ACCEPTED, True),
        (ACCEPTED.replace("-i headcni0", "-i headcni0 -s 10.42.1.0/24"), False),
        (ACCEPTED.replace("-i headcni0", "! -i headcni0"), False),
        ("-A FORWARD -j DROP\n" + ACCEPTED, False),
        ("-A FORWARD -i headcni0 -j DROP\n" + ACCEPTED, False),
        ("-N MINE\n-A FORWARD -j MINE\n" + ACCEPTED.replace("-A FORWARD", "-A MINE"), True),
    ],
)
def test_rules_of_the_operator_that_let_all_of_the_bridge_through_are_enough(rules, passes):
    table = chains.from_listing("ip", "-P FORWARD DROP\n" + rules)
    [chain] = table.blocking()
    ways = (chains.Way(came_by="headcni0"), chains.Way(leaves_by="headcni0"))
    assert all(table.lets_pass(chain, way) for way in ways) is passes


def test_pods_are_allowed_by_interface_and_address_and_nobody_else_is():
    for hook in ("forward", "input", "output"):
        for one in TRAFFIC.accepts(hook, 4):
            assert one.came_by or one.leaves_by, one
            assert "10.42." in one.source + one.destination, one


def test_our_own_tailscaled_gets_out_and_its_port_in():
    traffic = PodTraffic(own_link="headcni01", tailscaled=(ip_address("192.168.255.254"),))
    assert [one.as_iptables() for one in traffic.accepts("forward", 4)] == [
        "-i headcni01 -s 192.168.255.254 -j ACCEPT",
        "-o headcni01 -d 192.168.255.254 -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
        "-o headcni01 -d 192.168.255.254 -m conntrack --ctstate DNAT -j ACCEPT",
    ]
    assert traffic.accepts("input", 4) == []


PORTS = tuple(port_ranges.parse(one, ("tcp", "udp")) for one in (22, "53/udp", "8000-8100/tcp"))


@pytest.mark.parametrize(
    ("answered", "accepted"),
    [
        (False, []),
        (True, ["-j ACCEPT"]),
        (
            PORTS,
            [
                "-p tcp --dport 22 -j ACCEPT",
                "-p tcp --dport 8000:8100 -j ACCEPT",
                "-p udp --dport 22 -j ACCEPT",
                "-p udp --dport 53 -j ACCEPT",
            ],
        ),
    ],
    ids=["none", "all", "a list"],
)
def test_tailnet_peers_reach_the_node_by_its_own_end_of_the_link(answered, accepted):
    node = (ip_address("192.168.255.253"), ip_address("fd68::1"))
    traffic = PodTraffic(own_link="headcni01", node=node, answers_for_node=answered)
    where = "-i headcni01 -d 192.168.255.253"
    assert [one.as_iptables() for one in traffic.accepts("input", 4)] == [
        f"{where} {one}" for one in accepted
    ]
    rich = [one for one in firewalld._rich_rules(traffic) if "ipv6" in one]
    assert len(rich) == len(accepted)
    assert all(one.startswith('rule family="ipv6" destination address="fd68::1"') for one in rich)


def test_ports_of_a_list_that_overlap_are_given_once():
    ranges = [port_ranges.parse(one) for one in ("5-9", "7-12/tcp", "13/tcp", 20)]
    assert port_ranges.intervals(ranges, "tcp") == ["5-13", "20"]
    assert port_ranges.intervals(ranges, "udp") == ["5-9", "20"]


def test_status_says_what_blocks_pods_until_nothing_does(tmp_path, monkeypatch):
    monkeypatch.setattr(blocked, "PATH", str(tmp_path / "blocked"))
    conf = {
        "cniVersion": "1.1.0",
        "name": "pods",
        "type": "headcni",
        "pod_cidr": "10.42.1.0/24",
        "ipMasq": False,
        "data_dir": str(tmp_path / "data"),
    }

    def status():
        return run({"CNI_COMMAND": "STATUS"}, json.dumps(conf).encode())

    assert status().code == 0
    blocked.write("firewalld has 10.42.0.0/16 in zone dmz: move it")
    answer = status()
    assert answer.code == LIMITED
    assert "in zone dmz: move it" in json.loads(answer.output)["details"]
    text = (tmp_path / "blocked").read_text()
    (tmp_path / "blocked").write_text(f"0\n{text}")  # of a daemon that has ended since
    assert status().code == 0
    (tmp_path / "blocked").write_text(text)
    assert status().code == LIMITED
    blocked.write("")
    assert status().code == 0
