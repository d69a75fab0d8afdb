"""Firewalls that block by default, and what pods reach once they have been told."""

from __future__ import annotations

import ast
import sys
from contextlib import ExitStack

import pytest
from lab_command import CHECKOUT

V4, V6 = 0, 1
BRIDGED = "net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-ip6tables"

# Each lets through only what it was told to, in and through the node. That neighbours on eth0 find
# the node by IPv6 is up to its operator.
BLOCKING = {
    "iptables-nft": [
        f"{program}-nft -P {chain} DROP"
        for program in ("iptables", "ip6tables")
        for chain in ("FORWARD", "INPUT")
    ]
    + ["ip6tables-nft -A INPUT -i eth0 -p ipv6-icmp -j ACCEPT"],
    "iptables-legacy": [
        f"{program}-legacy -P {chain} DROP"
        for program in ("iptables", "ip6tables")
        for chain in ("FORWARD", "INPUT")
    ]
    + ["ip6tables-legacy -A INPUT -i eth0 -p ipv6-icmp -j ACCEPT"],
    # As Red Hat's iptables-services have it, also through a chain of the operator's own.
    "a last rule that rejects": [
        line
        for program, icmp in (("iptables-nft", "icmp"), ("ip6tables-nft", "ipv6-icmp"))
        for line in (
            f"{program} -N OPERATOR",
            f"{program} -A OPERATOR -j REJECT",
            f"{program} -A FORWARD -j OPERATOR",
            f"{program} -A INPUT -i eth0 -p {icmp} -j ACCEPT",
            f"{program} -A INPUT -j REJECT",
        )
    ],
    # What Docker's users are told to write there comes before everything else.
    "a drop in DOCKER-USER": [
        "iptables-nft -N DOCKER-USER",
        "iptables-nft -A DOCKER-USER -j DROP",
        "iptables-nft -A DOCKER-USER -j RETURN",
        "iptables-nft -A FORWARD -j DOCKER-USER",
        "iptables-nft -P FORWARD DROP",
        "ip6tables-nft -P FORWARD DROP",
        "iptables-nft -P INPUT DROP",
        "ip6tables-nft -P INPUT DROP",
        "ip6tables-nft -A INPUT -i eth0 -p ipv6-icmp -j ACCEPT",
    ],
    "nftables": [
        "nft add table inet filter",
        "nft add chain inet filter forward {type filter hook forward priority 0;policy drop;}",
        "nft add chain inet filter input {type filter hook input priority 0;policy drop;}",
        "nft add chain inet filter output {type filter hook output priority 0;policy drop;}",
        "nft add rule inet filter output oifname eth0 accept",
        "nft add rule inet filter input iifname eth0 accept",
    ],
}

COOPERATE = """
import sys
sys.path.insert(0, sys.argv[1])
from ipaddress import ip_network
from headcni.datapath import host_firewall
traffic = host_firewall.PodTraffic(
    bridges=("headcni0",),
    pod_cidrs=(ip_network("10.55.1.0/24"), ip_network("fd55:0:0:1::/64")),
    cluster_cidrs=(ip_network("10.55.0.0/16"), ip_network("fd55::/48")),
)
if sys.argv[2] == "remove":
    print(host_firewall.remove())
elif sys.argv[2] == "meanwhile":
    import subprocess
    class Interrupted(host_firewall.Cooperation):
        def _pass(self, every, traffic):
            found = super()._pass(every, traffic)
            if not self.repaired:
                subprocess.run(["iptables-nft", "-F", "FORWARD"], check=True)
            return found
    seen = Interrupted(True)
    seen.ensure(traffic), seen.ensure(traffic)
    print([seen.ensure(traffic) and seen.repaired for _unused in range(2)])
else:
    seen = host_firewall.Cooperation(sys.argv[2] == "ensure")
    found = seen.ensure(traffic)
    print([(one.name, one.problem, one.missing, one.added) for one in found])
"""


def cooperate(node, verb):
    """In the node's namespace, as the daemon would: what there is to say of each firewall."""
    done = node.netns.run(sys.executable, "-c", COOPERATE, CHECKOUT / "plugins/cni", verb)
    return ast.literal_eval(done.stdout)


@pytest.fixture(params=BLOCKING, ids=lambda name: name.replace(" ", "-"))
def blocked(node, request):
    """A node whose firewall blocks, as its operator has set it up."""
    for line in BLOCKING[request.param]:
        if line.startswith("nft "):
            node.netns.run("nft", line.removeprefix("nft "))
        else:
            node.netns.run(*line.split())
    for sysctl in BRIDGED:
        node.netns.run("sysctl", "-qw", f"{sysctl}=1")
    return node


