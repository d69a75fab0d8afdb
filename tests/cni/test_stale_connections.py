"""Clients of UDP that keep their port: the kernel remembers where their packets went before."""

from __future__ import annotations

import json
import sys

import pytest
from cni_node import ECHO, REPAIR_FIREWALL, mapped

PORT, CLIENT_PORT = 8053, 40000
DNS = mapped((PORT, 53, "udp"))
DENSE = {"type": "headcni-ipam", "subnet": "10.55.1.0/24", "strategy": "dense-pack"}

# A DEL as the daemon does it: the link is only cut, and deleted after the answer.
BURY = """
import json, sys
from headcni import deferred
from headcni.datapath.netlink import Netlink
from headcni.plugins.headcni.node import Node
from headcni.plugins.headcni.plugin import run
from headcni.store import Store
from contextlib import contextmanager
data, env, conf = sys.argv[1:]
with Store.in_directory(data) as store, Netlink() as kernel:
    @contextmanager
    def opened(_unused):
        yield Node(store, kernel, lambda: None)
    outcome = run(json.loads(env), conf.encode(), None, opened)
    print(json.dumps([outcome.code, deferred.finish(store, kernel)]))
"""

# An entry as a client of SCTP has it; this kernel may have no SCTP to make one with.
TRACK_SCTP = """
import json, socket, struct, sys
from headcni.datapath.netlink import *
def direction(kind, source, destination, source_port, destination_port):
    addresses = zip((1, 2), map(socket.inet_aton, (source, destination)))
    ports = zip((2, 3), (struct.pack("!H", port) for port in (source_port, destination_port)))
    return nested(
        kind,
        nested(1, *(attribute(*one) for one in addresses)),
        nested(2, u8(1, socket.IPPROTO_SCTP), *(attribute(*one) for one in ports)),
    )
client, node, pod, host_port = sys.argv[2:]
port = int(host_port)
body = struct.pack("=BBH", socket.AF_INET, 0, 0)
body += direction(1, client, node, port + 9, port) + direction(2, pod, client, 90, port + 9)
body += attribute(7, struct.pack("!I", 600))
with Netlink(NETLINK_NETFILTER) as kernel:
    kernel.do([Request(0x100, NLM_F_CREATE | NLM_F_EXCL, body, "track a connection")])
print(json.dumps(True))
"""


PING = """
import sys
sys.path.insert(0, sys.argv[1])
from agent import reached
assert reached("icmp", sys.argv[2], 0, 3)
"""


@pytest.fixture(params=["IPv4", "IPv6"])
def family(request):
    return request.param


@pytest.fixture
def conf(node, datapath):
    return node.dual(datapath=datapath)


def asks(node, family):
    """What the outside is answered, by a client that always uses the same port."""
    address = node.NODE_IP if family == "IPv4" else node.NODE_IP6
    return node.outside.asks(address, PORT, "udp", CLIENT_PORT)


def serving(pod, family):
    return pod.serving(53, "udp", "0.0.0.0" if family == "IPv4" else "::")


def tracked(node, *words, protocol="udp"):
    """The connections that the node tracks, of lines with all these words."""
    lines = node.netns.run("cat", "/proc/net/nf_conntrack").stdout.splitlines()
    return [line for line in lines if {protocol, *words} <= set(line.split())]


def test_a_client_reaches_the_new_pod_after_a_rollout(node, conf, family):
    old, new = node.pod(), node.pod()
    node.add({**conf, **DNS}, old).succeeds()
    with serving(old, family):
        assert asks(node, family)
    node.delete({**conf, **DNS}, old).succeeds()
    node.add({**conf, **DNS}, new).succeeds()
    with serving(new, family):
        assert asks(node, family)


def test_a_client_that_was_there_before_the_pod_is_answered(node, conf, family):
    pod = node.pod()
    node.add(conf).succeeds()  # the first pod makes the node track connections
    assert asks(node, family) == ""
    node.add({**conf, **DNS}, pod).succeeds()
    with serving(pod, family):
        assert asks(node, family)


