"""Bandwidth limits: in the kernel as asked, and felt."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


def test_both_limits_are_shown_by_tc_and_gone_with_the_pod(node, datapath):
    pod = node.pod()
    rates = limits(ingressRate=RATE, ingressBurst=BURST, egressRate=2 * RATE, egressBurst=BURST)
    conf = {**node.conf(datapath=datapath), **rates}
    result = node.add(conf, pod).ok
    assert "rate 4Mbit" in node.netns.run("tc", "qdisc", "show").stdout
    assert "rate 8Mbit" in pod.run("tc", "qdisc", "show").stdout
    node.check(conf, pod, result).succeeds()
    pod.run("tc", "qdisc", "del", "dev", "eth0", "root")
    assert "egress: no tbf limits it" in node.check(conf, pod, result).error["details"]
    host = result["interfaces"][-2]["name"]
    node.netns.run("tc", "qdisc", "del", "dev", host, "root")
    assert "ingress: no tbf limits it" in node.check(conf, pod, result).error["details"]
    node.delete(conf, pod).succeeds()
    assert "tbf" not in node.netns.run("tc", "qdisc", "show").stdout


def test_a_rate_beyond_32_bits_is_not_cut_short(node):
    pod = node.pod()
    rates = limits(ingressRate=80_000_000_000, ingressBurst=1_000_000_000)
    node.add({**node.conf(), **rates}, pod).succeeds()
    assert "rate 80Gbit" in node.netns.run("tc", "qdisc", "show").stdout
