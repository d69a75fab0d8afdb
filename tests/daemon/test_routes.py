"""Routes to the other nodes' pods: first on this kernel with a tailnet that we make up (thousands
of peers, expired keys and clashing claims are not to be had otherwise), then on a lab."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from cni_node import ECHO, Namespace
from lab_command import LabCommand
from leftovers import assert_nothing_left
from patience import until
from pyroute2 import IPRoute

from headcni.datapath import netns
from headcni.mesh import routes as routes_module
from headcni.mesh.localapi import LocalApi, Note, Peer, Status, TailscaleError
from headcni.mesh.mesh import Mesh
from headcni.mesh.own_networks import forget_own_networks
from headcni.mesh.prefs import NodePrefs
from headcni.mesh.route_socket import RouteSocket
from headcni.mesh.routes import Report, RouteReconciler
from lab.layout import Lab
from lab.machines import leader

MESH = Mesh(
    cluster_cidrs=(ip_network("10.244.0.0/16"), ip_network("fd44::/32")),
    own_cidrs=(ip_network("10.244.1.0/24"), ip_network("fd44:0:1::/64")),
    sources=(ip_address("10.244.1.1"), ip_address("fd44:0:1::1")),
    mtu=1280,
)
RTN_UNREACHABLE = 7
UNREACHABLE = {"unreachable": True}
TAG = "tag:headcni"
TAGGED = replace(MESH, peer_tags=(TAG,), service_cidrs=(ip_network("10.96.0.0/12"),))


def peer(number: int, *routes: str, online: bool = True, expired: bool = False) -> Peer:
    routes = routes or (f"10.244.{number}.0/24", f"fd44:0:{number:x}::/64")
    return Peer(str(number), f"node{number}", routes, routes, online, expired)


def node_peer(number: int, *routes: str, online: bool = True) -> Peer:
    """A peer that has the mesh's tag."""
    return peer(number, *routes, online=online)._replace(tags=(TAG,))


def stranger(*routes: str) -> Peer:
    """A device of somebody's that is in the tailnet, too."""
    return Peer("666", "laptop", routes, routes, True, False)


@dataclass(frozen=True)
class Tailnet(LocalApi):
    """What tailscaled would say, and its bus."""

    peers: list[Peer] = field(default_factory=list)
    state: list[str] = field(default_factory=lambda: ["Running"])
    notes: queue.Queue[Note | None] = field(default_factory=queue.Queue)
    tags: tuple[str, ...] = (TAG,)  # of this node

    def status(self, peers: bool = True) -> Status:
        if self.state[0] == "gone":
            raise TailscaleError("no-socket", "tailscaled's socket is not there")
        served = tuple(map(str, MESH.own_cidrs))
        return Status(
            "1.102.5", self.state[0], "node1", (), served, (), tuple(self.peers), "", self.tags
        )

    def watch(self, silence: float = 0) -> Tailnet:  # type: ignore[override]
        return self

    def __iter__(self) -> Iterator[Note]:
        return iter(self.notes.get, None)

    def close(self) -> None:
        self.notes.put(None)

    def set(self, *peers: Peer) -> None:
        self.peers[:] = peers


@dataclass
class Node:
    """A namespace with a tunnel and a pod bridge, and a route manager in this process."""

    host: Namespace
    tailnet: Tailnet
    made: list[RouteReconciler] = field(default_factory=list)

    def manager(self, mesh: Mesh = MESH, **how: object) -> RouteReconciler:
        with self.inside():
            self.made.append(RouteReconciler(mesh, self.tailnet, **how))
        return self.made[-1]

    @contextmanager
    def running(self, mesh: Mesh = MESH, **how: object) -> Iterator[list[Report]]:
        reports: list[Report] = []
        manager = self.manager(mesh, on_report=reports.append, **how)
        with self.inside():
            manager.start()
        try:
            until(lambda: reports)
            yield reports
        finally:
            manager.stop()

    @contextmanager
    def inside(self) -> Iterator[None]:
        with netns.opened(self.host.path) as fd, netns.entered(fd):
            yield

    def add_tunnel(self, name: str = "tailscale0") -> None:
        self.host.ip(f"tuntap add dev {name} mode tun")
        self.host.ip(f"link set {name} up")

    def routes(self) -> dict[str, dict[str, object]]:
        """By destination, as pyroute2 reads them."""
        found = {}
        with self.inside(), IPRoute() as kernel:
            links = {link["index"]: link.get("ifname") for link in kernel.get_links()}
            for family in (socket.AF_INET, socket.AF_INET6):
                for route in kernel.get_routes(family=family, table=5200):
                    metrics = route.get("metrics")
                    if route["type"] == RTN_UNREACHABLE:
                        found[f"{route.get('dst')}/{route['dst_len']}"] = UNREACHABLE
                        continue
                    found[f"{route.get('dst')}/{route['dst_len']}"] = {
                        "dev": links.get(route.get("oif")),
                        "via": route.get("gateway"),
                        "src": route.get("prefsrc"),
                        "mtu": metrics.get("mtu") if metrics else None,
                        "proto": route["proto"],
                    }
        return found

    def rules(self) -> set[str]:
        shown = self.host.ip("rule") + self.host.ip("-6 rule")
        return {" ".join(line.split()) for line in shown.splitlines() if "proto 72" in line}

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        """What `ip monitor` sees of routes and rules meanwhile."""
        command = ["ip", "-n", self.host.name, "monitor", "route", "rule"]
        lines: list[str] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as monitor:
            try:
                # It is listening once it tells of a route of ours.
                assert monitor.stdout is not None
                time.sleep(0.3)
                self.host.ip("route add 192.0.2.1/32 dev lo table 99")
                assert "192.0.2.1" in monitor.stdout.readline()
                yield lines
                self.host.ip("route del 192.0.2.1/32 dev lo table 99")
                for line in monitor.stdout:
                    if "192.0.2.1" in line:
                        break
                    lines.append(line.strip())
            finally:
                monitor.kill()


