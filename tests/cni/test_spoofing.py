"""A pod can send only as itself: forged frames go nowhere, and ordinary traffic is untouched.

Frames are sent by raw sockets from inside a pod, as a pod with NET_RAW can. After the forged ones
comes a genuine one, so a receiver that has the genuine one will not get the forged ones any more.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

import pytest

FOREIGN = {4: "10.55.1.77", 6: "fd55:0:0:1::77"}
FORGED, GENUINE = b"forged!!", b"genuine!"
PORT = 7000
SEND = """
import socket, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind(("eth0", 0))
for frame in sys.argv[1:]:
    s.send(bytes.fromhex(frame))
"""
LISTEN = """
import socket, sys
kind = sys.argv[1]
if kind == "udp":
    s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    s.bind(("::", int(sys.argv[2])))
else:
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    s.bind((sys.argv[2], 0))
s.settimeout(3)
print("ready", flush=True)
try:
    while True:
        got = s.recv(65536)
        print(got.hex(), flush=True)
        if sys.argv[3].encode() in got:
            break
except socket.timeout:
    print("")
"""
PING = """
import socket, struct, sys
where = socket.getaddrinfo(sys.argv[1], 0, type=socket.SOCK_DGRAM)[0]
six = where[0] == socket.AF_INET6
s = socket.socket(where[0], socket.SOCK_RAW, socket.IPPROTO_ICMPV6 if six else socket.IPPROTO_ICMP)
s.settimeout(3)
body = bytes.fromhex("8000000000010001" if six else "0800f7fd00010001")
s.sendto(body, where[4])
while True:
    got, sender = s.recvfrom(4096)
    if got[0 if six else 20] == (129 if six else 0) and sender[0] == where[4][0]:
        break
"""
REPAIR = """
import json, sys
from headcni.datapath import guard
from headcni.datapath.netlink import Netlink
from headcni.store import Store
with Store.in_directory(sys.argv[1]) as store, Netlink() as kernel:
    print(json.dumps([guard.repair(store, kernel), guard.repair(store, kernel)]))
"""


def packed(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def ethernet(to: str, source: str, kind: int, payload: bytes) -> bytes:
    return packed(to) + packed(source) + struct.pack("!H", kind) + payload


def checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packet(source: str, to: str, protocol: int, payload: bytes, hops: int = 64) -> bytes:
    """An IPv4 or IPv6 packet, with the checksum of a UDP or ICMPv6 payload filled in."""
    ends = ip_address(source).packed + ip_address(to).packed
    pseudo = ends + struct.pack("!LL", len(payload), protocol)
    at = {17: 6, 58: 2}[protocol]
    payload = payload[:at] + struct.pack("!H", checksum(pseudo + payload)) + payload[at + 2 :]
    if ip_address(source).version == 6:
        return struct.pack("!LHBB", 6 << 28, len(payload), protocol, hops) + ends + payload
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 7, 0, hops, protocol, 0) + ends
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + payload


def udp(source: str, to: str, said: bytes) -> bytes:
    return packet(source, to, 17, struct.pack("!HHHH", 7001, PORT, 8 + len(said), 0) + said)


def arp(operation: int, mac: str, address: str, asked: str) -> bytes:
    head = struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation)
    sender = packed(mac) + ip_address(address).packed
    return head + sender + bytes(6) + ip_address(asked).packed + FORGED


def neighbour(kind: int, source: str, to: str, target: str, mac: str) -> bytes:
    """A neighbour solicitation (135) or advertisement (136) with a link-layer address option."""
    flags = 0x20000000 if kind == 136 else 0  # override
    option = struct.pack("!BB", 2 if kind == 136 else 1, 1) + packed(mac)
    body = struct.pack("!BBHL", kind, 0, 0, flags) + ip_address(target).packed + option
    return packet(source, to, 58, body, hops=255)


def link_local(mac: str) -> str:
    octets = packed(mac)
    tail = bytes([octets[0] ^ 2]) + octets[1:3] + b"\xff\xfe" + octets[3:]
    return str(IPv6Address(b"\xfe\x80" + bytes(6) + tail))


@dataclass
class Pod:
    netns: object
    result: dict
    conf: dict

    def address(self, family: int) -> str:
        return self.result["ips"][0 if family == 4 else 1]["address"].partition("/")[0]

    @property
    def mac(self) -> str:
        return self.result["interfaces"][-1]["mac"]

    @property
    def host_end(self) -> str:
        return self.result["interfaces"][-2]["name"]

    def ping(self, to: str) -> None:
        ping(self.netns, to)

    def send(self, *frames: bytes) -> None:
        self.netns.run(sys.executable, "-c", SEND, *(one.hex() for one in frames))


class Segment:
    """Two pods on a node: one that forges, and its victim."""

    def __init__(self, node, conf: dict) -> None:
        self.node, self.conf = node, conf
        self.forger, self.victim = self.add(), self.add()

    def add(self, conf: dict | None = None, **how: object) -> Pod:
        conf = conf or self.conf
        pod = self.node.pod()
        return Pod(pod, self.node.add(conf, pod, **how).ok, conf)

    @property
    def routed(self) -> bool:
        return self.conf.get("datapath") == "routed"

    def gateway_mac(self, pod: Pod) -> str:
        name = pod.host_end if self.routed else "headcni0"
        return self.node.netns.ip_json(f"link show dev {name}")[0]["address"]

    def mac_towards(self, to: str, pod: Pod) -> str:
        """Where a frame for this address goes on the pod's link."""
        for one in (self.victim, self.forger):
            if not self.routed and to in (one.address(4), one.address(6)):
                return one.mac
        return self.gateway_mac(pod)

    def udp(self, to: str, said: bytes, source: str = "", mac: str = "") -> bytes:
        """From the forger: as itself, unless told otherwise."""
        family = ip_address(to).version
        data = udp(source or self.forger.address(family), to, said)
        kind = 0x0800 if family == 4 else 0x86DD
        to_mac = self.mac_towards(to, self.forger)
        return ethernet(to_mac, mac or self.forger.mac, kind, data)

    def received(self, where, to: str, forged: list[bytes], *listen: str) -> list[bytes]:
        """What arrives there, when the forger sends these and then something genuine."""
        with listening(where, *(listen or ("udp", str(PORT)))) as heard:
            self.forger.send(*forged, self.udp(to, GENUINE))
            got = heard()
        assert any(GENUINE in one for one in got), "even genuine traffic did not arrive"
        return [one for one in got if FORGED in one]


