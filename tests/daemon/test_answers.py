"""Whom the node answers in daemon mode: tailnet peers by their own addresses, on the chosen ports.

A peer's network namespace stands in for the tailnet, behind a link with the TUN's name. With real
tailscaleds and a real Headscale it is in test_namespace.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from typing import Any

import pytest
from cni_node import Namespace
from mesh_node import BareNode, bare_node

from headcni import settings as configuration
from headcni.datapath import host_firewall, netns
from headcni.mesh import pod_traffic

NODE = {4: "100.64.0.1", 6: "fd7a:115c:a1e0::1"}
PEER = {4: "100.64.0.9", 6: "fd7a:115c:a1e0::9"}
LINK = {4: "192.168.255.253", 6: "fd68:6561:6463:6e69::1"}
INSIDE = {4: "192.168.255.254", 6: "fd68:6561:6463:6e69::2"}
GATEWAY = {4: "10.42.1.1", 6: "fd42:0:0:1::1"}  # of this node's pods
POD = {4: "10.42.2.5", 6: "fd42:0:0:2::5"}  # of another node
GONE = {4: "10.42.3.5", 6: "fd42:0:0:3::5"}  # of a node that the namespace has no route to
SERVICE = {4: "10.96.0.80", 6: "fd96::80"}
CLUSTER = ["10.42.0.0/16", "fd42::/32"]
BEHIND = "203.0.113.9"  # behind a subnet router
ANY = {4: "0.0.0.0", 6: "::"}

# What the release before this one had in the namespace.
FORMER = """
table inet headcni_mesh
delete table inet headcni_mesh
table inet headcni_mesh { comment "headcni 1c1ad4af2b4f38f1ff5b45a4"
  chain prerouting {
    type nat hook prerouting priority dstnat; policy accept;
    iifname "tailscale0" fib daddr type local dnat ip to 192.168.255.253 comment "rule 1"
    iifname "tailscale0" fib daddr type local dnat ip6 to fd68:6561:6463:6e69::1 comment "rule 2"
  }
  chain postrouting {
    type nat hook postrouting priority srcnat; policy accept;
    oifname "tailscale0" ip saddr 192.168.255.253 masquerade comment "rule 1"
    oifname "eth0" ip daddr 192.168.255.253 masquerade comment "rule 2"
    oifname "tailscale0" ip6 saddr fd68:6561:6463:6e69::1 masquerade comment "rule 3"
    oifname "eth0" ip6 daddr fd68:6561:6463:6e69::1 masquerade comment "rule 4"
  }
}
"""


class Tailnet:
    """The node, and a peer that reaches it."""

    def __init__(self, node: BareNode, peer: Namespace) -> None:
        self.node, self.peer = node, peer

    def plug(self) -> None:
        inside, peer = self.node.inside, self.peer
        inside.ip(f"link add tailscale0 type veth peer name eth0 netns {peer.name}")
        for version, length in ((4, 32), (6, 128)):
            inside.ip(
                f"addr add {NODE[version]}/{length} dev tailscale0 {'nodad' * (version == 6)}"
            )
            for own in (PEER, POD):
                flag = "nodad" if version == 6 else ""
                peer.ip(f"addr add {own[version]}/{length} dev eth0 {flag}")
        peer.ip(f"addr add {BEHIND}/32 dev eth0")
        inside.ip("link set tailscale0 up")
        peer.ip("link set eth0 up")
        for version in (4, 6):
            peer.ip(f"-{version} route add {NODE[version]} dev eth0 src {PEER[version]}")
            for own in (PEER, POD):
                inside.ip(f"-{version} route add {own[version]} dev tailscale0")
            for far in (LINK, GATEWAY):
                self.route(far, version, PEER)
        inside.ip(f"route add {BEHIND} dev tailscale0")

    def route(self, far: dict[int, str], version: int, src: dict[int, str]) -> None:
        """The peer's way to an address of the node, and its own address on it."""
        way = f"via {NODE[version]} dev eth0 onlink src {src[version]}"
        self.peer.ip(f"-{version} route replace {far[version]} {way}")

    def seen(self, port: int, protocol: str = "tcp", version: int = 4, bound: str = "") -> str:
        """The address that a server of the node sees; "" if the peer is not answered."""
        with self.node.netns.serving(port, protocol, bound or ANY[version]):
            return self.asked(NODE[version], port, protocol)

    def asked(self, address: str, port: int, protocol: str = "tcp") -> str:
        return self.peer.asks(address, port, protocol).removeprefix("::ffff:")

    def configure(self, answered: Any) -> None:
        self.node.changes = {"answer_for_node": answered, "cluster_cidrs": CLUSTER}
        self.node.ensure()
        assert self.node.check() == []

    @contextmanager
    def told(self, answered: Any = True, manage: bool = True) -> Iterator[list[str]]:
        """The node's other firewalls, as the daemon leaves them."""
        told = {"tailscale": {"mode": "daemon", "answerForNode": answered}}
        config, wrong = configuration.parse(json.dumps(told).encode())
        assert not wrong
        with netns.opened(self.node.netns.path) as fd, netns.entered(fd):
            own = ip_network("10.42.1.0/24"), ip_network("fd42:0:0:1::/64")
            cluster = ip_network("10.42.0.0/16"), ip_network("fd42::/32")
            traffic = pod_traffic.of(config, own, cluster, (), 0)
            seen = host_firewall.Cooperation(manage)
            said = [one.in_words() for one in seen.ensure(traffic)]
            if manage:
                assert [one.missing for one in host_firewall.look(traffic) if one.missing] == []
            yield said