@pytest.fixture
def node() -> Iterator[Node]:
    host = Namespace.create("mesh")
    host.ip("link add headcni0 type bridge")
    host.ip("addr add 10.244.1.1/24 dev headcni0")
    host.ip("addr add fd44:0:1::1/64 dev headcni0 nodad")
    host.ip("link set headcni0 up")
    made = Node(host, Tailnet())
    made.add_tunnel()
    yield made
    host.remove()


def test_each_peers_pods_get_a_route_into_the_tunnel(node):
    node.tailnet.set(peer(2), peer(3))
    report = node.manager().reconcile()
    expected = {"dev": "tailscale0", "via": None, "mtu": 1280, "proto": 72}
    assert node.routes() == {
        "10.244.2.0/24": {**expected, "src": "10.244.1.1"},
        "10.244.3.0/24": {**expected, "src": "10.244.1.1"},
        "fd44:0:2::/64": {**expected, "src": "fd44:0:1::1"},
        "fd44:0:3::/64": {**expected, "src": "fd44:0:1::1"},
    }
    assert node.rules() == {
        "5199: from all to 10.244.1.0/24 lookup main proto 72",
        "5199: from all to fd44:0:1::/64 lookup main proto 72",
        "5200: from all to 10.244.0.0/16 lookup 5200 proto 72",
        "5200: from all to fd44::/32 lookup 5200 proto 72",
    }
    assert len(report.added) == 8
    assert (report.removed, report.repaired, report.alarms) == ((), (), ())
    assert all(condition.ok for condition in report.conditions)


def test_what_a_peer_serves_outside_the_cluster_is_none_of_ours(node):
    node.tailnet.set(peer(2, "0.0.0.0/0", "10.0.0.0/8", "192.168.7.0/24", "10.244.2.0/24"))
    node.manager().reconcile()
    assert list(node.routes()) == ["10.244.2.0/24"]


def test_a_second_pass_sends_nothing(node):
    node.tailnet.set(peer(2), peer(3))
    manager = node.manager()
    manager.reconcile()
    with node.watched() as seen:
        reports = [manager.reconcile(), manager.reconcile(), manager.reconcile(ask=False)]
    assert seen == []
    assert not any(report.changed for report in reports)


@pytest.mark.parametrize("state", ["Running", "Starting", "gone"])
def test_a_new_manager_takes_over_what_is_there(node, state):
    node.tailnet.set(peer(2), peer(3))
    with node.running():
        pass
    before = node.routes()
    assert len(before) == 4
    node.tailnet.state[0] = state
    with node.watched() as seen, node.running():
        pass
    assert seen == []
    assert node.routes() == before


def test_while_tailscaled_is_away_the_routes_stay(node):
    node.tailnet.set(peer(2))
    manager = node.manager()
    manager.reconcile()
    node.tailnet.set()
    for state in ("gone", "NoState", "Starting", "Stopped", "NeedsLogin"):
        node.tailnet.state[0] = state
        report = manager.reconcile()
        assert not report.changed
        assert [c.name for c in report.conditions if not c.ok] == ["tailscale"]
    node.tailnet.state[0] = "Running"
    assert len(manager.reconcile().removed) == 2


@pytest.mark.parametrize(
    "claimed", ["10.244.1.0/24", "10.244.1.128/25", "10.244.0.0/23", "10.244.0.0/16", "fd44::/32"]
)
def test_a_peer_that_claims_our_own_pods_gets_no_route_and_raises_an_alarm(node, claimed):
    node.tailnet.set(peer(2), peer(9, claimed))
    report = node.manager().reconcile()
    assert set(node.routes()) == {"10.244.2.0/24", "fd44:0:2::/64"}
    (alarm,) = report.alarms
    assert (alarm.kind, alarm.prefix) == ("own-cidr", claimed)
    assert alarm.claimants == ("this node", "node9")


def test_our_own_pods_are_local_even_if_tailscaled_routes_them_away(node):
    node.host.ip("rule add pref 5270 lookup 52")
    node.host.ip("route add 10.244.1.0/24 dev tailscale0 table 52")
    assert "tailscale0" in node.host.ip("route get 10.244.1.7")
    node.manager().reconcile()
    assert "dev headcni0" in node.host.ip("route get 10.244.1.7")


HOST_MODE = replace(MESH, own_networks_first=True)


def with_a_lan(node: Node) -> None:
    """An interface in two networks, a static route by way of it, and a default route; and a peer
    that advertises all of them, and more."""
    node.host.ip("link add eth0 type veth peer name lan0")
    node.host.ip("addr add 192.168.7.10/24 dev eth0")
    node.host.ip("addr add fd77::10/64 dev eth0 nodad")
    node.host.ip("link set lan0 up")
    node.host.ip("link set eth0 up")
    node.host.ip("route add 172.20.0.0/16 via 192.168.7.1")
    node.host.ip("route add default via 192.168.7.1")
    node.host.ip("route add 128.0.0.0/1 via 192.168.7.1")
    for family, networks in (
        ("", ("192.168.7.0/24", "192.168.7.128/25", "172.20.4.0/24", "198.51.100.0/24")),
        ("-6 ", ("fd77::/64", "fd78::/64")),
    ):
        node.host.ip(f"{family}rule add pref 5270 lookup 52")
        for network in networks:
            node.host.ip(f"{family}route add {network} dev tailscale0 table 52")