def ping(netns, to: str) -> None:
    netns.run(sys.executable, "-c", PING, to)


@contextmanager
def listening(where, kind: str, at: str):
    command = ["ip", "netns", "exec", where.name, sys.executable, "-c", LISTEN, kind, at]
    command.append(GENUINE.decode())
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        try:
            yield lambda: [bytes.fromhex(x) for x in process.communicate(timeout=20)[0].split()]
        finally:
            process.kill()


@pytest.fixture
def segment(node, datapath):
    return Segment(node, node.dual(datapath=datapath, ip_masq=False))


@pytest.fixture
def bridged(node):
    return Segment(node, node.dual(ip_masq=False))


def warm(segment, family: int) -> None:
    """The node and both pods know the way: what follows sends single packets."""
    for one in (segment.forger, segment.victim):
        one.ping(gateway(one, family))
    segment.forger.ping(segment.victim.address(family))


def gateway(pod: Pod, family: int) -> str:
    return pod.result["ips"][0 if family == 4 else 1]["gateway"]


def target(segment, which: str, family: int):
    """A namespace to listen in, and its address."""
    node = segment.node
    if which == "pod":
        return segment.victim.netns, segment.victim.address(family)
    if which == "node":
        return node.netns, node.NODE_IP if family == 4 else node.NODE_IP6
    for side, cidr in ((4, "10.55.1.0/24"), (6, "fd55:0:0:1::/64")):
        via = node.NODE_IP if side == 4 else node.NODE_IP6
        node.outside.ip(f"-{side} route replace {cidr} via {via}")
    return node.outside, node.OUTSIDE_IP if family == 4 else node.OUTSIDE_IP6


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("which", ["pod", "node", "outside"])
def test_a_packet_from_a_foreign_address_does_not_arrive(segment, which, family):
    warm(segment, family)
    where, to = target(segment, which, family)
    victims = segment.victim.address(family)
    forged = [segment.udp(to, FORGED, source=one) for one in (FOREIGN[family], victims)]
    assert segment.received(where, to, forged) == []