@pytest.fixture
def tailnet(tmp_path):
    with bare_node(tmp_path) as node:
        peer = Namespace.create("peer")
        try:
            node.ensure()
            made = Tailnet(node, peer)
            made.plug()
            yield made
        finally:
            peer.remove()


@pytest.mark.parametrize(
    ("version", "bound"), [(4, "0.0.0.0"), (4, "::"), (6, "::")], ids=["v4", "v4 at ::", "v6"]
)
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_server_on_the_node_sees_the_peers_own_address(tailnet, version, bound, protocol):
    assert tailnet.seen(7000, protocol, version, bound) == PEER[version]


def test_answers_go_back_by_the_link_whatever_routes_the_node_has(tailnet):
    """As a tailscaled of the node's own has them, and one that somebody else has made."""
    host = tailnet.node.netns
    for family, via, far in (("-4", "192.0.2.2", PEER[4]), ("-6", "2001:db8::2", PEER[6])):
        host.ip(f"{family} rule add priority 5270 lookup 52")
        host.ip(f"{family} route add {far} via {via} table 52")
        host.ip(f"{family} route add {far} via {via}")
    for where in ("all", "default"):
        host.run("sysctl", "-qw", f"net.ipv4.conf.{where}.rp_filter=1")
    assert [tailnet.seen(7000, version=version) for version in (4, 6)] == [PEER[4], PEER[6]]


def test_a_caller_from_behind_a_peer_keeps_its_address_too(tailnet):
    tailnet.peer.ip(f"route replace {NODE[4]} dev eth0 src {BEHIND}")
    assert tailnet.seen(7000) == BEHIND


def test_only_the_ports_of_a_list_are_answered(tailnet):
    tailnet.configure([22, "6443/tcp", "53/udp", "30000-32767", "32000-32768/tcp"])
    asked = [(22, "tcp"), (22, "udp"), (6443, "tcp"), (53, "udp"), (31000, "tcp"), (32768, "tcp")]
    for version in (4, 6):
        for port, protocol in asked:
            assert tailnet.seen(port, protocol, version) == PEER[version], (port, protocol)
        for port, protocol in [(23, "tcp"), (6443, "udp"), (53, "tcp"), (32768, "udp")]:
            assert tailnet.seen(port, protocol, version) == "", (port, protocol)