def way(node: Node, address: str) -> str:
    return node.host.ip(f"route get {address}").partition(" dev ")[2].split()[0]


def test_the_nodes_own_networks_stay_its_own_whatever_a_peer_advertises(node):
    with_a_lan(node)
    own = ("192.168.7.20", "192.168.7.200", "172.20.4.9", "fd77::20")
    assert {way(node, address) for address in own} == {"tailscale0"}
    manager = node.manager(HOST_MODE)
    manager.reconcile()
    assert {way(node, address) for address in own} == {"eth0"}
    assert {way(node, address) for address in ("198.51.100.9", "fd78::9")} == {"tailscale0"}
    assert way(node, "203.0.113.9") == "eth0"
    with node.watched() as seen:
        assert not manager.reconcile().changed
    assert seen == []
    manager.remove_all()
    assert way(node, "192.168.7.20") == "tailscale0"


def test_the_rule_for_own_networks_comes_back_when_somebody_deletes_it(node):
    with_a_lan(node)
    with node.running(HOST_MODE, interval=60.0):
        node.host.ip("rule del pref 5205")
        until(lambda: way(node, "192.168.7.20") == "eth0")


def test_routes_are_accepted_only_when_the_nodes_own_networks_come_first(node):
    """tailscaled is told within the same pass."""
    with_a_lan(node)
    ways = []

    class Prefs:
        def ensure(self, _: object) -> tuple[str, ...]:
            ways.append(way(node, "192.168.7.20"))
            return ()

    node.manager(HOST_MODE, prefs=Prefs()).reconcile()
    assert ways == ["eth0"]


def test_daemon_mode_leaves_the_rule_of_host_mode_until_that_is_dropped(node):
    with_a_lan(node)
    node.manager(HOST_MODE).reconcile()
    node.manager(MESH).reconcile()
    assert way(node, "192.168.7.20") == "eth0"
    with node.inside(), contextlib.closing(RouteSocket()) as kernel:
        assert len(forget_own_networks(kernel)) == 2
    assert way(node, "192.168.7.20") == "tailscale0"


def test_the_rule_for_own_networks_goes_when_it_is_switched_off(node):
    with_a_lan(node)
    node.manager(HOST_MODE).reconcile()
    node.manager(replace(MESH, own_networks_first=False)).reconcile()
    assert way(node, "192.168.7.20") == "tailscale0"


def test_peers_that_serve_the_same_range_raise_an_alarm_that_names_both_and_keep_their_route(node):
    node.tailnet.set(peer(2, "10.244.2.0/24"), peer(7, "10.244.2.0/24"), peer(8, "10.244.8.0/24"))
    report = node.manager().reconcile()
    assert set(node.routes()) == {"10.244.2.0/24", "10.244.8.0/24"}
    (alarm,) = report.alarms
    assert alarm.kind == "overlap"
    assert set(alarm.claimants) == {"node2", "node7"}
    assert "node2" in alarm.message
    assert "node7" in alarm.message
    assert not alarm.holds_back


def test_an_alarm_lasts_until_its_cause_is_gone(node):
    node.tailnet.set(peer(2), peer(7, "10.244.2.0/24"))
    manager = node.manager()
    assert [bool(manager.reconcile().alarms) for _ in range(3)] == [True, True, True]
    node.tailnet.set(peer(2), peer(7))
    assert manager.reconcile().alarms == ()


def test_routes_of_expired_and_of_removed_peers_go(node):
    node.tailnet.set(peer(2), peer(3), peer(4))
    manager = node.manager()
    manager.reconcile()
    node.tailnet.set(peer(2), peer(3, expired=True))
    assert len(manager.reconcile().removed) == 4
    assert set(node.routes()) == {"10.244.2.0/24", "fd44:0:2::/64"}


def test_a_peer_that_is_offline_keeps_its_routes_though_headscale_takes_them_away(node):
    node.tailnet.set(peer(2), peer(3))
    manager = node.manager()
    manager.reconcile()
    away = Peer("2", "node2", (), (), False, False)
    for _ in range(2):
        node.tailnet.set(away, peer(3))
        assert not manager.reconcile().changed
    node.tailnet.set(away._replace(online=True), peer(3))
    assert len(manager.reconcile().removed) == 2


def test_a_node_that_takes_over_an_offline_nodes_pods_raises_no_alarm(node):
    node.tailnet.set(node_peer(2))
    manager = node.manager(TAGGED)
    manager.reconcile()
    away = node_peer(2, online=False)._replace(routes=(), primary=())
    node.tailnet.set(away, node_peer(5, "10.244.2.0/24"))
    report = manager.reconcile()
    assert (report.alarms, report.warnings) == ((), ())
    assert set(node.routes()) == {"10.244.2.0/24", "fd44:0:2::/64"}


SERVICES = "10.96.0.0/12"
ATTACKS = {
    "half of the cluster's range": ("10.244.0.0/17", "fd44::/33"),
    "an unallocated part of it": ("10.244.128.0/17", "fd44:0:8000::/34"),
    "an unallocated node's range": ("10.244.77.0/24", "fd44:0:77::/64"),
    "one pod of another node": ("10.244.2.7/32", "fd44:0:2::7/128"),
    "half of another node's range": ("10.244.2.128/25", "fd44:0:2:0:8000::/65"),
    "this node's own range": ("10.244.1.0/24", "fd44:0:1::/64"),
    "a pod of this node": ("10.244.1.9/32", "fd44:0:1::9/128"),
    "the service range": (SERVICES, "10.96.0.10/32"),
}
INSIDE_A_NODE = ("one pod of another node", "half of another node's range")


