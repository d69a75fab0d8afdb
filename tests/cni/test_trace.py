"""headcnictl trace, ipam, routes and diagnose on a node with real pods. tailscaled is a stub here;
tests/broken_nodes uses a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tailscaled_stub import Tailscaled, peer

REMOTE = "10.55.2.7"
SERVES = {"AllowedIPs": ["100.64.0.2/32", "10.55.2.0/24"], "PrimaryRoutes": ["10.55.2.0/24"]}
OPEN = {
    "IPProto": [1, 6, 17],
    "Srcs": ["10.55.0.0/16"],
    "Dsts": [{"Net": "10.55.0.0/16", "Ports": {"First": 0, "Last": 65535}}],
}


class Traced:
    def __init__(self, node, tmp: Path) -> None:
        self.node = node
        self.tailscaled = Tailscaled(str(tmp / "tailscaled.sock"))
        self.tailscaled.peers = [peer(2, Tags=["tag:headcni"], **SERVES)]
        self.tailscaled.self_known = {
            "Tags": ["tag:headcni"],
            "PrimaryRoutes": ["10.55.1.0/24"],
        }
        self.tailscaled.prefs = {"AdvertiseRoutes": ["10.55.1.0/24"]}
        self.tailscaled.pings = {
            "100.64.0.2": {"Endpoint": "192.168.7.2:41641", "LatencySeconds": 0.001}
        }
        self.tailscaled.filter = [OPEN]
        self.config = tmp / "config.yaml"
        self.config.write_text(
            json.dumps(
                {
                    "network": {"podCIDR": {"nodeLocal": "10.55.1.0/24", "base": "10.55.0.0/16"}},
                    "daemon": {
                        "socket": str(tmp / "none" / "cni.sock"),
                        "dataDir": str(tmp / "data"),
                    },
                    "tailscale": {
                        "socket": {"path": str(tmp / "tailscaled.sock")},
                        "interfaceName": "mesh0",
                    },
                }
            )
        )

    def __call__(self, *words: str, code: int | None = None):
        program = (self.node.plugins / "headcni").resolve().with_name("headcnictl")
        done = self.node.netns.run(
            *(self.node.python, "-IS", program, *words, "--config", self.config),
            env={"PATH": os.environ["PATH"]},
            check=False,
        )
        if code is not None:
            assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def hops(self, *words: str) -> dict[str, dict]:
        """The hops by name; of several with the same name the worst."""
        answer = json.loads(self("trace", "--json", *words))
        found: dict[str, dict] = {}
        for hop in answer["hops"]:
            if found.get(hop["name"], {}).get("state") != "broken":
                found[hop["name"]] = hop
        return {**found, "first": {"name": answer["broken"]}}

    def advised(self, hop: dict) -> None:
        """Do what the advice says, to the letter."""
        assert hop["finding"]["where"] == "node"
        self.node.netns.run("sh", "-c", hop["finding"]["run"])

    def findings(self) -> list[dict]:
        return json.loads(self("diagnose", "--json"))["findings"]

    def mesh(self) -> None:
        """The other node, at the end of a link."""
        node, outside = self.node.netns, self.node.outside
        node.ip(f"link add mesh0 mtu 1280 type veth peer name mesh0 netns {outside.name}")
        for side in (node, outside):
            side.ip("link set mesh0 up")
        outside.ip(f"addr add {REMOTE}/32 dev lo")
        outside.ip("link set lo up")
        outside.ip("addr add 192.0.2.99/32 dev mesh0")
        outside.ip("route add 10.55.1.0/24 dev mesh0")
        node.ip("rule add pref 5200 to 10.55.0.0/16 lookup 5200 protocol 72")
        node.ip("rule add pref 5199 to 10.55.1.0/24 lookup main protocol 72")
        node.ip("route add 10.55.2.0/24 dev mesh0 table 5200 protocol 72")
        for side in (node, outside):
            side.run("sysctl", "-qw", "net.ipv4.conf.mesh0.proxy_arp=1")
            side.run("sysctl", "-qw", "net.ipv4.conf.all.rp_filter=0")
            side.run("sysctl", "-qw", "net.ipv4.conf.mesh0.rp_filter=0")


@pytest.fixture
def traced(node, tmp_path):
    made = Traced(node, tmp_path)
    yield made
    made.tailscaled.end()


def test_every_hop_between_two_pods_of_a_node_is_checked(node, traced, datapath):
    one, two = node.pod(), node.pod()
    first = node.add(node.conf(datapath=datapath), one).address
    second = node.add(node.conf(datapath=datapath), two).address
    hops = traced.hops(first, second)
    assert {name: hop["state"] for name, hop in hops.items() if name != "first"} == {
        "pod": "ok",
        "veth": "ok",
        "anti-spoofing": "ok",
        "forwarding": "ok",
        "route": "ok",
        "packet": "ok",
    }
    with two.serving(8080):
        assert "answered the pod" in traced("trace", first, second, "--port", "8080", code=0)
    refused = traced("trace", first, second, "--port", "8081", code=1)
    assert "packet        BROKEN" in refused and "Connection refused" in " ".join(refused.split())


FAULTS = {
    "pod": "ip netns exec {pod} ip route del default",
    "veth": "ip link set dev {veth} down",
}


@pytest.mark.parametrize("layer", FAULTS)
def test_the_first_broken_layer_is_named_and_its_command_puts_it_right(node, traced, layer):
    pod = node.pod()
    address = node.add(node.conf(), pod).address
    traced.mesh()
    assert traced.hops(address, REMOTE)["first"]["name"] == ""
    veth = next(link for link in node.netns.links() if link.startswith("hc") and "cni" not in link)
    node.netns.run("sh", "-c", FAULTS[layer].format(pod=pod.name, veth=veth))
    hops = traced.hops(address, REMOTE)
    assert hops["first"]["name"] == layer, hops
    assert hops["packet"]["state"] == "broken"
    traced.advised(hops[layer])
    assert traced.hops(address, REMOTE)["first"]["name"] == ""


def test_a_pod_that_nothing_checks_is_found(node, traced):
    address = node.add(node.conf()).address
    veth = next(link for link in node.netns.links() if link.startswith("hc") and "cni" not in link)
    node.netns.run("tc", "qdisc", "del", "dev", veth, "ingress")
    assert traced.hops(address, "10.55.1.1")["first"]["name"] == "anti-spoofing"


def test_a_rule_of_another_program_is_named_and_its_command_deletes_it(node, traced):
    address = node.add(node.conf()).address
    traced.mesh()
    node.netns.ip("rule add pref 100 to 10.55.0.0/16 lookup 77")
    node.netns.ip("route add unreachable default table 77")
    hops = traced.hops(address, REMOTE)
    assert hops["first"]["name"] == "rule"
    assert hops["rule"]["finding"]["run"] == "ip rule del pref 100 to 10.55.0.0/16 lookup 77"
    [found] = [one for one in traced.findings() if one["part"] == "rules"]
    assert found["run"] == hops["rule"]["finding"]["run"]
    traced.advised(hops["rule"])
    assert traced.hops(address, REMOTE)["first"]["name"] == ""


def test_forwarding_that_is_off_is_named(node, traced):
    address = node.add(node.conf()).address
    traced.mesh()
    node.netns.run("sysctl", "-qw", "net.ipv4.ip_forward=0")
    hops = traced.hops(address, REMOTE)
    assert hops["first"]["name"] == "forwarding"
    assert "forwarding-off-ipv4" in [one["id"] for one in traced.findings()]
    traced.advised(hops["forwarding"])
    assert traced.hops(address, REMOTE)["first"]["name"] == ""


def test_a_route_that_is_gone_is_named(node, traced):
    address = node.add(node.conf()).address
    traced.mesh()
    node.netns.ip("route flush table 5200")
    node.netns.ip("rule del pref 5200")
    hops = traced.hops(address, REMOTE)
    assert hops["first"]["name"] == "route"
    assert "no rule sends packets" in hops["route"]["said"]


def test_a_tunnel_that_is_too_narrow_is_named_and_its_command_widens_it(node, traced):
    address = node.add(node.conf()).address
    traced.mesh()
    node.netns.ip("link set mesh0 mtu 1200")
    hops = traced.hops(address, REMOTE)
    assert hops["first"]["name"] == "tunnel"
    assert [one["id"] for one in traced.findings() if one["part"] == "mtu"] == ["tunnel-mtu"]
    run = hops["tunnel"]["finding"]["run"]
    assert run == "ip link set dev mesh0 mtu 1280 && systemctl restart tailscaled"
    node.netns.run("sh", "-c", run.partition(" && ")[0])  # there is no systemd here
    assert traced.hops(address, REMOTE)["first"]["name"] == ""


def test_a_path_that_loses_large_packets_is_found(node, traced):
    traced.mesh()
    traced.tailscaled.known["TailscaleIPs"] = ["100.64.0.1"]
    node.netns.ip("addr add 100.64.0.1/32 dev mesh0")
    node.netns.ip("route add 100.64.0.2/32 dev mesh0")
    node.outside.ip("addr add 100.64.0.2/32 dev lo")
    node.outside.ip("route add 100.64.0.1/32 dev mesh0")

    def found() -> list[str]:
        return [one["found"] for one in traced.findings() if one["part"] == "path MTU"]

    assert found() == []
    drop = "chain f { type filter hook input priority 0; meta length > 1270 drop; }"
    node.outside.run("nft", f"table inet narrow {{ {drop}; }}")
    [said] = found()
    assert said == "packets of 1280 bytes are lost on the way to n2, and small ones arrive"
    node.outside.run("nft", "flush ruleset")
    node.outside.ip("addr del 100.64.0.2/32 dev lo")
    assert found() == [], "what cannot be reached at all is another fault"


@pytest.mark.parametrize("kind", ["policy drop", "policy accept; drop"])
def test_a_filter_of_another_program_is_named(node, traced, kind):
    address = node.add(node.conf()).address
    traced.mesh()
    rules = f"table inet other {{ chain f {{ type filter hook forward priority 0; {kind}; }}; }}"
    node.netns.run("nft", rules)
    hops = traced.hops(address, REMOTE)
    assert hops["first"]["name"] == "firewall"
    assert hops["packet"]["state"] == "broken"


def test_a_rule_with_conditions_is_named_only_if_it_drops_the_packet(node, traced):
    address = node.add(node.conf()).address
    traced.mesh()
    chain = "chain f { type filter hook forward priority 0; ip daddr %s counter drop; }"
    node.netns.run("nft", f"table inet other {{ {chain % '10.55.2.8'}; }}")
    hops = traced.hops(address, REMOTE)
    assert (hops["firewall"]["state"], hops["first"]["name"]) == ("unknown", "")
    assert "inet other f" in hops["firewall"]["said"]
    node.netns.run("nft", f"table inet third {{ {chain % REMOTE}; }}")
    hops = traced.hops(address, REMOTE)
    assert hops["first"]["name"] == "firewall"
    assert hops["firewall"]["finding"]["id"] == "dropped-by-rule"
    traced.advised(hops["firewall"])
    assert traced.hops(address, REMOTE)["first"]["name"] == ""
    assert "headcni-trace" not in node.netns.run("nft", "list tables").stdout


def test_what_headscale_has_not_approved_is_named(node, traced):
    address = node.add(node.conf()).address
    traced.mesh()
    traced.tailscaled.self_known["PrimaryRoutes"] = []
    hops = traced.hops(address, REMOTE)
    assert hops["first"]["name"] == "approval"
    assert "10.55.1.0/24" in hops["approval"]["said"]
    [found] = [one for one in traced.findings() if one["id"] == "not-approved"]
    assert found["run"] == "ansible-playbook -i INVENTORY site.yml"
    traced.tailscaled.peers = []
    assert "no node of the tailnet serves 10.55.2.7" in traced("trace", address, REMOTE, code=1)
    node.netns.ip("route flush table 5200")
    hops = traced.hops(address, REMOTE)
    assert (hops["first"]["name"], hops["route"]["state"]) == ("approval", "unknown")
    assert hops["approval"]["finding"]["run"] == "ansible-playbook -i INVENTORY site.yml"


def test_a_logged_out_node_is_named_first(node, traced):
    address = node.add(node.conf()).address
    traced.mesh()
    traced.tailscaled.known["BackendState"] = "NeedsLogin"
    assert traced.hops(address, REMOTE)["first"]["name"] == "tailscaled"
    ids = [one["id"] for one in traced.findings() if one["part"] != "daemon"]
    assert ids[0] == "logged-out"


def test_a_peer_without_a_path_is_named(node, traced):
    address = node.add(node.conf()).address
    traced.mesh()
    traced.tailscaled.pings = {}
    hops = traced.hops(address, REMOTE)
    assert hops["first"]["name"] == "path"


def test_a_relayed_path_is_shown_and_is_no_fault(node, traced):
    address = node.add(node.conf()).address
    traced.mesh()
    relayed = {"DERPRegionID": 999, "DERPRegionCode": "lab", "LatencySeconds": 0.01}
    traced.tailscaled.pings = {"100.64.0.2": relayed}
    hops = traced.hops(address, REMOTE)
    assert hops["path"]["said"] == "relayed by DERP region lab (999), 10.0 ms"
    assert hops["first"]["name"] == ""
    [note] = [one for one in traced.findings() if one["part"] == "peers"]
    assert (note["id"], note["sure"]) == ("relayed", False)
    assert "DERP region lab (999)" in traced("routes")


def test_a_policy_that_denies_pods_is_named_on_the_way_in(node, traced):
    address = node.add(node.conf()).address
    traced.mesh()
    hops = traced.hops(REMOTE, address)
    assert (hops["policy"]["state"], hops["first"]["name"]) == ("ok", "")
    assert hops["remote"]["state"] == "unknown"
    traced.tailscaled.filter = []
    hops = traced.hops(REMOTE, address)
    assert hops["first"]["name"] == "policy"
    assert traced.hops(address, REMOTE)["policy"]["state"] == "unknown"
    [found] = [one for one in traced.findings() if one["part"] == "policy"]
    assert found["run"].endswith("site.yml -e headscale_routes_policy=merge")


def test_only_packets_of_this_nodes_pods_can_be_traced(traced):
    assert traced("trace", "10.55.2.7", "10.55.2.8", code=3) == ""
    assert traced("trace", "10.55.2.7", "nobody", code=3) == ""


def test_the_pool_is_drawn_with_leaks_and_static_addresses(node, traced):
    plain, leaked = node.pod(), node.pod()
    node.add(node.conf(), plain)
    node.add(node.conf(capabilities={"ips": True}, runtimeConfig={"ips": ["10.55.1.9/24"]}))
    node.add(node.conf(), leaked)
    assert "10.55.1.0   ##.....S.." in traced("ipam", code=0)
    node.sql("UPDATE attachment SET created = 1")
    node.sql("UPDATE allocation SET created = 1")
    leaked.remove()
    node.pods.remove(leaked)
    shown = traced("ipam", code=1)
    assert "!" in shown and "leaked: the pod's network namespace is gone (1)" in shown
    assert max(map(len, shown.splitlines())) <= 80
    [pool] = json.loads(traced("ipam", "--json"))["pools"]
    assert pool["counts"]["static"] == 1 and pool["counts"]["leaked"] == 1
    assert pool["total"] - pool["free"] == 3


def test_a_full_pool_is_found(node, traced):
    conf = node.conf(ipam={"type": "headcni-ipam", "subnet": "10.55.1.0/30"})
    node.add(conf)
    assert [one["id"] for one in traced.findings() if one["part"] == "pool"] == ["pool-full"]


ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("192.0.2.2", 53))
print("ready", flush=True)
while True:
    data, sender = server.recvfrom(512)
    server.sendto(data, sender)
"""


