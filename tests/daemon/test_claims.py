"""A stranger in the tailnet who claims pods of the cluster: with a real Headscale and real
tailscaleds on loopback, and the routes of a namespace of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

import pytest
from cni_node import Namespace
from headscale_server import HeadscaleServer, Tailscaled
from lab_command import CHECKOUT
from patience import until

from headcni.datapath import netns
from headcni.mesh.localapi import LocalApi, Peer, Status
from headcni.mesh.mesh import Mesh
from headcni.mesh.routes import RouteReconciler

TAG = "tag:headcni"
RANGES = {1: ("10.244.1.0/24", "fd44:0:1::/64"), 2: ("10.244.2.0/24", "fd44:0:2::/64")}
# Half of the cluster's range, which nobody has, and a pod of node2's.
CLAIMED = ("10.244.2.7/32", "10.244.128.0/17", "fd44:0:2::7/128")
HEADCNICTL = "import sys; from headcni.ctl.main import main; sys.exit(main())"
CONFIG = """
tailscale: {{socket: {{path: {socket}}}, peerTags: {tags}}}
network:
  podCIDR: {{nodeLocal: [10.244.1.0/24, "fd44:0:1::/64"], base: [10.244.0.0/16, "fd44::/32"]}}
  serviceCIDR: 10.96.0.0/12