A_NEW_NODE = "an unallocated node's range"  # may be a node's claim, but not a device's


@pytest.mark.parametrize(
    ("what", "tagged"),
    [(what, tagged) for what in ATTACKS for tagged in (False, True) if what != A_NEW_NODE]
    + [(A_NEW_NODE, False)],
)
def test_a_claim_to_what_nobody_may_have_gets_no_route_and_is_reported(node, what, tagged):
    claimed = ATTACKS[what]
    attacker = stranger(*claimed)._replace(tags=(TAG,) if tagged else ("tag:other",))
    node.tailnet.set(node_peer(2), node_peer(3))
    manager = node.manager(TAGGED)
    manager.reconcile()
    before = node.routes()
    node.tailnet.set(node_peer(2), node_peer(3), attacker)
    report = manager.reconcile()
    blocked = dict.fromkeys(claimed, UNREACHABLE) if what in INSIDE_A_NODE else {}
    assert node.routes() == {**before, **blocked}
    # The operator lets nodes of the mesh offer the whole range of services (playbooks/names.yml).
    refused = [one for one in claimed if not (tagged and one == SERVICES)]
    assert [str(refusal.prefix) for refusal in report.refusals] == refused
    assert {refusal.peer for refusal in report.refusals} == {"laptop"}
    said = [alarm for alarm in (*report.alarms, *report.warnings) if "laptop" in alarm.claimants]
    assert refused[0] in said[0].message
    held_back = [alarm for alarm in said if alarm.holds_back]
    assert bool(held_back) == (tagged and what == "this node's own range")
    assert all(condition.ok for condition in report.conditions)
    node.tailnet.set(node_peer(2), node_peer(3))
    report = manager.reconcile()
    assert node.routes() == before
    assert (report.refusals, report.alarms, report.warnings) == ((), (), ())


@pytest.mark.parametrize("claimed", [("10.244.2.7/32", "fd44:0:2::7/128"), ("10.244.2.0/25",)])
def test_a_foreign_part_of_an_offline_nodes_range_does_not_take_the_range_away(node, claimed):
    node.tailnet.set(node_peer(2))
    manager = node.manager(TAGGED)
    manager.reconcile()
    before = node.routes()
    away = node_peer(2, online=False)._replace(routes=(), primary=())
    node.tailnet.set(away, stranger(*claimed))
    manager.reconcile()
    assert node.routes() == {**before, **dict.fromkeys(claimed, UNREACHABLE)}
    node.tailnet.set(node_peer(2))
    manager.reconcile()
    assert node.routes() == before


@pytest.mark.parametrize(
    "claimed", [("10.244.2.0/24", "fd44:0:2::/64"), ("10.244.0.0/17", "fd44::/33")]
)
def test_packets_for_an_offline_node_go_to_nobody_while_a_stranger_claims_its_range(node, claimed):
    """tailscaled would hand them to the stranger."""
    node.tailnet.set(node_peer(2))
    manager = node.manager(TAGGED)
    manager.reconcile()
    before = node.routes()
    away = node_peer(2, online=False)._replace(routes=(), primary=())
    node.tailnet.set(away, stranger(*claimed))
    with node.watched() as seen:
        manager.reconcile()
        assert node.routes() == dict.fromkeys(before, UNREACHABLE)
        assert not manager.reconcile().changed
        # The daemon may be restarted meanwhile, and tailscaled be away.
        node.tailnet.state[0] = "gone"
        assert not node.manager(TAGGED).reconcile().changed
        node.tailnet.state[0] = "Running"
        node.tailnet.set(node_peer(2), stranger(*claimed))
        manager.reconcile()
    assert node.routes() == before
    assert [line for line in seen if line.startswith("Deleted")] == []


def test_a_packet_for_a_foreign_part_of_a_nodes_range_is_refused_at_once(node):
    node.tailnet.set(node_peer(2), stranger("10.244.2.7/32", "fd44:0:2::7/128"))
    node.manager(TAGGED).reconcile()
    for address in ("10.244.2.7", "fd44:0:2::7"):
        with pytest.raises(AssertionError, match="No route to host"):
            node.host.ip(f"route get {address}")
    for address in ("10.244.2.8", "fd44:0:2::8"):
        assert "dev tailscale0" in node.host.ip(f"route get {address}")


def test_a_node_may_serve_part_of_its_own_range_again(node):
    node.tailnet.set(node_peer(2, "10.244.2.0/24", "10.244.2.7/32"))
    report = node.manager(TAGGED).reconcile()
    assert set(node.routes()) == {"10.244.2.0/24"}
    assert [refusal.reason for refusal in report.refusals] == ["prefix-length"]


def test_a_node_without_the_tag_does_not_ask_it_of_others_and_says_so(node):
    untagged = replace(node.tailnet, tags=("tag:other",))
    untagged.set(peer(2), node_peer(3), stranger("10.244.128.0/17", "10.244.2.7/32"))
    node.tailnet = untagged
    report = node.manager(TAGGED).reconcile()
    tunnels = {dst for dst, route in node.routes().items() if route != UNREACHABLE}
    assert tunnels == {"10.244.2.0/24", "fd44:0:2::/64", "10.244.3.0/24", "fd44:0:3::/64"}
    assert [alarm.kind for alarm in report.warnings] == ["tags-not-checked", "prefix-length"]
    assert not any(alarm.holds_back for alarm in report.alarms)


