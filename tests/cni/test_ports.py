"""Host ports: who reaches a pod by them, from where, and that they go with the pod."""

from __future__ import annotations

import json
import signal

import pytest
from cni_node import mapped, sh

# An ADD that comes to an end when the kernel has the host port and the store does not yet.
INTERRUPTED_ADD = """
import os, signal, sys
from headcni.plugins.headcni.plugin import run
from headcni.datapath import nft
netconf, disk = sys.argv[1:]
add_elements = nft.add_elements
def interrupted(*what):
    add_elements(*what)
    if not disk:
        os.kill(os.getpid(), signal.SIGKILL)
    number = 0
    try:
        while True:
            number += 1
            with open(f"{disk}/ballast{number}", "wb") as file:
                file.write(bytes(4096))
    except OSError:
        pass
nft.add_elements = interrupted
outcome = run(os.environ, netconf.encode())
print(outcome.output.decode())
sys.exit(outcome.exit_code)
"""


@pytest.fixture
def conf(node, datapath):
    return node.dual(datapath=datapath)


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_the_outside_reaches_a_pod_and_is_seen_as_itself(node, conf, protocol):
    pod = node.pod()
    node.add({**conf, **mapped((8080, 80, protocol))}, pod).succeeds()
    with pod.serving(80, protocol):
        assert node.outside.asks(node.NODE_IP, 8080, protocol) == node.OUTSIDE_IP
    with pod.serving(80, protocol, "::"):
        assert node.outside.asks(node.NODE_IP6, 8080, protocol) == node.OUTSIDE_IP6


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1", "2001:db8::1"])
def test_the_node_itself_reaches_a_pod(node, conf, address):
    pod = node.pod()
    node.add({**conf, **mapped((8080, 80, "tcp"))}, pod).succeeds()
    with pod.serving(80, address="::" if ":" in address else "0.0.0.0"):
        assert node.netns.asks(address, 8080)


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_a_pod_reaches_itself_and_its_neighbour_by_the_nodes_address(node, conf, address):
    pod, neighbour = node.pod(), node.pod()
    node.add({**conf, **mapped((8080, 80, "tcp"))}, pod).succeeds()
    node.add(conf, neighbour).succeeds()
    with pod.serving(80, address="::" if ":" in address else "0.0.0.0"):
        assert pod.asks(address, 8080)
        assert neighbour.asks(address, 8080)


def test_a_host_ip_limits_where_the_port_answers(node, conf):
    node.netns.ip("addr add 192.0.2.9/24 dev eth0")
    pod = node.pod()
    node.add({**conf, **mapped((8080, 80, "tcp", "192.0.2.9"))}, pod).succeeds()
    with pod.serving(80):
        assert node.outside.asks("192.0.2.9", 8080) == node.OUTSIDE_IP
        assert node.outside.asks(node.NODE_IP, 8080) == ""


def test_two_pods_share_a_port_number_by_protocol_or_by_host_ip(node, conf):
    for mapping in ((53, 53, "udp"), (53, 53, "tcp"), (53, 53, "tcp", "192.0.2.1")):
        node.add({**conf, **mapped(mapping)}).succeeds()


def test_sctp_is_mapped_like_the_others(node, conf):
    pod = node.pod()
    own = node.add({**conf, **mapped((9000, 90, "sctp"))}, pod).address
    assert f"sctp . 9000 : {own}" in node.nft() and "sctp . 9000 : 90" in node.nft()


def test_a_port_goes_with_its_pod_and_is_free_for_the_next(node, conf):
    first, second = node.pod(), node.pod()
    both = {**conf, **mapped((8080, 80, "tcp"))}
    node.add(both, first).succeeds()
    node.delete(both, first).succeeds()
    assert node.leftovers()["mapped"] == []
    with first.serving(80):
        assert node.outside.asks(node.NODE_IP, 8080) == ""
    node.add(both, second).succeeds()
    with second.serving(80):
        assert node.outside.asks(node.NODE_IP, 8080) == node.OUTSIDE_IP