@pytest.mark.parametrize("family", [4, 6])
def test_a_packet_from_a_foreign_mac_does_not_arrive(segment, family):
    warm(segment, family)
    to = segment.victim.address(family)
    for mac in ("02:00:00:00:00:99", segment.victim.mac):
        assert segment.received(segment.victim.netns, to, [segment.udp(to, FORGED, mac=mac)]) == []
    with segment.victim.netns.serving(80, address="::"):  # and the bridge did not learn it
        assert segment.node.netns.asks(to, 80)


def test_packets_of_a_pod_with_an_egress_limit_are_checked_too(node, datapath):
    limits = {"egressRate": 80_000_000, "egressBurst": 8_000_000}
    extra = {"capabilities": {"bandwidth": True}, "runtimeConfig": {"bandwidth": limits}}
    segment = Segment(node, {**node.dual(datapath=datapath, ip_masq=False), **extra})
    for family in (4, 6):
        warm(segment, family)
        to = segment.victim.address(family)
        forged = [
            segment.udp(to, FORGED, source=FOREIGN[family]),
            segment.udp(to, FORGED, mac="02:00:00:00:00:99"),
        ]
        assert segment.received(segment.victim.netns, to, forged) == []


# Addresses that a bridge keeps to itself: it learns from frames to them before any of its hooks.
LINK_LOCAL = ["01:80:c2:00:00:02", "01:80:c2:00:00:0e"]


def port_of(segment, mac: str) -> str:
    """Where the bridge sends frames for this MAC."""
    shown = segment.node.netns.run("bridge", "-j", "fdb", "show", "br", "headcni0").stdout
    (entry,) = [one for one in json.loads(shown) if one["mac"] == mac]
    return entry["ifname"]


@pytest.mark.parametrize("to", LINK_LOCAL)
def test_the_bridge_learns_no_mac_from_a_link_local_frame(bridged, to):
    warm(bridged, 4)
    ports = set()
    for _unused in range(8):  # the victim may speak at any time, and take its MAC back
        bridged.forger.send(ethernet(to, bridged.victim.mac, 0x88CC, bytes(46)))
        ports.add(port_of(bridged, bridged.victim.mac))
    assert ports == {bridged.victim.host_end}
    with bridged.victim.netns.serving(80):
        assert bridged.node.netns.asks(bridged.victim.address(4), 80)


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("mac", LINK_LOCAL)
def test_a_foreign_packet_in_a_link_local_frame_does_not_reach_the_node(bridged, mac, family):
    warm(bridged, family)
    where, to = target(bridged, "node", family)
    kind = 0x0800 if family == 4 else 0x86DD
    said = udp(FOREIGN[family], to, FORGED)
    plain = ethernet(mac, bridged.forger.mac, kind, said)
    tagged = plain[:12] + struct.pack("!HH", 0x8100, 0) + plain[12:]  # the kernel takes VLAN 0 off
    assert bridged.received(where, to, [plain, tagged]) == []


def test_an_arp_request_in_a_link_local_frame_leaves_no_trace(bridged):
    question = arp(1, bridged.forger.mac, FOREIGN[4], gateway(bridged.forger, 4))
    bridged.forger.send(*(ethernet(to, bridged.forger.mac, 0x0806, question) for to in LINK_LOCAL))
    time.sleep(0.2)
    assert FOREIGN[4] not in neighbours(bridged.node.netns, 4)


@pytest.fixture
def netfilter_on_bridges(bridged):
    """Bridged packets pass the hooks of IP and ARP, as Kubernetes wants it."""
    keys = ("iptables", "ip6tables", "arptables")
    for key in keys:
        bridged.node.netns.run("sysctl", "-qw", f"net.bridge.bridge-nf-call-{key}=1")


@pytest.mark.usefixtures("netfilter_on_bridges")
def test_ordinary_traffic_passes_with_netfilter_on_bridges(bridged):
    test_ordinary_traffic_passes_with_empty_neighbour_tables(bridged)
    to = bridged.victim.address(4)
    with bridged.victim.netns.serving(80):
        assert bridged.forger.netns.asks(to, 80)


def neighbours(netns, family: int) -> dict[str, str]:
    """MAC by address."""
    shown = netns.ip_json(f"-{family} neigh")
    return {one["dst"]: one["lladdr"] for one in shown if "lladdr" in one}


