"""What belongs to no connection between two pods: packets to groups of pods (multicast, broadcast),
and messages that look like neighbour discovery."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cni_node import CniNode, Namespace
from patience import until
from policy_node import (
    PolicyDaemon,
    add,
    daemon_of,
    namespace_object,
    pod_object,
    policy_object,
)

GROUPS = ("224.0.0.251", "255.255.255.255", "ff02::1")
DENY = {"podSelector": {}, "policyTypes": ["Ingress"]}
SETTLE = 0.5
SOLICIT, ADVERT = 135, 136

# Each prints what it gets. A raw socket sees ICMPv6 before the kernel judges its hop limit.
LISTEN = """
import socket, struct, sys, threading
index = socket.if_nametoindex("eth0")
four = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
four.bind(("", 5353))
four.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP,
    struct.pack("=4s4si", socket.inet_aton("224.0.0.251"), bytes(4), index))
six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
six.bind(("::", 5353))
raw = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
def work(one):
    while True:
        said = one.recv(2048)
        if one is not raw or b"headcni's test" in said:
            print(said[32:].decode() if one is raw else said.decode(), flush=True)
print("ready", flush=True)
for one in (four, six, raw):
    threading.Thread(target=work, args=[one]).start()
"""
SEND = """
import socket, struct, sys
group, words = sys.argv[1], " ".join(sys.argv[:0:-1]).encode()
family = socket.AF_INET6 if ":" in group else socket.AF_INET
with socket.socket(family, socket.SOCK_DGRAM) as one:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    if family == socket.AF_INET:
        index = struct.pack("=4s4si", bytes(4), bytes(4), socket.if_nametoindex("eth0"))
        one.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, index)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
        one.sendto(words, (group, 5353))
    else:
        one.sendto(words, (group, 5353, 0, socket.if_nametoindex("eth0")))
"""
# A message that the sender's anti-spoofing lets through: of its own address and its own MAC.
FORGE = """
import pathlib, socket, struct, sys
to, own, kind, hops = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
mac = bytes.fromhex(pathlib.Path("/sys/class/net/eth0/address").read_text().replace(":", ""))
with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as one:
    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, hops)
    head = struct.pack("!BBHI", kind, 0, 0, 0) + socket.inet_pton(socket.AF_INET6, own)
    words = b"headcni's test: " + f"type {kind} hop limit {hops}".encode()
    one.sendto(head + bytes([kind - 134, 1]) + mac + words, (to, 0))
"""


class Listener:
    def __init__(self, pod: Namespace) -> None:
        self.pod, self.lines = pod, list[str]()
        self.process = python(pod, LISTEN)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def taken(self) -> list[str]:
        """What others have sent up to now, once each. A pod hears its own broadcasts, too."""
        time.sleep(SETTLE)
        found, self.lines = self.lines, []
        return sorted({one.partition(" ")[2] for one in found if not one.startswith(self.pod.name)})


def python(pod: Namespace, code: str, *arguments: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", pod.name, sys.executable, "-u", "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)


@contextmanager
def listening(pod: Namespace) -> Iterator[Listener]:
    made = Listener(pod)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def send(pod: Namespace, code: str, *arguments: str) -> None:
    assert python(pod, code, *arguments).wait(10) == 0


def to_groups(pod: Namespace) -> None:
    for group in GROUPS:
        send(pod, SEND, group, pod.name)


def arrived(listener: Listener, sender: Namespace) -> list[str]:
    to_groups(sender)
    return listener.taken()


def world_of(policies: list[dict], *pods: str) -> dict:
    objects = [pod_object("shop", name, {"app": name}) for name in pods]
    namespaces = [namespace_object("shop"), namespace_object("other")]
    return {"pods": objects, "namespaces": namespaces, "policies": policies}


def bridged(node: CniNode, daemon: PolicyDaemon | None, name: str, datapath: str = "bridge"):
    conf = node.dual(enable_network_policy=True, datapath=datapath)
    netns, answer = add(node, conf, name, "shop", daemon)
    for group in ("224.0.0.0/4", "255.255.255.255"):
        netns.ip(f"route replace {group} dev eth0")
    addresses = [one["address"].partition("/")[0] for one in answer.ok["ips"]]
    return netns, next(one for one in addresses if ":" in one)


@pytest.fixture
def elsewhere():
    return policy_object("other", "deny", DENY)


def test_packets_to_groups_pass_while_every_pod_is_known_and_open(node, elsewhere):
    with daemon_of(node) as daemon:
        daemon.ask("world", world_of([elsewhere], "web", "mate"))
        web, _unused = bridged(node, daemon, "web")
        mate, _unused = bridged(node, daemon, "mate")
        with listening(mate) as listener:
            until(lambda: arrived(listener, web) == sorted(GROUPS))


def test_packets_to_groups_do_not_reach_isolated_pods(node):
    with daemon_of(node) as daemon:
        deny = policy_object(
            "shop", "deny", {**DENY, "podSelector": {"matchLabels": {"app": "web"}}}
        )
        daemon.ask("world", world_of([deny], "web", "mate"))
        web, _unused = bridged(node, daemon, "web")
        mate, _unused = bridged(node, daemon, "mate")
        with listening(web) as listener:
            assert arrived(listener, mate) == []


def test_packets_to_groups_neither_reach_nor_leave_a_pod_that_is_not_known(node, elsewhere):
    with daemon_of(node) as daemon:
        daemon.ask("world", world_of([elsewhere], "mate"))
        web, _unused = bridged(node, daemon, "web")
        mate, _unused = bridged(node, daemon, "mate")
        with listening(web) as unknown, listening(mate) as listener:
            assert arrived(unknown, mate) == []
            assert arrived(listener, web) == []
            known = {"key": ["shop", "web"], "object": pod_object("shop", "web")}
            daemon.ask("pod", known)
            until(lambda: arrived(listener, web) == sorted(GROUPS))
            assert daemon.ask("repair") == []


def test_packets_to_groups_do_not_reach_a_pod_that_was_added_without_the_daemon(node, elsewhere):
    with daemon_of(node) as daemon:
        daemon.ask("world", world_of([elsewhere], "web", "mate"))
        mate, _unused = bridged(node, daemon, "mate")
    web, _unused = bridged(node, None, "web")
    with listening(web) as unknown, listening(mate) as listener:
        assert arrived(unknown, mate) == []
        assert arrived(listener, web) == []


def test_only_neighbours_speak_neighbour_discovery(node, datapath):
    """A router lowers the hop limit, so a message with less than 255 is none."""
    with daemon_of(node) as daemon:
        daemon.ask("world", world_of([policy_object("shop", "deny", DENY)], "web", "mate"))
        web, address = bridged(node, daemon, "web", datapath)
        mate, own = bridged(node, daemon, "mate", datapath)
        with listening(web) as listener:
            for kind in (SOLICIT, ADVERT):
                for hops in (64, 254, 255):
                    send(mate, FORGE, address, own, str(kind), str(hops))
            seen = [line.partition("type ")[2] for line in listener.taken()]
        # Routed pods are no neighbours: the node has lowered the hop limit.
        neighbours = [f"{kind} hop limit 255" for kind in (SOLICIT, ADVERT)]
        assert seen == (neighbours if datapath == "bridge" else [])