def test_a_resolver_that_does_not_answer_pods_is_found(node, traced):
    node.add(node.conf(dns={"nameservers": ["192.0.2.2"]}, ipMasq=True))
    silent = [one for one in traced.findings() if one["part"] == "dns"]
    assert [one["id"] for one in silent] == ["resolver-silent"]
    assert silent[0]["run"].startswith("headcnictl trace 10.55.1.2 192.0.2.2")
    command = ["ip", "netns", "exec", node.outside.name, sys.executable, "-c", ECHO]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            assert [one for one in traced.findings() if one["part"] == "dns"] == []
        finally:
            server.kill()


def test_routes_are_shown_side_by_side(node, traced):
    node.add(node.conf())
    traced.mesh()
    answer = json.loads(traced("routes", "--json", code=0))
    assert answer["routes"] == [
        {
            "dst": "10.55.2.0/24",
            "node": "n2",
            "desired": "route",
            "via": "",
            "dev": "mesh0",
            "tailscaled": ["n2"],
            "approved": ["n2"],
            "state": "ok",
        }
    ]
    assert answer["own"] == [{"dst": "10.55.1.0/24", "advertised": True, "approved": True}]
    [known] = answer["peers"]
    assert (known["path"], known["through"], known["latency_ms"]) == (
        *("direct", "192.168.7.2:41641"),
        1.0,
    )
    shown = traced("routes")
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    node.netns.ip("route flush table 5200")
    traced.tailscaled.self_known["PrimaryRoutes"] = []
    shown = traced("routes", code=1)
    assert "missing" in shown and "NOT approved" in shown
    assert json.loads(traced("routes", "--json", "--no-ping"))["peers"][0]["latency_ms"] is None