def test_a_pod_that_inherits_an_address_is_not_reached_by_the_old_host_port(node, datapath):
    conf = node.conf(datapath=datapath, ipam=DENSE)
    old, heir = node.pod(), node.pod()
    address = node.add({**conf, **DNS}, old).address
    with serving(old, "IPv4"):
        assert asks(node, "IPv4")
    node.delete({**conf, **DNS}, old).succeeds()
    assert node.add(conf, heir).address == address
    with serving(heir, "IPv4"):
        assert asks(node, "IPv4") == ""


@pytest.mark.parametrize("by_the_daemon", [False, True])
@pytest.mark.parametrize("protocol", ["udp", "tcp"])
def test_a_released_address_takes_its_connections_with_it(node, datapath, protocol, by_the_daemon):
    conf, pod = node.conf(datapath=datapath), node.pod()
    address = node.add(conf, pod).address
    node.outside.ip(f"route add 10.55.1.0/24 via {node.NODE_IP}")
    with node.outside.serving(8000, protocol), pod.serving(8001, protocol):
        assert pod.asks(node.OUTSIDE_IP, 8000, protocol)
        assert node.outside.asks(address, 8001, protocol)
        pod.run(sys.executable, "-c", PING, ECHO.parent, node.OUTSIDE_IP)
    for one in (protocol, "icmp"):
        assert tracked(node, f"src={address}", protocol=one)
    assert tracked(node, f"dst={address}", protocol=protocol)
    if by_the_daemon:
        env = json.dumps(node.environment("DEL", pod))
        assert node.runs(BURY, env, json.dumps(conf)) == [0, 1]
    else:
        node.delete(conf, pod).succeeds()
    for one in (protocol, "icmp"):
        for way in ("src", "dst"):
            assert tracked(node, f"{way}={address}", protocol=one) == []


def test_a_pods_question_to_a_server_elsewhere_is_not_disturbed(node, datapath):
    """It has the host port's number, but not the node's address."""
    conf, client = node.conf(datapath=datapath), node.pod()
    node.add(conf, client).succeeds()
    with node.outside.serving(PORT, "udp"):
        assert client.asks(node.OUTSIDE_IP, PORT, "udp")
    before = tracked(node, f"dst={node.OUTSIDE_IP}", f"dport={PORT}")
    pod = node.pod()
    node.add({**conf, **DNS}, pod).succeeds()
    node.delete({**conf, **DNS}, pod).succeeds()
    assert len(before) == 1
    assert len(tracked(node, f"dst={node.OUTSIDE_IP}", f"dport={PORT}")) == 1


def test_a_client_is_answered_after_the_daemon_has_repaired_the_table(node, family):
    pod = node.pod()
    node.add({**node.dual(), **DNS}, pod).succeeds()
    node.netns.run("nft", "flush", "chain", "inet", "headcni", "ports")
    assert asks(node, family) == ""
    assert node.runs(REPAIR_FIREWALL) == [True, False]
    with serving(pod, family):
        assert asks(node, family)


def test_sctp_is_led_anew_when_its_port_comes_and_when_it_goes(node):
    conf, pod = {**node.conf(), **mapped((9000, 90, "sctp"))}, node.pod()
    neighbour = node.add(node.conf()).address
    client, own = node.OUTSIDE_IP, node.NODE_IP
    for host_port in ("9000", "9001"):
        node.runs(TRACK_SCTP, client, own, own, host_port)
    address = node.add(conf, pod).address
    assert not tracked(node, "dport=9000", protocol="sctp")
    node.runs(TRACK_SCTP, client, own, address, "9000")
    node.runs(TRACK_SCTP, client, own, neighbour, "9002")
    node.delete(conf, pod).succeeds()
    assert not tracked(node, "dport=9000", protocol="sctp")
    assert tracked(node, "dport=9001", protocol="sctp"), "of another port"
    assert tracked(node, f"src={neighbour}", protocol="sctp"), "of another pod"
