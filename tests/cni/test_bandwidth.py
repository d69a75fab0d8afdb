"""Bandwidth limits: in the kernel as asked, and felt."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys

import pytest
from cni_node import EMPTY

SEND = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], 9000), 5)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    s.sendall(bytes(16384))
"""
RECEIVE = """
import socket, time
server = socket.create_server(("0.0.0.0", 9000)); print("ready", flush=True)
c, _ = server.accept(); began = time.monotonic(); n = 0
while time.monotonic() - began < 1.5 and (data := c.recv(65536)):
    n += len(data)
print(int(n * 8 / (time.monotonic() - began)))
"""
RATE, BURST = 4_000_000, 400_000


def limits(**rates):
    return {"capabilities": {"bandwidth": True}, "runtimeConfig": {"bandwidth": rates}}


def transfer(sender, receiver, address):
    """Bits per second that arrive."""
    command = ["ip", "netns", "exec", receiver.name, sys.executable, "-c", RECEIVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "ready\n"
        sender.run(sys.executable, "-c", SEND, address, check=False)
        return int(server.communicate(timeout=20)[0])


@pytest.mark.parametrize("direction", ["ingress", "egress"])
def test_a_limit_is_felt_in_its_direction_and_not_in_the_other(node, datapath, direction):
    pod = node.pod()
    rates = {f"{direction}Rate": RATE, f"{direction}Burst": BURST}
    own = node.add({**node.conf(datapath=datapath), **limits(**rates)}, pod).address
    into = transfer(node.netns, pod, own)
    out = transfer(pod, node.netns, "10.55.1.1")
    slow, fast = (into, out) if direction == "ingress" else (out, into)
    assert 0 < slow < 2 * RATE < fast


def test_a_pod_cannot_lift_its_own_limit(node, datapath):
    pod = node.pod()
    rates = limits(egressRate=RATE, egressBurst=BURST)
    node.add({**node.conf(datapath=datapath), **rates}, pod).succeeds()
    pod.run("tc", "qdisc", "replace", "dev", "eth0", "root", "pfifo")
    pod.run("tc", "qdisc", "del", "dev", "eth0", "root")
    pod.run("tc", "qdisc", "del", "dev", "eth0", "ingress", check=False)
    assert 0 < transfer(pod, node.netns, "10.55.1.1") < 2 * RATE


def test_both_limits_are_shown_by_tc_and_gone_with_the_pod(node, datapath):
    pod = node.pod()
    rates = limits(ingressRate=RATE, ingressBurst=BURST, egressRate=2 * RATE, egressBurst=BURST)
    conf = {**node.conf(datapath=datapath), **rates}
    result = node.add(conf, pod).ok
    shown = node.netns.run("tc", "qdisc", "show").stdout
    assert "rate 4Mbit" in shown
    assert "rate 8Mbit" in shown
    node.check(conf, pod, result).succeeds()
    limiter, host = (one["name"] for one in result["interfaces"][-3:-1])
    node.netns.run("tc", "qdisc", "del", "dev", limiter, "root")
    assert "egress: no tbf limits it" in node.check(conf, pod, result).error["details"]
    node.netns.run("tc", "qdisc", "del", "dev", host, "ingress")
    assert "egress: nothing leads" in node.check(conf, pod, result).error["details"]
    node.netns.run("tc", "qdisc", "del", "dev", host, "root")
    assert "ingress: no tbf limits it" in node.check(conf, pod, result).error["details"]
    node.delete(conf, pod).succeeds()
    assert "tbf" not in node.netns.run("tc", "qdisc", "show").stdout
    assert node.leftovers() == EMPTY


def test_a_pod_without_an_egress_limit_has_no_ifb(node, datapath):
    node.add({**node.conf(datapath=datapath), **limits(ingressRate=RATE, ingressBurst=BURST)})
    assert not [name for name in node.netns.links() if name.startswith("hci")]


def test_a_pod_of_a_release_that_shaped_inside_of_it_passes_check(node):
    pod, rates = node.pod(), limits(egressRate=RATE, egressBurst=BURST)
    result = node.add(node.conf(), pod).ok
    with sqlite3.connect(node.tmp / "data" / "headcni.db") as db:
        db.execute("UPDATE attachment SET config = ?", (json.dumps({**node.conf(), **rates}),))
    conf = {**node.conf(), **rates}
    assert "egress: no tbf limits it" in node.check(conf, pod, result).error["details"]
    tbf = "tbf rate 4mbit burst 50000 limit 62500"
    pod.run("tc", "qdisc", "add", "dev", "eth0", "root", *tbf.split())
    node.check(conf, pod, result).succeeds()


@pytest.mark.parametrize("verb", ["DEL", "GC", "ADD"])
def test_an_ifb_that_outlived_its_veth_is_taken_away(node, verb):
    pod = node.pod()
    conf = {**node.conf(), **limits(egressRate=RATE, egressBurst=BURST)}
    host = node.add(conf, pod).ok["interfaces"][-2]["name"]
    before = node.netns.ip_json(f"link show dev hci{host[2:]}")[0]["ifindex"]
    node.netns.ip(f"link del {host}")
    if verb == "GC":
        node.call("GC", {**conf, "cni.dev/valid-attachments": []}).succeeds()
    elif verb == "DEL":
        node.delete(conf, pod).succeeds()
    else:  # it makes another
        node.add(conf, pod).succeeds()
        assert node.netns.ip_json(f"link show dev hci{host[2:]}")[0]["ifindex"] != before
        node.delete(conf, pod).succeeds()
    assert node.leftovers() == EMPTY


def test_a_rate_beyond_32_bits_is_not_cut_short(node):
    pod = node.pod()
    rates = limits(ingressRate=80_000_000_000, ingressBurst=1_000_000_000)
    node.add({**node.conf(), **rates}, pod).succeeds()
    assert "rate 80Gbit" in node.netns.run("tc", "qdisc", "show").stdout