@pytest.mark.parametrize("answered", [["22"], False], ids=["a list", "false"])
def test_other_addresses_of_the_node_are_no_way_around_the_list(tailnet, answered):
    host = tailnet.node.netns
    host.ip("link add pods0 type bridge")
    for version, length in ((4, 24), (6, 64)):
        flag = "nodad" if version == 6 else ""
        host.ip(f"addr add {GATEWAY[version]}/{length} dev pods0 {flag}")
        way = f"via {INSIDE[version]} dev headcni01"
        host.ip(f"-{version} route add {POD[version]} {way} src {GATEWAY[version]}")
    host.ip("link set pods0 up")
    for version in (4, 6):
        with host.serving(7000, address=ANY[version]):
            tailnet.configure(True)
            assert tailnet.asked(GATEWAY[version], 7000) == PEER[version]
            tailnet.configure(answered)
            assert tailnet.asked(GATEWAY[version], 7000) == ""
            assert tailnet.asked(LINK[version], 7000) == ""
            if version == 4:
                tailnet.route(GATEWAY, version, {4: BEHIND})
                assert tailnet.asked(GATEWAY[version], 7000) == ""
            # Pods of other nodes still reach this one.
            tailnet.route(GATEWAY, version, POD)
            assert tailnet.asked(GATEWAY[version], 7000) == POD[version]


@pytest.mark.parametrize("version", [4, 6])
def test_a_port_that_leads_elsewhere_is_no_way_around_the_list_either(tailnet, version):
    """As a node port or a host port does: such a packet is forwarded, past the hook input."""
    host, pod = tailnet.node.netns, Namespace.create("pod")
    inside = {4: "10.42.1.5", 6: "fd42:0:0:1::5"}[version]
    length, flag = (24, "") if version == 4 else (64, "nodad")
    try:
        host.ip(f"link add pods0 type veth peer name eth0 netns {pod.name}")
        for where, link, address in ((host, "pods0", GATEWAY[version]), (pod, "eth0", inside)):
            where.ip(f"addr add {address}/{length} dev {link} {flag}")
            where.ip(f"link set {link} up")
        pod.ip(f"-{version} route add default via {GATEWAY[version]}")
        family = "ip" if version == 4 else "ip6"
        to = f"{inside}:7000" if version == 4 else f"[{inside}]:7000"
        hook = "type nat hook prerouting priority -100"
        rule = f"fib daddr type local tcp dport 30080 dnat {family} to {to}"
        host.run("nft", f"table inet ports {{ chain p {{ {hook}; {rule}; }} ; }}")
        with pod.serving(7000, address=ANY[version]):
            tailnet.configure(True)
            assert tailnet.asked(GATEWAY[version], 30080) == PEER[version]
            tailnet.configure([22])
            assert tailnet.asked(GATEWAY[version], 30080) == ""
            tailnet.configure([22, 30080])
            assert tailnet.asked(NODE[version], 30080) == PEER[version]
    finally:
        pod.remove()


@pytest.mark.parametrize("version", [4, 6])
def test_a_neighbour_of_the_node_does_not_reach_it_by_the_links_address(tailnet, version):
    near = {4: "192.0.2.1", 6: "2001:db8::1"}[version]
    outside = tailnet.node.outside
    outside.ip(f"-{version} route add {LINK[version]} via {near}")
    with tailnet.node.netns.serving(7000, address=ANY[version]):
        assert outside.asks(near, 7000)
        assert outside.asks(LINK[version], 7000) == ""
        assert tailnet.node.netns.asks(LINK[version], 7000) == LINK[version]


@contextmanager
def redirecting(tailnet: Tailnet, version: int) -> Iterator[None]:
    """A node port and a service, as kube-proxy has them, that lead to a pod of another node. The
    daemon's route to the pod is in a table of its own."""
    host, family = tailnet.node.netns, {4: "ip", 6: "ip6"}[version]
    cluster = CLUSTER[0] if version == 4 else CLUSTER[1]
    for far in (POD, GONE):
        way = f"via {INSIDE[version]} dev headcni01"
        host.ip(f"-{version} route add {far[version]} {way} src {LINK[version]} table 5200")
    host.ip(f"-{version} rule add priority 5200 to {cluster} lookup 5200")
    tailnet.route(SERVICE, version, PEER)
    to = f"{POD[4]}:7000" if version == 4 else f"[{POD[6]}]:7000"
    host.run(
        "nft",
        f"table {family} proxy {{ chain in {{ type nat hook prerouting priority -100; "
        f"{family} daddr {LINK[version]} tcp dport 30080 dnat to {to}; "
        f"{family} daddr {SERVICE[version]} tcp dport 80 dnat to {to}; }}; "
        "chain out { type nat hook postrouting priority 100; ct status dnat masquerade; }; }",
    )
    with tailnet.peer.serving(7000, address=POD[version]):
        yield