def test_both_identities_of_a_node_that_changes_its_mode_may_serve_its_pods(node):
    """As switch_mode.yml has it: the one to come is approved, then the former is not."""
    former, coming = node_peer(2), node_peer(2)._replace(id="22", name="node2-daemon")
    node.tailnet.set(former)
    manager = node.manager(TAGGED)
    manager.reconcile()
    before = node.routes()
    none = {"routes": (), "primary": ()}
    steps = [
        (former, coming._replace(**none)),
        (former, coming),
        (former._replace(**none), coming),
        (former._replace(**none, online=False), coming),
        (coming,),
    ]
    with node.watched() as seen:
        for step in steps:
            node.tailnet.set(*step)
            report = manager.reconcile()
            assert report.refusals == ()
            assert node.routes() == before
    assert seen == []


def test_the_source_address_is_used_once_the_node_has_it(node):
    node.host.ip("addr del 10.244.1.1/24 dev headcni0")
    node.tailnet.set(peer(2, "10.244.2.0/24"))
    with node.running() as reports:
        assert node.routes()["10.244.2.0/24"]["src"] is None
        node.host.ip("addr add 10.244.1.1/24 dev headcni0")
        until(lambda: node.routes()["10.244.2.0/24"]["src"] == "10.244.1.1")
    assert [report.repaired for report in reports if report.repaired] == [], "that is no drift"


def test_what_somebody_deletes_or_changes_comes_back(node):
    node.tailnet.set(peer(2), peer(3))
    with node.running() as reports:
        routes, rules = node.routes(), node.rules()
        node.host.ip("route del 10.244.2.0/24 table 5200")
        node.host.ip("route replace 10.244.3.0/24 dev headcni0 table 5200")
        node.host.ip("-6 route flush table 5200")
        node.host.ip("rule del pref 5200")
        node.host.ip("-6 rule del pref 5199")
        until(lambda: node.routes() == routes and node.rules() == rules)
        assert sum(len(report.repaired) for report in reports) == 6
        assert sum(len(report.added) for report in reports) == 8


def test_a_tunnel_that_vanishes_and_returns_is_routed_into_again(node):
    node.tailnet.set(peer(2))
    with node.running() as reports:
        routes = node.routes()
        node.host.ip("link del tailscale0")
        until(lambda: "there is no interface tailscale0" in str(reports[-1].conditions))
        assert node.routes() == {}
        node.add_tunnel()
        until(lambda: node.routes() == routes)
        node.host.ip("link set tailscale0 down")
        until(lambda: "tailscale0 is down" in str(reports[-1].conditions))
        node.host.ip("link set tailscale0 up")
        until(lambda: node.routes() == routes)
    assert [report.repaired for report in reports if report.repaired] == [], "that is no drift"


def test_a_tunnel_that_was_renamed_is_told_of_and_another_in_its_place_is_used(node):
    node.tailnet.set(peer(2))
    with node.running() as reports:
        routes = node.routes()
        node.host.ip("link set tailscale0 name elsewhere")
        until(lambda: "is called elsewhere now" in str(reports[-1].conditions))
        assert node.routes()["10.244.2.0/24"]["dev"] == "elsewhere"
        node.add_tunnel()
        until(lambda: node.routes() == routes)


def test_routes_move_to_another_tunnel_without_a_moment_of_none(node):
    """As from host to daemon mode: another interface, gateways, the same table."""
    node.host.ip("link add headcni01 type veth peer name far")
    for link in ("headcni01", "far"):
        node.host.ip(f"link set {link} up")
    node.host.ip("addr add 172.31.9.1/30 dev headcni01")
    node.host.ip("addr add fd99::1/64 dev headcni01 nodad")
    node.tailnet.set(peer(2), peer(3))
    node.manager().reconcile()
    moved = Mesh(
        MESH.cluster_cidrs,
        MESH.own_cidrs,
        MESH.sources,
        "headcni01",
        (ip_address("172.31.9.2"), ip_address("fd99::2")),
        mtu=1280,
    )
    with node.watched() as seen:
        report = node.manager(moved).reconcile()
    assert (len(report.added), report.repaired) == (4, ()), "nobody has changed anything"
    assert [line for line in seen if line.startswith("Deleted")] == []
    assert node.routes()["10.244.2.0/24"] == {
        "dev": "headcni01",
        "via": "172.31.9.2",
        "src": "10.244.1.1",
        "mtu": 1280,
        "proto": 72,
    }
    assert node.routes()["fd44:0:2::/64"]["via"] == "fd99::2"
    assert not node.manager(moved).reconcile().changed


def test_what_others_put_beside_ours_is_left_alone(node):
    node.host.ip("route add 10.244.77.0/24 dev headcni0 table 5200 proto static")
    node.host.ip("rule add pref 5200 to 10.9.0.0/16 lookup 99")
    node.host.ip("rule add pref 4000 to 10.8.0.0/16 lookup 98 proto 72")
    foreign = node.host.ip("rule"), node.host.ip("route show table all")
    node.tailnet.set(peer(2))
    manager = node.manager()
    assert len(manager.reconcile().added) == 6
    assert len(manager.remove_all().removed) == 6
    assert (node.host.ip("rule"), node.host.ip("route show table all")) == foreign
    assert node.host.ip("-6 route show table 5200") == ""


def test_another_cluster_cidr_replaces_the_rules_of_the_old_one(node):
    node.manager().reconcile()
    smaller = Mesh((ip_network("10.244.0.0/17"),), MESH.own_cidrs[:1])
    node.manager(smaller).reconcile()
    assert node.rules() == {
        "5199: from all to 10.244.1.0/24 lookup main proto 72",
        "5200: from all to 10.244.0.0/17 lookup 5200 proto 72",
    }