def test_ports_come_and_go_without_the_table_being_made_anew(node, conf):
    """That is only for a table that is not what it should be."""
    node.add({**conf, **mapped((8079, 80, "tcp"))}).succeeds()
    made = table_handle(node)
    many = [(20000 + number, 80, "tcp") for number in range(450)]
    for ports in (
        [(8080, 80, "tcp"), (8080, 81, "udp"), (8080, 82, "sctp")],
        [(8080, 80, "tcp", "192.0.2.1"), (8080, 80, "tcp", "2001:db8::1")],
        many,
    ):
        pod, both = node.pod(), {**conf, **mapped(*ports)}
        made_of_it = node.add(both, pod).ok
        node.check(both, pod, made_of_it).succeeds()
        if ports is not many:  # so many are taken out by making it anew
            node.delete(both, pod).succeeds()
        assert table_handle(node) == made
    own = made_of_it["ips"][0]["address"].partition("/")[0]
    assert f"tcp . 20449 : {own}" in node.nft() and "tcp . 20449 : 80" in node.nft()


def table_handle(node):
    listed = json.loads(node.netns.run("nft", "-j", "list", "tables").stdout)["nftables"]
    tables = [one["table"] for one in listed if "table" in one]
    (handle,) = [one["handle"] for one in tables if one["name"] == "headcni"]
    return handle


def test_a_neighbour_on_the_network_cannot_reach_the_nodes_loopback(node, conf):
    """127.0.0.1:hostPort needs route_localnet, which by itself would open 127.0.0.0/8."""
    pod = node.pod()
    node.add({**conf, **mapped((8080, 80, "tcp"))}, pod).succeeds()
    through = "headcni0" if conf["datapath"] == "bridge" else None
    if through:
        assert (
            node.netns.run("sysctl", "-n", f"net.ipv4.conf.{through}.route_localnet").stdout
            == "1\n"
        )
    pod.run("sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1")
    pod.ip("addr del 127.0.0.1/8 dev lo")
    pod.ip("route add 127.0.0.0/8 via 10.55.1.1")
    with node.netns.serving(9000, address="127.0.0.1"):
        assert pod.asks("127.0.0.1", 9000) == ""


def test_ports_survive_a_replaced_table(node, conf):
    pod = node.pod()
    node.add({**conf, **mapped((8080, 80, "tcp"))}, pod).succeeds()
    node.netns.run("nft", "flush", "ruleset")
    node.add(conf).succeeds()
    with pod.serving(80):
        assert node.outside.asks(node.NODE_IP, 8080) == node.OUTSIDE_IP


def interrupted_add(node, conf, pod, full_disk: object = ""):
    home = (node.plugins / "headcni").resolve().parent.parent
    env = {**node.environment("ADD", pod), "PYTHONPATH": f"{home}:{home}/vendor"}
    program = (node.python, "-S", "-c", INTERRUPTED_ADD, json.dumps(conf), full_disk)
    return node.netns.run(*program, env=env, check=False)


def is_led_to_the_next_pod(node, conf) -> bool:
    """Whether host port 8080 leads to a pod that has none. It gets the lowest free address."""
    pod = node.pod()
    added = node.add(conf, pod)
    assert added.address == "10.55.1.3"
    node.check(conf, pod, added.ok).succeeds()
    with pod.serving(80):
        return node.outside.asks(node.NODE_IP, 8080) != ""


@pytest.fixture
def dense(node, datapath):
    ipam = {"type": "headcni-ipam", "subnet": "10.55.1.0/24", "strategy": "dense-pack"}
    return node.conf(datapath=datapath, ipam=ipam)


@pytest.mark.parametrize("then", ["DEL", "GC", "GC, its link is gone"])
def test_the_host_port_of_a_killed_add_does_not_lead_to_the_next_pod(node, dense, then):
    other, pod = node.pod(), node.pod()
    node.add(dense, other).succeeds()  # keeps its network's part of the nft table
    killed = interrupted_add(node, {**dense, **mapped((8080, 80, "tcp"))}, pod)
    assert killed.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), killed
    assert len(node.leftovers()["mapped"]) == 2  # its address and its port
    if then == "DEL":
        node.delete(dense, pod).succeeds()
    else:
        if then != "GC":
            pod.ip("link del eth0")
        valid = [{"containerID": other.name, "ifname": "eth0"}]
        node.call("GC", {**dense, "cni.dev/valid-attachments": valid}).succeeds()
    assert not is_led_to_the_next_pod(node, dense)
    assert node.leftovers()["mapped"] == []