@pytest.mark.parametrize("version", [4, 6])
def test_a_node_port_may_lead_to_a_pod_of_another_node(tailnet, version):
    """The packet goes back into the mesh, and so does the answer."""
    with redirecting(tailnet, version):
        for answered, seen in ((True, NODE[version]), (["30080"], NODE[version]), (["22"], "")):
            tailnet.configure(answered)
            assert tailnet.asked(NODE[version], 30080) == seen, answered


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("answered", [True, ["22"], False], ids=["true", "a list", "false"])
def test_a_routed_service_may_lead_to_a_pod_of_another_node(tailnet, version, answered):
    """The ports of the node are no ports of services."""
    tailnet.configure(answered)
    with redirecting(tailnet, version):
        assert tailnet.asked(SERVICE[version], 80) == NODE[version]


def test_so_it_may_while_the_clusters_range_is_unknown(tailnet):
    tailnet.node.changes = {}
    assert tailnet.node.check() == []
    for version in (4, 6):
        with redirecting(tailnet, version):
            assert tailnet.asked(NODE[version], 30080) == NODE[version]


@pytest.mark.parametrize("version", [4, 6])
def test_what_comes_by_the_mesh_for_a_lost_node_stays_off_the_underlay_and_ends(tailnet, version):
    """The namespace has no route to a node that it has lost. The host still has one."""
    host, family = tailnet.node.netns, {4: "ip", 6: "ip6"}[version]
    with redirecting(tailnet, version):
        tailnet.route(GONE, version, PEER)
        hook = "type filter hook forward priority 0"
        to = f"{family} daddr {GONE[version]}"
        rules = f'oifname "eth0" {to} counter; oifname "headcni01" {to} counter'
        host.run("nft", f"table inet count {{ chain f {{ {hook}; {rules}; }}; }}")
        assert tailnet.asked(GONE[version], 7000, "udp") == ""
        listed = host.run("nft", "list table inet count").stdout
        underlay, mesh = map(int, re.findall(r"packets (\d+)", listed))
        assert underlay == 0 and 0 < mesh < 10


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("answered", [True, False])
def test_tailscaleds_own_packets_never_go_back_into_the_mesh(tailnet, version, answered):
    """The node's network may have such addresses, and a peer may call one of its pods' addresses
    its own."""
    tailnet.configure(answered)
    outside, near = tailnet.node.outside, {4: "192.0.2.1", 6: "2001:db8::1"}[version]
    with redirecting(tailnet, version):
        flag = "nodad" if version == 6 else ""
        outside.ip(f"addr add {GONE[version]}/{32 if version == 4 else 128} dev eth0 {flag}")
        with outside.serving(41641, "udp", GONE[version]):
            assert tailnet.node.inside.asks(GONE[version], 41641, "udp") == near


def test_a_destination_that_nobody_has_does_not_go_round_in_circles(tailnet):
    host = tailnet.node.netns
    host.ip(f"route add 100.64.9.9 via {INSIDE[4]} dev headcni01 src 192.0.2.1")
    before = host.ip_json("-s link show headcni01")[0]["stats64"]["rx"]["packets"]
    assert host.asks("100.64.9.9", 7000, "udp") == ""
    after = host.ip_json("-s link show headcni01")[0]["stats64"]["rx"]["packets"]
    assert after - before < 10


def test_the_namespace_of_an_earlier_release_is_converted(tailnet):
    node = tailnet.node
    node.inside.run("nft", "-f", "-", input=FORMER)
    for family in ("-4", "-6"):
        for priority in (5188, 5189, 5204):
            node.netns.ip(f"{family} rule del priority {priority}")
    for version in (4, 6):
        node.netns.ip(f"-{version} route flush table 5201")
    assert tailnet.seen(7000) in ("192.168.255.254", "")
    assert node.check()
    assert node.ensure()
    assert node.check() == []
    assert [tailnet.seen(7000, version=version) for version in (4, 6)] == [PEER[4], PEER[6]]