@pytest.mark.parametrize("operation", [1, 2])
def test_a_pod_cannot_take_over_an_address_by_arp(bridged, operation):
    warm(bridged, 4)
    address = bridged.victim.address(4)
    time.sleep(1.2)  # the kernel believes no other answer before
    claim = arp(operation, bridged.forger.mac, address, address)
    bridged.forger.send(ethernet("ff:ff:ff:ff:ff:ff", bridged.forger.mac, 0x0806, claim))
    time.sleep(0.2)
    assert neighbours(bridged.node.netns, 4)[address] == bridged.victim.mac
    with bridged.victim.netns.serving(80):
        assert bridged.node.netns.asks(address, 80)


@pytest.mark.parametrize("forgery", ["its sender's address", "its sender's MAC"])
def test_an_arp_request_with_a_foreign_sender_leaves_no_trace(segment, forgery):
    """The node would note who asked: enough such requests fill its neighbour table."""
    mac = segment.forger.mac if forgery == "its sender's address" else "02:00:00:00:00:99"
    address = FOREIGN[4] if forgery == "its sender's address" else segment.forger.address(4)
    question = arp(1, mac, address, gateway(segment.forger, 4))
    segment.forger.send(ethernet("ff:ff:ff:ff:ff:ff", segment.forger.mac, 0x0806, question))
    time.sleep(0.2)
    known = neighbours(segment.node.netns, 4)
    assert FOREIGN[4] not in known
    assert "02:00:00:00:00:99" not in known.values()


@pytest.mark.parametrize("kind", [135, 136])
def test_a_pod_cannot_take_over_an_address_by_neighbour_discovery(bridged, kind):
    warm(bridged, 6)
    forger, victim = bridged.forger, bridged.victim
    to, gateway_mac = gateway(forger, 6), bridged.gateway_mac(forger)
    claims = [neighbour(136, forger.address(6), to, victim.address(6), forger.mac)]
    if kind == 135:  # the receiver learns the MAC of whoever asks
        claims = [neighbour(135, victim.address(6), to, to, forger.mac)]
    forger.send(*(ethernet(gateway_mac, forger.mac, 0x86DD, one) for one in claims))
    time.sleep(0.2)
    assert neighbours(bridged.node.netns, 6)[victim.address(6)] == victim.mac
    with victim.netns.serving(80, address="::"):
        assert bridged.node.netns.asks(victim.address(6), 80)


def test_a_solicitation_from_a_foreign_address_leaves_no_trace(segment):
    to = gateway(segment.forger, 6)
    for source in (FOREIGN[6], "fe80::77"):
        question = neighbour(135, source, to, to, segment.forger.mac)
        frame = ethernet(segment.gateway_mac(segment.forger), segment.forger.mac, 0x86DD, question)
        segment.forger.send(frame)
    time.sleep(0.2)
    assert not {FOREIGN[6], "fe80::77"} & set(neighbours(segment.node.netns, 6))


def _router_advertisement(segment) -> bytes:
    source = link_local(segment.forger.mac)
    option = struct.pack("!BB", 200, 2) + FORGED + bytes(6)
    body = struct.pack("!BBHBBHLL", 134, 0, 0, 64, 0, 1800, 0, 0) + option
    said = packet(source, "ff02::1", 58, body, hops=255)
    return ethernet("33:33:00:00:00:01", segment.forger.mac, 0x86DD, said)


def _redirect(segment) -> bytes:
    source, to = link_local(segment.forger.mac), segment.victim.address(6)
    option = struct.pack("!BB", 200, 2) + FORGED + bytes(6)
    body = struct.pack("!BBHL", 137, 0, 0, 0) + ip_address(source).packed * 2 + option
    return ethernet(
        segment.victim.mac, segment.forger.mac, 0x86DD, packet(source, to, 58, body, 255)
    )


def _tagged(segment) -> bytes:
    plain = segment.udp(segment.victim.address(4), FORGED)
    return plain[:12] + struct.pack("!HH", 0x8100, 7) + plain[12:]


def _other_protocol(segment) -> bytes:
    return ethernet(segment.victim.mac, segment.forger.mac, 0x88B5, FORGED + bytes(46))


@pytest.mark.parametrize("frame", [_router_advertisement, _redirect, _tagged, _other_protocol])
def test_what_no_pod_has_to_say_does_not_reach_its_neighbours(bridged, frame):
    warm(bridged, 4)
    to = bridged.victim.address(4)
    assert bridged.received(bridged.victim.netns, to, [frame(bridged)], "packet", "eth0") == []