def test_the_host_port_of_an_add_whose_disk_is_full_does_not_lead_to_the_next_pod(node, dense):
    data = node.tmp / "data"
    data.mkdir()
    sh("mount", "-t", "tmpfs", "-o", "size=1m", "headcni-test", data)
    try:
        pod = node.pod()
        node.add(dense).succeeds()
        failed = interrupted_add(node, {**dense, **mapped((8080, 80, "tcp"))}, pod, data)
        assert "the disk is full" in failed.stdout, failed
        for ballast in data.glob("ballast*"):
            ballast.unlink()
        node.delete(dense, pod).succeeds()
        assert not is_led_to_the_next_pod(node, dense)
        assert node.leftovers()["mapped"] == []
    finally:
        sh("umount", "-l", data, check=False)


@pytest.mark.parametrize("which", ["with the port", "older", "newer"])
def test_a_flushed_ruleset_does_not_open_the_nodes_loopback(node, conf, which):
    """`nft flush ruleset` is the first line of Debian's nftables.conf; no daemon runs here."""
    pods = {name: node.pod() for name in ("older", "with the port", "newer")}
    for name, pod in pods.items():
        ports = mapped((8080, 80, "tcp")) if name == "with the port" else {}
        node.add({**conf, **ports}, pod).succeeds()
    pod = pods[which]
    pod.run("sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1")
    pod.ip("addr del 127.0.0.1/8 dev lo")
    pod.ip("route add 127.0.0.0/8 via 10.55.1.1")
    node.netns.run("nft", "flush", "ruleset")
    with node.netns.serving(9000, address="127.0.0.1"):
        assert pod.asks("127.0.0.1", 9000) == ""


# A call on a kernel that knows no classifier by the name that the filter has.
WITHOUT_CLS_BPF = """
import os, sys
from headcni.plugins.headcni.plugin import run
from headcni.datapath import rtnl
known = rtnl.text
rtnl.text = lambda kind, value: known(kind, "no_such" if value == "bpf" else value)
outcome = run(os.environ, sys.argv[1].encode())
print(outcome.output.decode())
sys.exit(outcome.exit_code)
"""


def call_without_cls_bpf(node, command, asked, pod):
    home = (node.plugins / "headcni").resolve().parent.parent
    env = {**node.environment(command, pod), "PYTHONPATH": f"{home}:{home}/vendor"}
    return node.netns.run(
        node.python, "-S", "-c", WITHOUT_CLS_BPF, json.dumps(asked), env=env, check=False
    )


def test_a_kernel_that_cannot_keep_pods_out_does_not_have_its_loopback_opened(node, conf):
    pod, asked = node.pod(), {**conf, **mapped((8080, 80, "tcp")), "anti_spoofing": False}
    added = call_without_cls_bpf(node, "ADD", asked, pod)
    assert added.returncode == 0, added
    assert "127.0.0.1:hostPort does not lead to pods" in added.stderr
    shown = node.netns.run("sysctl", "-a", "-r", "route_localnet").stdout
    assert " = 1" not in shown
    with pod.serving(80):
        assert node.outside.asks(node.NODE_IP, 8080) == node.OUTSIDE_IP


def test_a_kernel_that_cannot_check_pods_has_no_unchecked_pod(node, conf):
    refused = call_without_cls_bpf(node, "ADD", conf, node.pod())
    assert refused.returncode == 1, refused
    said = json.loads(refused.stdout)
    assert said["msg"] == "anti_spoofing is true, but this kernel cannot check what pods send"
    assert "modprobe sch_ingress cls_bpf, or set anti_spoofing to false" in said["details"]
    assert node.leftovers()["links"] == set()
    assert node.leftovers()["allocation"] == []


def test_status_says_that_the_kernel_cannot_check_pods_before_a_pod_comes(node, conf):
    refused = call_without_cls_bpf(node, "STATUS", conf, None)
    assert refused.returncode == 1, refused
    assert "modprobe sch_ingress cls_bpf" in json.loads(refused.stdout)["details"]
    unchecked = call_without_cls_bpf(node, "STATUS", {**conf, "anti_spoofing": False}, None)
    assert unchecked.returncode == 0, unchecked
