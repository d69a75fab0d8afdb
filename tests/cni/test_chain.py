"""HeadCNI with the Go plugins: before them in a list, and as the one that calls them."""

from __future__ import annotations

import json
import os

import pytest
from cni_node import EMPTY

from headcni.errors import ADDRESS_TAKEN


def conflist(node, *others, **changes):
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [{**node.conf(cniVersion=None, name=None), **changes}, *others],
    }


def host_local(node):
    """What delegates get as their IPAM by default, but with a folder of the test's own."""
    return {"type": "host-local", "dataDir": str(node.tmp / "networks")}


PORTMAP = {"type": "portmap", "capabilities": {"portMappings": True}}
BANDWIDTH = {"type": "bandwidth", "ingressRate": 8_000_000, "ingressBurst": 800_000}
FIREWALL = {"type": "firewall", "backend": "iptables"}
TUNING = {"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}}


def test_portmap_bandwidth_firewall_and_tuning_work_after_us(node, datapath):
    chained = conflist(node, PORTMAP, BANDWIDTH, FIREWALL, TUNING, datapath=datapath)
    pod, port = node.pod(), {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}
    result = node.cnitool("add", chained, pod, portMappings=[port]).ok
    assert result["ips"][0]["address"].startswith("10.55.1.")
    with pod.serving(80):
        assert node.outside.asks(node.NODE_IP, 8080) == node.OUTSIDE_IP
    assert pod.run("sysctl", "-n", "net.core.somaxconn").stdout == "500\n"
    assert "tbf" in node.netns.run("tc", "qdisc", "show").stdout
    assert node.cnitool("check", chained, pod, portMappings=[port]).code == 0
    assert node.cnitool("del", chained, pod, portMappings=[port]).code == 0
    assert node.leftovers() == EMPTY


def test_a_delegate_gets_its_addresses_and_mtu_from_us(node):
    conf = node.conf(
        delegate={"type": "bridge", "bridge": "cni0"},
        ipam=host_local(node),
        mtu=1300,
        ipMasq=False,
    )
    pod = node.pod()
    result = node.add(conf, pod).ok
    assert result["ips"][0]["address"].startswith("10.55.1.")
    assert "mtu 1300" in pod.ip("link show eth0")
    node.check(conf, pod, result).succeeds()
    assert node.delete(conf, pod).code == 0
    assert pod.links() == {"lo"}
    assert node.leftovers() == EMPTY


def test_a_chain_of_delegates_runs_in_order_and_goes_in_reverse(node):
    conf = node.conf(
        ipam=host_local(node), ipMasq=False, plugins=[{"type": "bridge", "bridge": "cni0"}, TUNING]
    )
    pod = node.pod()
    result = node.add(conf, pod).ok
    assert pod.run("sysctl", "-n", "net.core.somaxconn").stdout == "500\n"
    kept = node.leftovers()["plugin_state"]
    assert [row[4] for row in kept] == ["bridge", "tuning"]
    node.check(conf, pod, result).succeeds()
    assert node.delete(conf, pod).code == 0
    assert node.leftovers() == EMPTY


def test_a_delegate_that_fails_rolls_back_those_before_it(node):
    bad = {"type": "tuning", "sysctl": {"net.no.such.thing": "1"}}
    conf = node.conf(
        ipam=host_local(node), ipMasq=False, plugins=[{"type": "bridge", "bridge": "cni0"}, bad]
    )
    pod = node.pod()
    error = node.add(conf, pod).error
    assert "tuning" in error["msg"]
    assert pod.links() == {"lo"}
    assert node.leftovers() == EMPTY


def test_a_delegate_that_hangs_is_ended_and_named(node, tmp_path):
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    conf = node.conf(ipam=None, delegate={"type": "sleeper"}, delegate_timeout=1)
    error = node.add(conf, CNI_PATH=str(tmp_path)).error
    assert error["code"] == 106
    assert "sleeper" in error["msg"]


def test_gc_reaches_the_delegates(node):
    conf = node.conf(
        ipam=host_local(node), ipMasq=False, delegate={"type": "bridge", "bridge": "cni0"}
    )
    keep, drop = node.pod(), node.pod()
    result = node.add(conf, keep).ok
    node.add(conf, drop).succeeds()
    valid = [{"containerID": keep.name, "ifname": "eth0"}]
    assert node.call("GC", {**conf, "cni.dev/valid-attachments": valid}).code == 0
    assert drop.links() == {"lo"}
    node.check(conf, keep, result).succeeds()


def test_another_ipam_plugin_gives_the_addresses_and_gets_them_back(node, datapath):
    data = node.tmp / "networks"
    ipam = {"type": "host-local", "subnet": "10.55.1.0/24", "dataDir": str(data)}
    conf = node.conf(datapath=datapath, ipam=ipam)
    pod = node.pod()
    result = node.add(conf, pod).ok
    address = result["ips"][0]["address"].partition("/")[0]
    assert address in os.listdir(data / "pods")
    node.check(conf, pod, result).succeeds()
    assert node.delete(conf, pod).code == 0
    assert address not in os.listdir(data / "pods")


def test_a_node_that_changes_over_to_our_ipam_gives_no_address_twice(node):
    """Of a bridge's pods the node's own routes tell nothing."""
    theirs = {
        "type": "host-local",
        "subnet": "10.55.1.0/24",
        "dataDir": str(node.tmp / "networks"),
    }
    ours = {"type": "headcni-ipam", "subnet": "10.55.1.0/24", "strategy": "dense-pack"}
    old, new = node.conf(ipam=theirs), node.conf(ipam=ours)
    pods = [node.pod() for _ in range(2)]
    given = [node.add(old, pod).address for pod in pods]
    assert node.add(new).address not in given
    node.delete(old, pods[0]).succeeds()
    assert node.add(new).address == given[0]


def test_a_node_that_changes_over_to_another_ipam_gives_no_address_twice(node):
    subnet = "10.55.1.0/24"
    theirs = {"type": "host-local", "subnet": subnet, "dataDir": str(node.tmp / "networks")}
    ours = {"type": "headcni-ipam", "subnet": subnet, "strategy": "dense-pack"}
    old, new = node.conf(ipam=ours), node.conf(ipam=theirs)
    given = [node.add(old).address for _ in range(3)]
    pods = [node.pod() for _ in range(2)]
    later = [node.add(new, pod).address for pod in pods]
    assert len({*given, *later}) == 5
    assert {n for n in os.listdir(node.tmp / "networks/pods") if n[0] == "1"} == {*later}


def test_an_address_goes_back_to_the_ipam_that_gave_it(node):
    data = node.tmp / "networks"
    theirs = {"type": "host-local", "subnet": "10.55.1.0/24", "dataDir": str(data)}
    ours = {"type": "headcni-ipam", "subnet": "10.55.1.0/24"}
    old, new = node.conf(ipam=theirs), node.conf(ipam=ours)
    pods = [node.pod() for _ in range(2)]
    given = [node.add(old, pod).address for pod in pods]
    node.delete(new, pods[0]).succeeds()
    assert {n for n in os.listdir(data / "pods") if n[0] == "1"} == {given[1]}
    assert node.call("GC", {**new, "cni.dev/valid-attachments": []}).code == 0
    assert not [n for n in os.listdir(data / "pods") if n[0] == "1"]


def test_an_ipam_that_has_but_one_address_is_told_whose_it_is(node):
    ours = {"type": "headcni-ipam", "subnet": "10.55.1.0/24"}
    given = node.add(node.conf(ipam=ours)).address
    only = {"subnet": "10.55.1.0/24", "rangeStart": given, "rangeEnd": given}
    theirs = {"type": "host-local", **only, "dataDir": str(node.tmp / "networks")}
    refused = node.add(node.conf(ipam=theirs)).error
    assert refused["code"] == ADDRESS_TAKEN
    assert f"host-local gave {given}, which another pod of this node has" in refused["msg"]
    assert not [n for n in os.listdir(node.tmp / "networks/pods") if n[0] == "1"]


def test_our_ipam_serves_the_go_bridge(node):
    ipam = {"type": "headcni-ipam", "subnet": "10.55.1.0/24", "dataDir": str(node.tmp / "data")}
    conf = {
        "cniVersion": "1.0.0",
        "name": "pods",
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipam": ipam,
    }
    pod = node.pod()
    assert node.cnitool("add", conf, pod).ok["ips"][0]["address"] == "10.55.1.2/24"
    assert node.cnitool("check", conf, pod).code == 0
    assert node.cnitool("del", conf, pod).code == 0
    assert node.leftovers() == EMPTY


def test_a_host_local_directory_is_taken_over_on_request(node):
    """Move a node from host-local to ours: its pods keep their addresses, nobody gets them."""
    data = node.tmp / "networks"
    ipam = {"type": "host-local", "subnet": "10.55.1.0/24", "dataDir": str(data)}
    go = {"cniVersion": "1.0.0", "name": "pods", "type": "bridge", "bridge": "cni0", "ipam": ipam}
    pods = [node.pod() for _ in range(3)]
    for pod in pods:
        node.cnitool("add", go, pod).succeeds()
    held = {n for n in os.listdir(data / "pods") if n.startswith("10.")}
    ours = {
        "type": "headcni-ipam",
        "subnet": "10.55.1.0/24",
        "strategy": "dense-pack",
        "importHostLocal": str(data / "pods"),
    }
    assert node.add(node.conf(ipam=ours)).address not in held
    assert held <= {_text(row[0]) for row in node.leftovers()["allocation"]}
    for pod in pods:  # libcni's cache in /var/lib/cni as well
        assert node.cnitool("del", go, pod).code == 0


def _text(packed: bytes) -> str:
    import ipaddress

    return str(ipaddress.ip_address(packed))


@pytest.mark.parametrize("version", ["0.4.0", "1.0.0", "1.1.0"])
def test_the_conflist_that_we_write_works_as_it_is(node, version):
    from headcni.shared import conflist as writer

    options = writer.Options.of({"pod_cidrs": ["10.55.1.0/24"], "cluster_cidrs": ["10.55.0.0/16"]})
    written = writer.build(options)
    written["cniVersion"] = version
    written["plugins"][0]["data_dir"] = str(node.tmp / "data")
    folder = node.tmp / "net.d"
    folder.mkdir()
    (folder / "10-headcni.conflist").write_text(json.dumps(written))
    pod = node.pod()
    assert node.cnitool("add", written, pod).ok["ips"][0]["address"].startswith("10.55.1.")
    assert node.cnitool("del", written, pod).code == 0