def any_address(family):
    return "::" if family == V6 else "0.0.0.0"


CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 8000), 1)"


def open_to_the_outside(node, pod):
    """By IP version: does the pod reach a server outside?"""
    found = []
    for address, family in ((node.OUTSIDE_IP, V4), (node.OUTSIDE_IP6, V6)):
        with node.outside.serving(8000, address=any_address(family)):
            done = pod.run(sys.executable, "-c", CONNECT, address, check=False)
            found.append(done.returncode == 0)
    return found


def reached(node, conf):
    """Which ways are open, by name and family."""
    one, two, published = node.pod(), node.pod(), node.pod()
    mapping = {"portMappings": [{"hostPort": 8080, "containerPort": 8000, "protocol": "tcp"}]}
    made = [node.add(conf, pod).ok for pod in (one, two)]
    node.add({**conf, "runtimeConfig": mapping}, published).succeeds()
    first, second = ([ip["address"].partition("/")[0] for ip in r["ips"]] for r in made)
    gateways = [ip["gateway"] for ip in made[0]["ips"]]
    found = {}
    for family, outside, host in (
        (V4, node.OUTSIDE_IP, node.NODE_IP),
        (V6, node.OUTSIDE_IP6, node.NODE_IP6),
    ):
        anywhere = any_address(family)
        with ExitStack() as servers:
            for where in (two, published, node.outside, node.netns):
                servers.enter_context(where.serving(8000, address=anywhere))
            found |= {
                ("pod to pod", family): one.asks(second[family], 8000) == first[family],
                ("pod to outside", family): one.asks(outside, 8000) == host,
                ("pod to node", family): bool(one.asks(gateways[family], 8000)),
                ("node to pod", family): bool(node.netns.asks(second[family], 8000)),
                ("outside to host port", family): bool(node.outside.asks(host, 8080)),
            }
    return found


def test_every_way_is_open_once_the_firewall_was_told(blocked, datapath):
    conf = blocked.dual(datapath=datapath)
    pod = blocked.pod()
    blocked.add(conf, pod).succeeds()
    assert open_to_the_outside(blocked, pod) == [False, False]
    first = cooperate(blocked, "ensure")
    assert first, "it was not seen"
    assert not [one for one in first if one[1] or one[2]], first
    assert [way for way, is_open in reached(blocked, conf).items() if not is_open] == []
    assert cooperate(blocked, "look") == first  # with nothing missing


def test_what_somebody_took_out_is_seen_and_put_back(blocked):
    told = cooperate(blocked, "ensure")
    for flush in ("iptables-nft -F FORWARD", "iptables-legacy -F FORWARD", "nft flush ruleset"):
        blocked.netns.run(*flush.split(), check=False)
    for line in BLOCKING["iptables-nft"]:
        blocked.netns.run(*line.split())
    missing = [one for one in cooperate(blocked, "look") if one[2]]
    assert missing
    again = cooperate(blocked, "ensure")
    assert again
    assert not [one for one in again if one[1] or one[2]], (told, again)


def test_what_was_added_is_removed_and_nothing_else(blocked):
    def listed():
        programs = ("iptables-nft-save", "ip6tables-nft-save", "iptables-legacy-save")
        shown = [blocked.netns.run(one, "-t", "filter").stdout for one in programs]
        lines = "\n".join([*shown, blocked.nft()]).splitlines()
        return [one for one in lines if not one.startswith(("#", ":"))]

    before = listed()
    cooperate(blocked, "ensure")
    assert listed() != before
    assert cooperate(blocked, "remove")
    assert listed() == before
    assert cooperate(blocked, "remove") == []


def test_a_firewall_that_blocks_nothing_is_left_alone(node):
    node.netns.run("iptables-nft", "-A", "FORWARD", "-s", "198.51.100.0/24", "-j", "DROP")
    before = node.nft()
    assert cooperate(node, "ensure") == []
    assert node.nft() == before


def test_network_policies_of_another_program_stay_in_force(node):
    """kube-router, which k3s has built in, drops what a policy forbids before anything else."""
    for line in (
        "-N KUBE-ROUTER-FORWARD",
        "-A KUBE-ROUTER-FORWARD -p tcp --dport 8000 -j DROP",
        "-I FORWARD -j KUBE-ROUTER-FORWARD",
        "-N DOCKER-USER",
        "-I FORWARD -j DOCKER-USER",
        "-P FORWARD DROP",
    ):
        node.netns.run("iptables-nft", *line.split())
    cooperate(node, "ensure")
    pod = node.pod()
    node.add(node.dual(), pod).succeeds()
    with node.outside.serving(8000), node.outside.serving(8001):
        assert pod.asks(node.OUTSIDE_IP, 8001)
        assert not pod.asks(node.OUTSIDE_IP, 8000)


