"""Running pods whose network came apart: what is missing is named, and mended without a restart."""

from __future__ import annotations

import json
import os
import sqlite3

import pytest
from cni_node import REPAIR_FIREWALL, sh

PROGRAM = """
import json, sys
from headcni import repair
from headcni.errors import CniError
from headcni.plugins.headcni.node import opened
found = []
with opened(sys.argv[1]) as node:
    for one in node.store.attachments():
        network = repair.network_of(one)
        if sys.argv[2] == "mend":
            try:
                repair.mend(node, network, one)
            except CniError as problem:
                print(json.dumps([str(problem)]))
                sys.exit()
        found += repair.differences(node, repair.Reader(node.kernel), network, one)
print(json.dumps(found))
"""


def ask(node, what: str, program: str = PROGRAM) -> list[str]:
    return node.runs(program, what)


def look(node) -> list[str]:
    return ask(node, "look")


def mend(node) -> list[str]:
    """What differs still, once it was mended."""
    return ask(node, "mend")


def host_end(node) -> str:
    return next(one for one in node.netns.links() if one.startswith("hc"))


@pytest.fixture
def conf(node, datapath):
    return node.dual(datapath=datapath)


@pytest.fixture
def pod(node, conf):
    made = node.pod()
    made.result = node.add(conf, made).ok
    assert look(node) == []
    return made


def reaches(node, pod) -> bool:
    address = pod.result["ips"][0]["address"].partition("/")[0]
    with pod.serving(80):
        return bool(node.netns.asks(address, 80)) and bool(pod.asks(node.OUTSIDE_IP, 7))


BROKEN = {
    "the host's end is deleted": ("ip -n {node} link del {end}", "is missing"),
    "the host's end is down": ("ip -n {node} link set {end} down", "is down"),
    "the pod lost its addresses": ("ip -n {pod} addr flush dev eth0", "has no address"),
    "the pod lost its interface": ("ip -n {pod} link set eth0 name lost", "eth0 is missing"),
}
ON_A_BRIDGE = {
    "the host's end left the bridge": ("ip -n {node} link set {end} nomaster", "not a port"),
    "the bridge is deleted": ("ip -n {node} link del headcni0", "bridge headcni0 is missing"),
    "the bridge is down": ("ip -n {node} link set headcni0 down", "bridge headcni0 is down"),
    "the bridge lost its addresses": ("ip -n {node} addr flush dev headcni0", "has no address"),
}
ROUTED = {"the node lost its routes": ("ip -n {node} route flush dev {end}", "no route")}


KNOWN = {"bridge": {**BROKEN, **ON_A_BRIDGE}, "routed": {**BROKEN, **ROUTED}}


@pytest.mark.parametrize(
    ("datapath", "what"), [(kind, what) for kind, those in KNOWN.items() for what in those]
)
def test_it_is_named_and_mended_when(node, pod, conf, datapath, what):
    command, words = KNOWN[datapath][what]
    names = {"node": node.netns.name, "pod": pod.name, "end": host_end(node)}
    sh(*command.format(**names).split())
    found = look(node)
    assert any(words in one for one in found), found
    assert mend(node) == []
    node.check(conf, pod, pod.result).succeeds()
    with node.outside.serving(7):
        assert reaches(node, pod)


def test_what_is_whole_is_left_as_it_is(node, pod):
    def view() -> object:
        return [
            (one["ifindex"], one["ifname"], one.get("master"), one["address"])
            for one in node.netns.ip_json("link") + pod.ip_json("link")
        ]

    before = view()
    assert mend(node) == [] and view() == before


def test_other_pods_do_not_notice(node, conf, pod):
    other = node.pod()
    node.add(conf, other).ok  # noqa: B018
    before = other.ip_json("link")
    sh("ip", "-n", pod.name, "link", "del", "eth0")
    assert mend(node) == []
    assert other.ip_json("link") == before


def test_a_host_port_that_somebody_took_out_of_the_table_is_put_back(node):
    mapping = {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}
    conf = node.conf(capabilities={"portMappings": True}, runtimeConfig={"portMappings": [mapping]})
    pod = node.pod()
    node.add(conf, pod).ok  # noqa: B018
    for command in (("flush", "map", "inet", "headcni", "ports4"), ("flush", "ruleset")):
        node.netns.run("nft", *command)
        assert look(node)
        assert mend(node) == []
        with pod.serving(80):
            assert node.outside.asks(node.NODE_IP, 8080)