def test_a_route_that_the_kernel_refuses_keeps_no_other_from_being_made(node):
    lost = Mesh(MESH.cluster_cidrs, (), gateways=(ip_address("172.31.9.2"),))
    node.tailnet.set(peer(2), peer(3))
    report = node.manager(lost).reconcile()
    assert set(node.routes()) == {"fd44:0:2::/64", "fd44:0:3::/64"}
    (problem,) = [c for c in report.conditions if not c.ok and c.name == "routes"]
    assert "refused to route 10.244.2.0/24" in problem.message


def test_the_bus_is_listened_to(node):
    with node.running(interval=60) as reports:
        node.tailnet.set(peer(2))
        node.tailnet.notes.put(Note(frozenset({"Engine"})))
        time.sleep(0.2)
        assert node.routes() == {}
        node.tailnet.notes.put(Note(frozenset({"PeersChanged"})))
        until(lambda: len(node.routes()) == 2)
        passes = len(reports)
        time.sleep(0.3)
        assert len(reports) == passes


def test_without_events_the_regular_pass_finds_what_changed(node):
    with node.running(interval=0.3):
        node.tailnet.set(peer(2))
        node.tailnet.notes.put(Note(frozenset(), "tailscaled ended the bus"))
        until(lambda: len(node.routes()) == 2)
        node.tailnet.set()
        until(lambda: node.routes() == {})


def test_the_regular_pass_may_come_more_often_from_now_on(node):
    with node.running(interval=60) as reports:
        node.made[-1].every(0.2)
        until(lambda: len(reports) > 4)


@pytest.mark.parametrize("state", ["gone", "Starting"])
def test_a_question_that_failed_is_asked_again_though_the_bus_has_no_news(node, state):
    node.tailnet.set(peer(2))
    node.tailnet.state[0] = state
    with node.running(interval=0.3):
        node.tailnet.state[0] = "Running"
        until(lambda: len(node.routes()) == 2)


def test_pods_that_come_and_go_wake_nobody(node):
    with node.running(interval=60) as reports:
        for number in range(5):
            node.host.ip(f"link add hc{number} type veth peer name eth{number}")
            node.host.ip(f"link set hc{number} master headcni0 up")
            node.host.ip(f"link del hc{number}")
        time.sleep(0.7)
        assert len(reports) == 1


def test_a_bug_in_one_pass_does_not_end_the_passes(node):
    node.tailnet.set(peer(2)._replace(routes=None))
    with node.running(interval=0.2) as reports:
        assert "a bug in HeadCNI" in str(reports[0].conditions)
        node.tailnet.set(peer(2))
        node.tailnet.notes.put(Note(frozenset({"PeersChanged"})))
        until(lambda: len(node.routes()) == 2)


def test_a_listener_that_fails_stops_nothing(node):
    calls = []

    def fail(report: Report) -> None:
        calls.append(report)
        raise RuntimeError("a bug elsewhere")

    manager = node.manager(on_report=fail)
    with node.inside():
        manager.start()
    try:
        until(lambda: calls)
        node.host.ip("rule del pref 5200")
        until(lambda: len(node.rules()) == 4)
    finally:
        manager.stop()


def test_five_thousand_peers_are_a_few_sends_and_one_change_is_one_message(node, monkeypatch):
    sent: list[int] = []

    class Counted(RouteSocket):
        def _send(self, requests, flags):
            if not any(request.type in (18, 26, 34) for request in requests):  # RTM_GET…
                sent.append(len(requests))
            super()._send(requests, flags)

    monkeypatch.setattr(routes_module, "RouteSocket", Counted)
    peers = [
        Peer(str(i), f"node{i}", (f"10.{100 + i // 256}.{i % 256}.0/24",), (), True, False)
        for i in range(5000)
    ]
    node.tailnet.set(*peers)
    manager = node.manager(Mesh((ip_network("10.0.0.0/8"),), MESH.own_cidrs[:1]))
    began = time.monotonic()
    assert len(manager.reconcile().added) == 5002
    full = time.monotonic() - began
    assert len(node.host.ip("route show table 5200").splitlines()) == 5000
    assert sum(sent) == 5002
    assert len(sent) <= 4

    manager.reconcile()
    sent.clear()
    node.tailnet.set(*peers[:-1])
    began = time.monotonic()
    assert len(manager.reconcile().removed) == 1
    print(f"5,000 peers: {full:.2f} s; one change: {time.monotonic() - began:.2f} s")
    assert sent == [1]


# On a lab: real tailscaled, real Headscale, pods as namespaces behind a bridge.