def nft(node, *lines):
    for line in lines:
        node.netns.run("nft", line)


OTHER_TABLE = (
    "add table inet mine",
    "add chain inet mine forward {type filter hook forward priority 0;}",
)


@pytest.mark.parametrize(
    "rules",
    [
        ["counter drop"],
        ["meta mark set 1 drop"],
        ["ct mark set 1 drop"],
        ["log drop"],
        ["meta nfproto ipv4 reject", "meta nfproto ipv6 drop"],
        ["ip saddr 198.51.100.1 accept", "limit rate 1/second log", "drop"],
    ],
    ids=lambda rules: rules[0],
)
def test_however_a_filter_drops_the_rest_it_is_told(node, rules):
    nft(node, *OTHER_TABLE, *(f"add rule inet mine forward {rule}" for rule in rules))
    pod = node.pod()
    node.add(node.dual(), pod).succeeds()
    assert open_to_the_outside(node, pod) == [False, False]
    ((_, problem, missing, added),) = cooperate(node, "ensure")
    assert (problem, missing, added) == ("", (), ("chain headcni-forward",))
    assert open_to_the_outside(node, pod) == [True, True]


@pytest.mark.parametrize(
    "chain",
    [
        "inet mine early {type filter hook prerouting priority -300;policy drop;}",
        "inet mine late {type filter hook postrouting priority 0;policy drop;}",
        "bridge mine forward {type filter hook forward priority 0;policy drop;}",
    ],
    ids=["prerouting", "postrouting", "bridge"],
)
def test_what_cannot_be_told_is_named(node, chain):
    nft(node, f"add table {chain.split()[0]} mine", f"add chain {chain}")
    ((name, problem, _, _),) = cooperate(node, "ensure")
    assert "mine" in name
    assert "where HeadCNI adds nothing" in problem
    assert "nft list chain" in problem


def test_the_operators_own_drops_stay_in_force(node):
    """All but those of FORWARD and DOCKER-USER, where others come and go at the top."""
    nft(
        node,
        *OTHER_TABLE,
        "add rule inet mine forward ip daddr 192.0.2.2 tcp dport 8000 drop",
        "add rule inet mine forward counter reject",
    )
    for line in ("-P INPUT DROP", "-A INPUT -p tcp --dport 8001 -j DROP"):
        node.netns.run("iptables-nft", *line.split())
    assert not [one for one in cooperate(node, "ensure") if one[1] or one[2]]
    pod = node.pod()
    gateway = node.add(node.conf(), pod).ok["ips"][0]["gateway"]
    with node.outside.serving(8000), node.outside.serving(8002):
        assert pod.asks(node.OUTSIDE_IP, 8002)
        assert not pod.asks(node.OUTSIDE_IP, 8000)
    with node.netns.serving(8001), node.netns.serving(8002):
        assert pod.asks(gateway, 8002)
        assert not pod.asks(gateway, 8001)


def test_iptables_can_still_list_what_it_wrote(node):
    for table, chain in (("filter", "FORWARD"), ("mangle", "FORWARD")):
        node.netns.run("iptables-nft", "-t", table, "-P", chain, "DROP")
    cooperate(node, "ensure")
    for table in ("filter", "mangle"):
        assert "HEADCNI-FORWARD" in node.netns.run("iptables-nft", "-t", table, "-S").stdout


def test_chains_of_others_stay_when_ours_are_removed(node):
    nft(
        node,
        *OTHER_TABLE,
        "add rule inet mine forward counter drop",
        "add chain inet mine headcni-allow",
        "add chain inet mine headcni-input",
        "add rule inet mine headcni-input ip saddr 198.51.100.1 accept",
    )
    node.netns.run("iptables-nft", "-P", "FORWARD", "DROP")
    before = node.nft()
    cooperate(node, "ensure")
    node.netns.run("iptables-nft", "-A", "FORWARD", "-i", "eth5", "-j", "HEADCNI-FORWARD")
    assert not [one for one in cooperate(node, "ensure") if one[1] or one[2]]
    cooperate(node, "remove")
    left = node.nft()
    assert "chain HEADCNI-FORWARD {\n\t}" in left  # the operator's rule leads to it
    assert "jump headcni-forward" not in left
    assert left.count("headcni-") == before.count("headcni-")


def test_what_changes_during_a_look_is_looked_at_again(node):
    node.netns.run("iptables-nft", "-P", "FORWARD", "DROP")
    first, second = cooperate(node, "meanwhile")
    assert first or second
    assert not [one for one in cooperate(node, "ensure") if one[1] or one[2]]