def test_ordinary_traffic_passes_with_empty_neighbour_tables(segment):
    node, one, other = segment.node, segment.forger, segment.victim
    target(segment, "outside", 4)  # which knows the way back
    for netns in (node.netns, one.netns, other.netns):
        netns.ip("neigh flush all")
    for family, outside in ((4, node.OUTSIDE_IP), (6, node.OUTSIDE_IP6)):
        for to in (other.address(family), one.address(family), gateway(one, family), outside):
            one.ping(to)
        for pod in (one, other):
            ping(node.netns, pod.address(family))


def test_a_pod_probes_for_its_own_addresses_and_uses_them(segment):
    """Duplicate address detection of both families, and the kernel's own link-local address."""
    pod = segment.forger
    pod.netns.ip("link set eth0 down")
    pod.netns.ip("link set eth0 up")
    own = pod.result["ips"][1]["address"]
    pod.netns.ip(f"addr replace {own} dev eth0")  # with DAD, unlike ours
    time.sleep(2.5)
    shown = pod.netns.ip_json("-6 addr show dev eth0")[0]["addr_info"]
    assert not [one for one in shown if one.get("tentative") or one.get("dadfailed")]
    mine = next(one["local"] for one in shown if one["scope"] == "link")
    assert mine == link_local(pod.mac)
    if not segment.routed:
        pod.netns.ip("neigh flush all")
        pod.ping(f"{link_local(segment.victim.mac)}%eth0")
        probe = arp(1, pod.mac, "0.0.0.0", pod.address(4))[:28] + GENUINE
        with listening(segment.victim.netns, "packet", "eth0") as heard:
            pod.send(ethernet("ff:ff:ff:ff:ff:ff", pod.mac, 0x0806, probe))
            assert any(GENUINE in frame for frame in heard())


def test_a_pod_that_makes_its_link_local_address_from_a_secret_is_still_heard(node):
    pod = node.pod()
    pod.run("sysctl", "-qw", "net.ipv6.conf.default.addr_gen_mode=3")
    result = node.add(node.dual(), pod).ok
    time.sleep(2.5)
    (shown,) = pod.ip_json("addr show dev eth0")
    mine = [one["local"] for one in shown["addr_info"] if one["scope"] == "link"]
    assert mine == [link_local(result["interfaces"][-1]["mac"])]


def test_a_network_can_do_without(node, datapath):
    segment = Segment(node, node.dual(datapath=datapath, ip_masq=False, anti_spoofing=False))
    warm(segment, 4)
    to = segment.victim.address(4)
    frame = segment.udp(to, FORGED, mac="02:00:00:00:00:99")
    assert len(segment.received(segment.victim.netns, to, [frame])) == 1
    assert not node.guarded()
    node.check(segment.conf, segment.forger.netns, segment.forger.result).succeeds()


def test_only_the_pods_that_the_network_names_are_exempt(node, datapath):
    conf = node.dual(
        datapath=datapath, ip_masq=False, anti_spoofing_exempt=["routers/*", "web/vip-?"]
    )
    segment = Segment(node, conf)
    guarded = {}
    for namespace, name in (
        ("routers", "any"),
        ("web", "vip-1"),
        ("web", "vip-10"),
        ("not-routers", "x"),
    ):
        args = f"IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name}"
        pod = segment.add(args=args)
        guarded[namespace, name] = pod.host_end in node.guarded()
        node.check(conf, pod.netns, pod.result, args=args).succeeds()
    assert guarded == {
        ("routers", "any"): False,
        ("web", "vip-1"): False,
        ("web", "vip-10"): True,
        ("not-routers", "x"): True,
    }


def test_nothing_is_left_of_a_pod_that_is_gone(segment):
    node, pod = segment.node, segment.forger
    assert node.guarded() == {pod.host_end, segment.victim.host_end}
    node.delete(segment.conf, pod.netns).succeeds()
    assert node.guarded() == {segment.victim.host_end}
    node.netns.ip(f"link del {segment.victim.host_end}")  # somebody else was quicker
    node.delete(segment.conf, segment.victim.netns).succeeds()
    node.delete(segment.conf, segment.victim.netns).succeeds()
    assert not node.guarded()


DAMAGE = {
    "a deleted qdisc": "qdisc del dev {end} ingress",
    "a deleted filter": "filter del dev {end} ingress pref 16",
    "another program": "filter replace dev {end} ingress protocol all pref 16 handle 1 "
    "bpf da bytecode",
}
ACCEPT_ALL = "1,6 0 0 4294967295"