@dataclass
class Machine:
    """A node of the lab, with one pod, looked at and routed from this process."""

    lab: LabCommand
    name: str
    number: int
    tmp: Path
    pod: Namespace
    manager: RouteReconciler | None = None
    reports: list[Report] = field(default_factory=list)

    @classmethod
    def create(cls, lab: LabCommand, number: int, tmp: Path) -> Machine:
        made = cls(lab, f"node{number}", number, tmp, Namespace.create(f"pod{number}"))
        host = made.host
        host.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
        host.ip("link add headcni0 type bridge")
        host.ip(f"addr add {made.gateways[0]}/24 dev headcni0")
        host.ip(f"addr add {made.gateways[1]}/64 dev headcni0 nodad")
        host.ip("link set headcni0 up")
        host.ip(f"link add vpod type veth peer name eth0 netns {made.pod.name}")
        host.ip("link set vpod master headcni0 up")
        made.pod.ip("link set eth0 up")
        made.pod.ip(f"addr add {made.addresses[0]}/24 dev eth0")
        made.pod.ip(f"addr add {made.addresses[1]}/64 dev eth0 nodad")
        made.pod.ip(f"route add default via {made.gateways[0]}")
        made.pod.ip(f"-6 route add default via {made.gateways[1]}")
        made.answer()
        return made

    @property
    def host(self) -> Namespace:
        return Namespace(Lab.named(self.lab.name).netns(self.name))

    @property
    def cidrs(self) -> tuple[str, str]:
        return f"10.244.{self.number}.0/24", f"fd44:0:{self.number}::/64"

    @property
    def gateways(self) -> tuple[str, str]:
        return f"10.244.{self.number}.1", f"fd44:0:{self.number}::1"

    @property
    def addresses(self) -> tuple[str, str]:
        return f"10.244.{self.number}.2", f"fd44:0:{self.number}::2"

    @property
    def api(self) -> LocalApi:
        process = leader(Lab.named(self.lab.name), self.name)
        return LocalApi(f"/proc/{process}/root/run/tailscale/tailscaled.sock")

    @property
    def prefs(self) -> NodePrefs:
        return NodePrefs(self.api, str(self.tmp / self.name / "prefs.json"))

    def start(self) -> None:
        mesh = Mesh(
            MESH.cluster_cidrs,
            tuple(map(ip_network, self.cidrs)),
            tuple(map(ip_address, self.gateways)),
        )
        with netns.opened(self.host.path) as fd, netns.entered(fd):
            self.manager = RouteReconciler(
                mesh, self.api, prefs=self.prefs, on_report=self.reports.append
            )
            self.manager.start()

    def stop(self) -> None:
        if self.manager is not None:
            self.manager.stop()
            self.manager = None

    def on(self, command: str) -> str:
        return self.lab.on(self.name, command)

    def table(self) -> str:
        return self.host.ip("route show table 5200") + self.host.ip("-6 route show table 5200")

    @property
    def tailnet_address(self) -> str:
        return self.api.status(peers=False).addresses[0]

    def socket(self, address: str, where: Namespace | None = None) -> socket.socket:
        """Of UDP, in the pod if not elsewhere."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with netns.opened((where or self.pod).path) as fd, netns.entered(fd):
            made = socket.socket(family, socket.SOCK_DGRAM)
        made.settimeout(0.5)
        return made

    def answer(self) -> None:
        """Send back what comes, to the end of the test run."""
        for address in self.addresses:
            self.answer_at(address, self.pod)

    def answer_at(self, address: str, where: Namespace) -> None:
        server = self.socket(address, where)
        server.settimeout(None)
        server.bind((address, 7))
        threading.Thread(target=_echo, args=(server,), daemon=True).start()

    def reaches(self, other: Machine) -> bool:
        return all(self._hears(address) for address in other.addresses)

    def _hears(self, address: str) -> bool:
        with self.socket(address) as client:
            try:
                client.sendto(b"?", (address, 7))
                return client.recv(16) == b"?"
            except OSError:
                return False

    @contextmanager
    def asking(self, address: str, where: Namespace | None = None) -> Iterator[Outage]:
        """Twenty times a second; how long there was no answer, and how many got none."""
        outage = Outage()
        stop = threading.Event()
        with self.socket(address, where) as client:
            client.setblocking(False)
            thread = threading.Thread(target=outage.watch, args=(client, (address, 7), stop))
            thread.start()
            try:
                time.sleep(0.5)
                yield outage
                time.sleep(1.5)
            finally:
                stop.set()
                thread.join(5)


def _echo(server: socket.socket) -> None:
    while True:
        data, client = server.recvfrom(16)
        with contextlib.suppress(OSError):
            server.sendto(data, client)


@dataclass
class Outage:
    longest: float = 0.0
    sent: int = 0
    got: int = 0

    @property
    def lost(self) -> int:
        return self.sent - self.got

    def watch(self, client: socket.socket, to: tuple[str, int], stop: threading.Event) -> None:
        heard = time.monotonic()
        while not stop.wait(0.05):
            with contextlib.suppress(OSError):
                while client.recv(16):
                    self.got += 1
                    self.longest = max(self.longest, time.monotonic() - heard)
                    heard = time.monotonic()
            self.sent += 1
            with contextlib.suppress(OSError):
                client.sendto(b"?", to)
        time.sleep(0.5)
        with contextlib.suppress(OSError):
            while client.recv(16):
                self.got += 1

    def __str__(self) -> str:
        return f"longest gap {self.longest:.2f} s, {self.lost} of {self.sent} lost"


@dataclass
class Cluster:
    lab: LabCommand
    one: Machine
    two: Machine

    def headscale(self, path: str, body: dict[str, object] | None = None) -> dict[str, object]:
        known = self.lab.inventory()["lab"]["vars"]
        key = Path(known["lab_dir"], "headscale-api-key").read_text().strip()
        request = urllib.request.Request(
            f"{known['lab_headscale_url']}/api/v1/{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, object] = json.load(answer)
            return found

    def ids(self) -> dict[str, str]:
        return {node["name"]: node["id"] for node in self.headscale("node")["nodes"]}

    def approve(self, machine: Machine, *routes: str) -> None:
        self.headscale(
            f"node/{self.ids()[machine.name]}/approve_routes",
            {"routes": list(routes or machine.cidrs)},
        )

    def both_online(self) -> bool:
        """Both tailscaled have found Headscale again."""
        try:
            return all(node["online"] for node in self.headscale("node")["nodes"])
        except OSError:
            return False

    def connected(self) -> bool:
        return self.one.reaches(self.two) and self.two.reaches(self.one)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Two joined nodes whose pod CIDRs are advertised by the route managers and approved."""
    lab = LabCommand("mesh-routes")
    lab("down")
    before = lab.listing()
    lab("up", "--nodes", "2", "--playbook", "tests/support/joined.yml")
    tmp = tmp_path_factory.mktemp("mesh")
    machines = [Machine.create(lab, number, tmp) for number in (1, 2)]
    try:
        for machine in machines:
            machine.start()
        made = Cluster(lab, *machines)
        for machine in machines:
            made.approve(machine)
        until(made.connected, 20)
        yield made
    finally:
        for machine in machines:
            machine.stop()
            machine.pod.remove()
        lab("down")
    assert_nothing_left(before, lab.listing())