"""


@dataclass
class Tailnet:
    """node1, whose routes are looked at, node2 and a laptop that is nobody's node."""

    home: Path
    host: Namespace
    server: HeadscaleServer
    joined: dict[str, Tailscaled]

    def join(self, name: str, tags: list[str], *routes: str) -> None:
        key = {"user": self.server.users["people"]["id"], "expiration": "2099-01-01T00:00:00Z"}
        made = self.server.ask("POST", "preauthkey", {**key, "aclTags": tags})["preAuthKey"]["key"]
        self.joined[name] = Tailscaled(self.home / name)
        self.joined[name].start()
        self.joined[name].join(self.server.url, made, name, *routes)
        until(lambda: set(self.server.nodes[name]["availableRoutes"]) == set(routes))
        self.server.approve(self.server.nodes[name], *routes)

    @property
    def api(self) -> LocalApi:
        return LocalApi(str(self.home / "node1" / "sock"))

    def status(self) -> Status:
        return self.api.status()

    def peer(self, name: str) -> Peer:
        return next(peer for peer in self.status().peers if peer.name == name)

    def manager(self, *tags: str) -> RouteReconciler:
        mesh = Mesh(
            cluster_cidrs=(ip_network("10.244.0.0/16"), ip_network("fd44::/32")),
            own_cidrs=tuple(map(ip_network, RANGES[1])),
            peer_tags=tags,
        )
        with netns.opened(self.host.path) as fd, netns.entered(fd):
            return RouteReconciler(mesh, self.api)

    def routes(self) -> dict[str, str]:
        """What the kernel does with each destination."""
        found = {}
        for family in ("-4", "-6"):
            for route in self.host.ip_json(f"{family} route show table 5200"):
                dst = route["dst"]
                whole = "/128" if ":" in dst else "/32"
                found[dst if "/" in dst else dst + whole] = route.get("type", "unicast")
        return found

    def headcnictl(self, *words: str, tags: str) -> subprocess.CompletedProcess[str]:
        config = self.home / "config.yaml"
        config.write_text(CONFIG.format(socket=self.home / "node1" / "sock", tags=tags))
        program = [sys.executable, "-c", HEADCNICTL, *words, "--config", str(config)]
        command = ["ip", "netns", "exec", self.host.name, *program]
        env = {"PYTHONPATH": str(CHECKOUT / "plugins/cni"), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        return subprocess.run(
            command, env=env, text=True, capture_output=True, timeout=60, check=False
        )


@pytest.fixture(scope="module")
def tailnet() -> Iterator[Tailnet]:
    home = Path(tempfile.mkdtemp(prefix="hct-"))
    (home / "headscale").mkdir()
    host = Namespace.create("claims")
    host.ip("tuntap add dev tailscale0 mode tun")
    host.ip("link set tailscale0 up")
    server = HeadscaleServer(home / "headscale")
    made = Tailnet(home, host, server, {})
    try:
        server.start()
        server.key = server.make_key()
        server.add_user("people")
        for number, ranges in RANGES.items():
            made.join(f"node{number}", [TAG], *ranges)
        made.join("laptop", [], *CLAIMED)
        until(lambda: len(made.status().peers) == 2)
        until(lambda: set(made.peer("laptop").routes) == set(CLAIMED))
        until(lambda: set(made.peer("node2").routes) == set(RANGES[2]))
        yield made
    finally:
        for tailscaled in made.joined.values():
            tailscaled.stop()
        server.stop()
        host.remove()
        shutil.rmtree(home)


def test_headscale_tells_a_node_its_own_tags_and_its_peers(tailnet):
    assert tailnet.status().tags == (TAG,)
    assert tailnet.peer("node2").tags == (TAG,)
    assert tailnet.peer("laptop").tags == ()
    assert set(tailnet.peer("node2").primary) == set(RANGES[2])


def test_an_untagged_device_with_approved_routes_gets_none_here(tailnet):
    manager = tailnet.manager(TAG)
    report = manager.reconcile()
    blocked = dict.fromkeys(("10.244.2.7/32", "fd44:0:2::7/128"), "unreachable")
    assert tailnet.routes() == {**dict.fromkeys(RANGES[2], "unicast"), **blocked}
    assert {(str(one.prefix), one.peer, one.reason) for one in report.refusals} == {
        (prefix, "laptop", "untagged") for prefix in CLAIMED
    }
    assert all(one.ok for one in report.conditions if one.name != "approved")
    assert not manager.reconcile().changed


def test_headcnictl_routes_shows_what_was_refused_and_why(tailnet):
    tailnet.manager(TAG).reconcile()
    shown = tailnet.headcnictl("routes", tags="[tag:headcni]")
    print(shown.stdout)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["10.244.2.0/24", "node2", "route", "tailscale0", "node2", "node2", "ok"] in lines
    blocked = ["unreachable", "unreachable", "laptop", "laptop", "blocked"]
    assert ["10.244.2.7/32", "-", *blocked] in lines
    assert ["10.244.128.0/17", "laptop", "untagged"] in lines
    (warning,) = [line for line in shown.stdout.splitlines() if line.startswith("WARNING")]
    assert "laptop serves" in warning
    assert "and 2 more but has no tag tag:headcni, so it gets no route" in warning
    told = json.loads(tailnet.headcnictl("routes", "--json", tags="[tag:headcni]").stdout)
    assert {one["dst"] for one in told["refused"]} == set(CLAIMED)
    assert told["alarms"] == []


@pytest.mark.parametrize("tags", ["any", "[]"])
def test_without_a_tag_to_ask_for_a_device_is_still_kept_out_of_nodes_ranges(tailnet, tags):
    tailnet.manager().reconcile()
    told = json.loads(tailnet.headcnictl("routes", "--json", tags=tags).stdout)
    assert {one["reason"] for one in told["refused"]} == {"prefix-length"}
    assert {one["dst"]: one["state"] for one in told["routes"]} == {
        **dict.fromkeys(RANGES[2], "ok"),
        **dict.fromkeys(("10.244.2.7/32", "fd44:0:2::7/128"), "blocked"),
    }


def test_a_node_that_goes_away_keeps_its_range_beside_a_foreign_part_of_it(tailnet):
    manager = tailnet.manager(TAG)
    manager.reconcile()
    before = tailnet.routes()
    tailnet.joined["node2"].stop()
    try:
        until(lambda: tailnet.peer("node2").routes == (), 60)
        manager.reconcile()
        assert tailnet.routes() == before
    finally:
        tailnet.joined["node2"].start()
    until(lambda: tailnet.peer("node2").routes, 60)
    manager.reconcile()
    assert tailnet.routes() == before


def test_packets_go_to_nobody_while_headscale_gives_an_offline_nodes_range_to_a_stranger(tailnet):
    """Approved for both, as in a pair of subnet routers: Headscale fails over within seconds."""
    laptop, node2 = tailnet.joined["laptop"], tailnet.joined["node2"]
    manager = tailnet.manager(TAG)
    manager.reconcile()
    before = tailnet.routes()
    taken = RANGES[2][0]
    laptop.tailscale("set", f"--advertise-routes={','.join((*CLAIMED, taken))}")
    until(lambda: taken in tailnet.server.nodes["laptop"]["availableRoutes"])
    tailnet.server.approve(tailnet.server.nodes["laptop"], *CLAIMED, taken)
    node2.stop()
    try:
        until(lambda: taken in tailnet.peer("laptop").routes, 60)
        manager.reconcile()
        assert tailnet.routes() == {**before, taken: "unreachable"}
    finally:
        node2.start()
        tailnet.server.approve(tailnet.server.nodes["laptop"], *CLAIMED)
        laptop.tailscale("set", f"--advertise-routes={','.join(CLAIMED)}")
    until(lambda: taken in tailnet.peer("node2").routes, 60)
    until(lambda: taken not in tailnet.peer("laptop").routes, 60)
    manager.reconcile()
    assert tailnet.routes() == before