@pytest.mark.parametrize("what", DAMAGE)
def test_check_names_it_and_the_daemon_repairs_it_after(segment, what):
    node, pod = segment.node, segment.forger
    assert repair(node) == [[], []]
    command = DAMAGE[what].format(end=pod.host_end).split()
    node.netns.run("tc", *command, *([ACCEPT_ALL] if what == "another program" else []))
    warm(segment, 4)
    to = segment.victim.address(4)
    frame = segment.udp(to, FORGED, mac="02:00:00:00:00:99")
    assert len(segment.received(segment.victim.netns, to, [frame])) == 1
    said = node.check(segment.conf, pod.netns, pod.result).error["details"]
    assert "anti-spoofing" in said
    assert repair(node) == [[f"{pod.host_end}: was not checked"], []]
    node.check(segment.conf, pod.netns, pod.result).succeeds()
    assert segment.received(segment.victim.netns, to, [frame]) == []


def test_a_flushed_ruleset_leaves_every_pod_checked(segment):
    node, to = segment.node, segment.victim.address(4)
    warm(segment, 4)
    node.netns.run("nft", "flush ruleset")
    frame = segment.udp(to, FORGED, mac="02:00:00:00:00:99")
    assert segment.received(segment.victim.netns, to, [frame]) == []
    assert repair(node) == [[], []]


def test_pods_of_a_release_without_it_are_protected_by_the_daemon(segment):
    node = segment.node
    for pod in (segment.forger, segment.victim):  # as that release would have left it
        node.netns.run("tc", "qdisc", "del", "dev", pod.host_end, "ingress")
    assert len(repair(node)[0]) == 2
    for pod in (segment.forger, segment.victim):
        node.check(segment.conf, pod.netns, pod.result).succeeds()


def extended(said: bytes, *kinds: int) -> bytes:
    """An IPv6 packet with extension headers before its payload."""
    payload, protocol = said[40:], said[6]
    for kind in reversed(kinds):
        header = bytes([protocol, 0]) + (bytes(6) if kind == 44 else b"\x01\x04" + bytes(4))
        payload, protocol = header + payload, kind
    return said[:4] + struct.pack("!HB", len(payload), protocol) + said[7:40] + payload


@pytest.mark.parametrize("kinds", [(0,), (60,), (43,), (44,), (0, 60), (0, 60, 43), (60,) * 4])
def test_extension_headers_do_not_hide_a_forged_advertisement(bridged, kinds):
    warm(bridged, 6)
    forger, victim = bridged.forger, bridged.victim
    claim = neighbour(136, forger.address(6), victim.address(6), gateway(forger, 6), forger.mac)
    frame = ethernet(victim.mac, forger.mac, 0x86DD, extended(claim + FORGED, *kinds))
    to = victim.address(6)
    assert bridged.received(victim.netns, to, [frame], "packet", "eth0") == []


@pytest.mark.parametrize("kinds", [(0,), (60,), (0, 60), (44,)])
def test_genuine_packets_with_extension_headers_pass(bridged, kinds):
    warm(bridged, 6)
    forger, victim = bridged.forger, bridged.victim
    said = extended(udp(forger.address(6), victim.address(6), FORGED), *kinds)
    frame = ethernet(victim.mac, forger.mac, 0x86DD, said)
    to = victim.address(6)
    assert frame in bridged.received(victim.netns, to, [frame], "packet", "eth0")


@pytest.mark.parametrize("kind", [0x0800, 0x0806, 0x86DD])
@pytest.mark.parametrize("length", [0, 8, 12, 13, 19])
def test_a_frame_that_is_too_short_to_be_checked_is_dropped(bridged, kind, length):
    warm(bridged, 4)
    forger, victim = bridged.forger, bridged.victim
    frame = ethernet(victim.mac, forger.mac, kind, (FORGED * 3)[:length])
    with listening(victim.netns, "packet", "eth0") as heard:
        forger.send(frame, bridged.udp(victim.address(4), GENUINE))
        assert frame not in heard()


def repair(node) -> list[list[str]]:
    """What the daemon's pass repairs, and what a second one does."""
    home = (node.plugins / "headcni").resolve().parent.parent
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{home}:{home}/vendor"}
    done = node.netns.run(node.python, "-S", "-c", REPAIR, node.tmp / "data", env=env)
    return json.loads(done.stdout)