# Other firewalls of the node.


@pytest.fixture(params=["iptables-nft", "iptables-legacy"])
def beside_tailscaled(tailnet, request):
    """With the chain of the node's own tailscaled, as `iptables -S` shows it."""
    program = request.param
    for line in (
        "-N ts-input",
        "-I INPUT 1 -j ts-input",
        "-A ts-input -s 100.115.92.0/23 ! -i tailscale0 -j RETURN",
        "-A ts-input -s 100.64.0.0/10 ! -i tailscale0 -j DROP",
        "-A ts-input -i tailscale0 -j ACCEPT",
        "-A INPUT -p tcp --dport 7999 -j DROP",
    ):
        tailnet.node.netns.run(program, *line.split())
    tailnet.listed = lambda: tailnet.node.netns.run(program, "-S").stdout
    return tailnet


def test_the_nodes_own_tailscaled_keeps_no_peer_out_and_the_operators_rules_hold(
    beside_tailscaled,
):
    before = beside_tailscaled.listed()
    assert beside_tailscaled.seen(7000) == ""
    with beside_tailscaled.told() as said:
        assert any("HeadCNI added a RETURN to ts-input" in line for line in said), said
        assert beside_tailscaled.seen(7000) == PEER[4]
        assert beside_tailscaled.seen(7999) == ""
        assert host_firewall.remove() == ["iptables ts-input RETURN"]
        assert beside_tailscaled.listed() == before


def test_with_firewalls_left_alone_it_is_said_that_peers_are_not_answered(beside_tailscaled):
    with beside_tailscaled.told(manage=False) as said:
        assert any(
            "so this node does not answer them without iptables" in line
            and "-I ts-input -i headcni01 -s 100.64.0.0/10 -d 192.168.255.253 -j RETURN" in line
            for line in said
        ), said
        assert beside_tailscaled.seen(7000) == ""
        assert beside_tailscaled.seen(7000, version=6) == PEER[6]


def test_the_rule_in_tailscaleds_chain_goes_when_it_is_not_needed(beside_tailscaled):
    before = beside_tailscaled.listed()
    with beside_tailscaled.told():
        assert "HeadCNI" in beside_tailscaled.listed()
    with beside_tailscaled.told(answered=False):
        assert beside_tailscaled.listed() == before


BLOCKING = {
    "iptables": [
        f"{program}-nft -P {chain} DROP"
        for program in ("iptables", "ip6tables")
        for chain in ("INPUT", "FORWARD", "OUTPUT")
    ]
    + ["iptables-nft -A INPUT -p tcp --dport 7999 -j DROP"],
    "nftables": [
        "nft add table inet filter",
        *(
            f"nft add chain inet filter {hook} {{type filter hook {hook} priority 0;policy drop;}}"
            for hook in ("input", "forward", "output")
        ),
        "nft add rule inet filter input tcp dport 7999 drop",
    ],
}


@pytest.mark.parametrize("kind", BLOCKING)
def test_firewalls_that_block_by_default_let_peers_in_and_keep_the_operators_drops(tailnet, kind):
    for line in BLOCKING[kind]:
        tailnet.node.netns.run(*line.split(" ", 1) if kind == "nftables" else line.split())
    assert tailnet.seen(7000) == ""
    with tailnet.told():
        for version in (4, 6):
            assert tailnet.seen(7000, version=version) == PEER[version]
        assert tailnet.seen(7999) == ""
    with tailnet.told(["7000/tcp", "7100-7200"]):
        assert tailnet.seen(7000, version=6) == PEER[6]
        assert [tailnet.seen(7150, "udp"), tailnet.seen(7001)] == [PEER[4], ""]


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("kind", BLOCKING)
def test_they_let_services_lead_to_pods_of_other_nodes_too(tailnet, kind, answered, version):
    tailnet.configure(answered)
    for line in BLOCKING[kind]:
        tailnet.node.netns.run(*line.split(" ", 1) if kind == "nftables" else line.split())
    with redirecting(tailnet, version), tailnet.told(answered):
        assert tailnet.asked(SERVICE[version], 80) == NODE[version]
        host_firewall.remove()
        assert tailnet.asked(SERVICE[version], 80) == ""