@pytest.mark.parametrize(
    "command",
    [
        "flush table inet headcni",
        "flush chain inet headcni postrouting",
        "flush map inet headcni ports4",
        "flush ruleset",
        "add element inet headcni ports4 { tcp . 99 : 10.55.1.9 }",
        "flush map inet headcni pod_ports4",
        "flush set inet headcni masqueraded4",
        "delete element inet headcni cluster4 { 10.55.0.0/16 }",
        "add element inet headcni cluster4 { 192.0.2.0/24 }",
        "flush chain inet headcni output; add rule inet headcni output accept",
    ],
)
def test_the_daemon_makes_the_firewall_whole_again_once(node, command):
    mapping = {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}
    conf = node.conf(capabilities={"portMappings": True}, runtimeConfig={"portMappings": [mapping]})
    pod = node.pod()
    result = node.add(conf, pod).ok
    assert node.runs(REPAIR_FIREWALL) == [False, False]
    node.netns.run("nft", *command.split())
    assert node.runs(REPAIR_FIREWALL) == [True, False]
    node.check(conf, pod, result).succeeds()
    with pod.serving(80):
        assert node.outside.asks(node.NODE_IP, 8080)
    with node.outside.serving(8000):
        assert pod.asks(node.OUTSIDE_IP, 8000) == node.NODE_IP


def test_an_address_that_another_pod_has_by_now_is_not_taken_from_it(node, pod):
    with sqlite3.connect(node.tmp / "data" / "headcni.db") as db:
        db.execute("UPDATE allocation SET container_id = 'another'")
    assert any("not recorded as this pod's" in one for one in look(node))
    (problem,) = mend(node)
    assert "was given to another pod" in problem and "delete the pod" in problem


def test_an_allocation_that_was_lost_is_recorded_again(node, pod):
    with sqlite3.connect(node.tmp / "data" / "headcni.db") as db:
        db.execute("DELETE FROM allocation")
    assert look(node)
    assert mend(node) == []


def test_a_pod_without_a_namespace_is_beyond_repair(node, pod):
    sh("ip", "netns", "del", pod.name)
    assert any("network namespace" in one for one in look(node))
    (problem,) = mend(node)
    assert "cannot be opened" in problem


def test_what_other_plugins_made_is_theirs(node):
    bridge = {
        "type": "bridge",
        "bridge": "cni9",
        "ipam": {"type": "host-local", "subnet": "10.99.0.0/24", "dataDir": str(node.tmp / "hl")},
    }
    pod = node.pod()
    node.add(node.conf(ipam=None, delegate=bridge), pod).ok  # noqa: B018
    sh("ip", "-n", pod.name, "link", "del", "eth0")
    assert look(node) == []


SANDBOX = """
import json, subprocess, sys, time
from headcni import repair
dead, unmounted, missing = sys.argv[1:]
at_work = repair.namespaces_at_work()
found = [repair.is_dead(path, at_work) for path in (dead, unmounted, missing)]
found += [repair.is_dead(dead, None), repair.is_dead("/proc/self/ns/net", at_work)]
with subprocess.Popen(["nsenter", f"--net={dead}", "sleep", "60"]) as living:
    until = time.monotonic() + 10
    while repair.is_dead(dead, repair.namespaces_at_work()) and time.monotonic() < until:
        time.sleep(0.01)
    found.append(repair.is_dead(dead, repair.namespaces_at_work()))
    living.kill()
print(json.dumps(found))
"""


def test_a_sandbox_is_dead_when_nothing_can_be_alive_in_it(node, tmp_path):
    """Among processes of its own: those of the machine that runs the tests may be hidden."""
    pod = node.pod()
    (tmp_path / "unmounted").touch()
    home = (node.plugins / "headcni").resolve().parent.parent
    done = sh(
        *("unshare", "--fork", "--pid", "--mount-proc", "--kill-child", node.python, "-Sc"),
        *(SANDBOX, pod.path, tmp_path / "unmounted", tmp_path / "none"),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{home}:{home}/vendor"},
    )
    assert json.loads(done.stdout) == [True, True, True, False, False, False]