def test_pods_reach_each_other_with_their_own_addresses(cluster):
    one, two = cluster.one, cluster.two
    for mine, gateway, theirs in zip(one.addresses, one.gateways, two.addresses):
        with two.pod.serving(7000, address="::" if ":" in theirs else "0.0.0.0"):
            assert one.pod.asks(theirs, 7000) == mine
            asked = one.host.run(sys.executable, ECHO, "ask", "tcp", theirs, 7000)
            assert asked.stdout.strip() == gateway


def test_a_new_approval_is_a_route_on_the_other_node_at_once(cluster):
    extra = "10.244.200.0/24"
    cluster.two.stop()
    cluster.two.prefs.advertise([ip_network(one) for one in (*cluster.two.cidrs, extra)])
    cluster.approve(cluster.two, *cluster.two.cidrs, extra)
    print(f"approval to route: {until(lambda: extra in cluster.one.table(), 10):.2f} s")
    cluster.approve(cluster.two)
    cluster.two.start()
    until(lambda: extra not in cluster.one.table(), 10)
    until(cluster.connected, 5)


def test_stopping_the_route_manager_cuts_nobody_off_nor_does_starting_it(cluster):
    with cluster.one.asking(cluster.two.addresses[0]) as outage:
        for _ in range(3):
            cluster.one.stop()
            time.sleep(0.2)
            cluster.one.start()
            time.sleep(0.5)
    print(f"route manager restarted three times: {outage}")
    assert outage.lost == 0


def test_a_restart_of_tailscaled_cuts_pods_off_no_longer_than_tailscaled_itself(cluster):
    one, two = cluster.one, cluster.two
    tailnet = two.tailnet_address
    two.answer_at(tailnet, two.host)
    with one.asking(two.addresses[0]) as pods, one.asking(tailnet, one.host) as nodes:
        one.on("systemctl restart tailscaled")
        until(cluster.connected, 60)
    print(f"tailscaled restarted: pods: {pods}; the nodes themselves: {nodes}")
    assert pods.longest < nodes.longest + 1


def test_tailscale_down_and_up_again_brings_the_routes_back(cluster):
    with cluster.one.asking(cluster.two.addresses[0]) as outage:
        cluster.one.on("tailscale down")
        until(lambda: not cluster.connected())
        cluster.one.on("tailscale up")
        until(cluster.connected, 40)
    print(f"tailscale down and up: {outage}")
    assert outage.longest < 20


def test_a_node_that_reconnects_sees_that_its_pod_cidrs_are_approved(cluster):
    """Headscale tells the others at once, but the node itself at some later time, or when it
    connects again."""
    cluster.one.on("systemctl restart tailscaled")
    cidrs = tuple(map(ip_network, cluster.one.cidrs))
    until(lambda: all(cluster.one.prefs.approved(cidrs).values()), 40)
    until(lambda: all(condition.ok for condition in cluster.one.reports[-1].conditions), 10)
    until(cluster.connected, 40)


def test_pods_talk_on_while_headscale_is_away(cluster):
    with cluster.one.asking(cluster.two.addresses[0]) as outage:
        cluster.lab.on("control", "systemctl stop headscale")
        try:
            time.sleep(15)
        finally:
            cluster.lab.on("control", "systemctl start headscale")
        until(cluster.both_online, 60)
    print(f"Headscale away for 15 s: {outage}")
    assert outage.lost == 0
    assert cluster.connected()


def test_a_node_that_is_away_keeps_its_route_though_headscale_withdraws_it(cluster):
    cluster.two.on("systemctl stop tailscaled")
    try:
        until(lambda: [p.routes for p in cluster.one.api.status().peers] == [()], 40)
        time.sleep(0.5)
        assert cluster.two.cidrs[0] in cluster.one.table()
    finally:
        cluster.two.on("systemctl start tailscaled")
    until(cluster.connected, 40)


def test_a_node_that_claims_anothers_pods_is_named_and_takes_nothing_from_them(cluster):
    one, two = cluster.one, cluster.two
    two.stop()
    try:
        two.prefs.advertise([ip_network(cidr) for cidr in (*two.cidrs, one.cidrs[0])])
        cluster.approve(one, one.cidrs[1])
        cluster.approve(two, *two.cidrs, one.cidrs[0])
        until(lambda: one.reports[-1].alarms, 20)
        (alarm,) = one.reports[-1].alarms
        assert alarm.claimants == ("this node", "node2")
        until(lambda: one.cidrs[0] in one.host.ip("route show table 52"))
        assert "dev headcni0" in one.host.ip(f"route get {one.addresses[0]}")
    finally:
        two.start()
        cluster.approve(two)
        cluster.approve(one)
    until(lambda: not one.reports[-1].alarms, 30)
    until(cluster.connected, 30)


def test_the_uninstall_leaves_nothing_in_kernel_or_prefs(cluster):
    one = cluster.one
    manager = one.manager
    one.stop()
    try:
        manager.remove_all()
        one.prefs.restore()
        assert one.table() == ""
        assert "proto 72" not in one.host.ip("rule") + one.host.ip("-6 rule")
        assert not one.api.prefs()["AdvertiseRoutes"]
    finally:
        one.start()
    until(cluster.connected, 30)
