"""A pod's author asks for a host port that the node itself uses, and does not get it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import pytest
from cni_node import mapped

from headcni.errors import INVALID_CONFIG, PORT_TAKEN

# Opens a socket of a kind on an address and port, says so and waits.
HOLD = """
import socket, sys
kind, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
family = socket.AF_INET6 if ":" in address else socket.AF_INET
held = socket.socket(family, socket.SOCK_DGRAM if "udp" in kind else socket.SOCK_STREAM)
if "v6only" in kind:
    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
held.bind((address, port))
if "client" in kind:
    held.connect(("192.0.2.2", 9))
elif "tcp" in kind:
    held.listen()
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(node, kind, address, port):
    command = ["ip", "netns", "exec", node.netns.name, sys.executable, "-c", HOLD]
    with subprocess.Popen(
        [*command, kind, address, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"ready\n"
        yield
        holder.stdin.close()


def port_of_a_pod(node, *mapping, **conf):
    return node.add({**node.dual(**conf), **mapped(mapping)})


@pytest.mark.parametrize(
    ("kind", "address", "port", "asked"),
    [
        ("tcp", "0.0.0.0", 22, (22, 22, "tcp")),
        ("tcp", "::", 22, (22, 22, "tcp", "192.0.2.1")),
        ("tcp", "0.0.0.0", 22, (22, 22, "tcp", "192.0.2.1")),
        ("tcp", "127.0.0.1", 9001, (9001, 80, "tcp")),
        ("tcp", "127.0.0.1", 9001, (9001, 80, "tcp", "127.0.0.1")),
        ("tcp", "192.0.2.1", 8080, (8080, 80, "tcp")),
        ("tcp", "2001:db8::1", 8080, (8080, 80, "tcp", "2001:db8::1")),
        ("udp", "0.0.0.0", 5353, (5353, 53, "udp")),
        ("udp", "::", 5353, (5353, 53, "udp")),
    ],
)
def test_a_port_on_which_the_node_listens_is_refused(node, kind, address, port, asked):
    with held(node, kind, address, port):
        refused = port_of_a_pod(node, *asked).error
    assert refused["code"] == PORT_TAKEN
    assert f"host port {port}/{kind} is taken: the node listens there" in refused["msg"]
    assert node.leftovers()["mapped"] == []
    port_of_a_pod(node, *asked).succeeds()  # it is free now


@pytest.mark.parametrize(
    ("kind", "address", "port", "asked"),
    [
        ("tcp", "192.0.2.1", 8080, (8080, 80, "tcp", "127.0.0.1")),
        ("tcp", "0.0.0.0", 8080, (8080, 80, "udp")),
        ("tcp", "0.0.0.0", 8081, (8080, 80, "tcp")),
        ("tcp v6only", "::", 8080, (8080, 80, "tcp", "192.0.2.1")),
        ("tcp", "127.0.0.53", 53, (53, 53, "tcp")),
        ("tcp", "::1", 8080, (8080, 80, "tcp")),
        ("udp client", "0.0.0.0", 40000, (40000, 80, "udp")),
    ],
)
def test_a_port_that_takes_nobodys_clients_is_given(node, kind, address, port, asked):
    with held(node, kind, address, port):
        port_of_a_pod(node, *asked).succeeds()


def test_a_connection_that_has_ended_keeps_no_port(node):
    """Its socket is in TIME_WAIT for a minute: where the program was restarted, say."""
    with node.netns.serving(8080):
        assert node.outside.asks(node.NODE_IP, 8080)
    port_of_a_pod(node, 8080, 80, "tcp").succeeds()


def test_a_pod_that_is_started_again_gets_its_port_again(node):
    conf, pod = {**node.dual(), **mapped((8080, 80, "tcp"))}, node.pod()
    node.add(conf, pod).succeeds()
    with pod.serving(80):
        assert node.outside.asks(node.NODE_IP, 8080)
    node.delete(conf, pod).succeeds()
    node.add(conf).succeeds()


def test_who_begins_to_listen_later_takes_no_port_from_a_pod(node):
    conf, pod = {**node.dual(), **mapped((8080, 80, "tcp"))}, node.pod()
    added = node.add(conf, pod).ok
    with held(node, "tcp", "0.0.0.0", 8080):
        node.check(conf, pod, added).succeeds()
        node.add(conf, pod).succeeds()  # the same pod again, as a runtime may ask


@pytest.mark.parametrize(("port", "protocol"), [(10250, "tcp"), (41641, "udp"), (41642, "udp")])
def test_reserved_ports_are_refused_though_nobody_listens(node, port, protocol):
    refused = port_of_a_pod(node, port, 80, protocol).error
    assert refused["code"] == PORT_TAKEN
    assert f"host port {port}/{protocol} is reserved for the node" in refused["msg"]


def test_the_list_of_reserved_ports_is_the_operators(node):
    own = {"reserved_ports": ["22", "30000-32767/tcp"]}
    for port, protocol in ((22, "tcp"), (22, "udp"), (30000, "tcp"), (32767, "tcp")):
        assert port_of_a_pod(node, port, 80, protocol, **own).error["code"] == PORT_TAKEN
    for port, protocol in ((10250, "tcp"), (30000, "udp"), (32768, "tcp")):
        port_of_a_pod(node, port, 80, protocol, **own).succeeds()


def test_an_operator_may_give_pods_the_ports_of_listeners(node):
    with held(node, "tcp", "0.0.0.0", 22):
        port_of_a_pod(node, 22, 22, "tcp", host_ports_over_listeners=True).succeeds()


@pytest.mark.parametrize("address", ["127.0.0.53", "127.0.0.2", "::1"])
def test_a_loopback_address_other_than_127_0_0_1_is_refused(node, address):
    refused = port_of_a_pod(node, 53, 53, "tcp", address).error
    assert refused["code"] == INVALID_CONFIG
    assert f"hostIP {address} of host port 53/tcp" in refused["msg"]


def test_a_host_port_leads_no_other_loopback_address_to_the_pod(node):
    """systemd-resolved answers on 127.0.0.53 while a DNS server of a pod has the node's port 53."""
    pod = node.pod()
    node.add({**node.dual(), **mapped((53, 53, "tcp"))}, pod).succeeds()
    with pod.serving(53), node.netns.serving(53, address="127.0.0.53"):
        assert node.netns.asks("127.0.0.53", 53) == "127.0.0.1"  # as who asked it, not masqueraded
        assert node.outside.asks(node.NODE_IP, 53) == node.OUTSIDE_IP
