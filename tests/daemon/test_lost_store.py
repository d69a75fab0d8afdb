"""A store that was deleted or damaged while pods run: no address and no host port is lost."""

from __future__ import annotations

import json
import shutil
import sqlite3
from ipaddress import ip_address

import pytest
from cni_node import sh

from headcni import errors
from headcni.datapath.link import host_name
from headcni.model import Owner

LOUD = "the allocation store was lost"
UPKEEP = """
import sys
from headcni.daemon.firewalls import Firewalls
from headcni.datapath.host_firewall import PodTraffic
from headcni.store import Store
store = Store.in_directory(sys.argv[1])
upkeep = Firewalls(lambda: store, PodTraffic, False, 60.0, lambda *_: None)
for _ in range(3):
    upkeep._pass()
"""

# One ADD, halfway through which the store is deleted and another process adds a pod.
INTERRUPTED = """
import os, shutil, subprocess, sys
from headcni.plugins.headcni.plugin import run
from headcni.datapath import link
data_dir, plugin, stdin = sys.argv[1:]
connect = link.connect
def late(*arguments):
    shutil.rmtree(data_dir)
    env = {**os.environ, "CNI_CONTAINERID": "other", "CNI_NETNS": os.environ["OTHER_NETNS"]}
    command = [sys.executable, "-IS", plugin]
    done = subprocess.run(command, input=stdin.encode(), env=env, stdout=subprocess.PIPE)
    print(done.stdout.decode())
    return connect(*arguments)
link.connect = late
print(run(os.environ, stdin.encode()).output.decode())
"""


@pytest.fixture(params=["alone", "daemon"])
def served(request, node):
    if request.param == "daemon":
        node.start()
    return request.param == "daemon"


def deleted(node):
    shutil.rmtree(node.tmp / "data")


def damaged(node):
    """Between two daemons: one that runs has most of the file in memory."""
    running = [server for server in node.servers if server.poll() is None]
    for server in running:
        node.end(server)
    with (node.tmp / "data" / "headcni.db").open("r+b") as file:
        file.write(b"broken " * 3000)
    for _ in running:
        node.start()


LOST = pytest.mark.parametrize("lose", [deleted, damaged])


def with_port(conf, port):
    ports = [{"hostPort": port, "containerPort": 80, "protocol": "tcp"}]
    return {
        **conf,
        "capabilities": {"portMappings": True},
        "runtimeConfig": {"portMappings": ports},
    }


def small(node, **changes):
    """Three addresses, handed out lowest first: a lost one is the next to be handed out."""
    ipam = {"type": "headcni-ipam", "strategy": "dense-pack", "subnet": "10.55.1.0/29"}
    return node.conf(ipam=ipam, **changes)


def mapped(node):
    lines = node.nft().splitlines()
    return {port for port in ("8080", "8081") if any(f" . {port} : 10.55." in one for one in lines)}


def loud(node, *answers):
    return node.said(LOUD) + sum(answer.stderr.count(LOUD) for answer in answers)


@LOST
def test_no_address_and_no_port_of_a_running_pod_is_lost(node, served, datapath, lose):
    conf, pods = small(node, datapath=datapath), [node.pod(), node.pod()]
    given = [
        node.add(with_port(conf, 8080 + number), pod).address for number, pod in enumerate(pods)
    ]
    lose(node)
    new = node.pod()
    answers = [node.add(conf, new)]
    assert answers[0].address not in given
    assert mapped(node) == {"8080", "8081"}
    with pods[0].serving(80):
        assert node.outside.asks(node.NODE_IP, 8080) == node.OUTSIDE_IP
    # A repeated ADD, CHECK and DEL go on as if nothing had happened.
    answers.append(node.add(with_port(conf, 8080), pods[0]))
    assert answers[-1].address == given[0]
    assert f"{given[0]}/" in "".join(pods[0].addresses("eth0"))
    answers.append(node.delete(with_port(conf, 8080), pods[0]))
    answers[-1].succeeds()
    assert mapped(node) == {"8081"}
    assert loud(node, *answers) == 1
    for pod in (new, pods[1]):
        node.delete(conf, pod).succeeds()
    assert node.is_empty()


def test_a_pod_whose_bandwidth_is_limited_keeps_its_address(node, datapath):
    """The ifb that limits it has the same alias, and no address."""
    limits = {"egressRate": 8_000_000, "egressBurst": 8_000_000}
    conf, pod = small(node, datapath=datapath), node.pod()
    limited = {
        **conf,
        "capabilities": {"bandwidth": True},
        "runtimeConfig": {"bandwidth": limits},
    }
    address = node.add(limited, pod).address
    deleted(node)
    assert node.add(conf).address != address
    node.delete(limited, pod).succeeds()
    assert node.add(conf).address == address


@LOST
def test_a_del_is_the_first_to_find_the_store_lost(node, served, lose):
    conf, pods = small(node), [node.pod(), node.pod()]
    given = [
        node.add(with_port(conf, 8080 + number), pod).address for number, pod in enumerate(pods)
    ]
    lose(node)
    answers = [node.delete(with_port(conf, 8080), pods[0])]
    answers[0].succeeds()
    assert mapped(node) == {"8081"}
    answers.append(node.add(conf))
    assert answers[1].address != given[1]
    assert mapped(node) == {"8081"}
    assert loud(node, *answers) == 1


def test_the_runtimes_cache_brings_the_whole_attachment_back(node, served):
    conf, pod = small(node, capabilities={"portMappings": True}), node.pod()
    ports = [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]
    first = node.cnitool("add", conf, pod, portMappings=ports)
    try:
        with sqlite3.connect(node.tmp / "data" / "headcni.db") as db:
            before = db.execute("SELECT netns, host_ifname, result FROM attachment").fetchall()
        deleted(node)
        assert node.add(conf).address != first.address
        with sqlite3.connect(node.tmp / "data" / "headcni.db") as db:
            where = "WHERE netns = ?"
            select = f"SELECT netns, host_ifname, result FROM attachment {where}"
            after = db.execute(select, (pod.path,)).fetchall()
            assert [row[:2] for row in after] == [row[:2] for row in before]
            assert first.address in after[0][2]
            (config,) = db.execute(f"SELECT config FROM attachment {where}", (pod.path,)).fetchone()
            assert '"hostPort":8080' in config
        assert mapped(node) == {"8080"}
        node.cnitool("check", conf, pod, portMappings=ports).succeeds()
    finally:
        node.cnitool("del", conf, pod, portMappings=ports).succeeds()
    assert mapped(node) == set()


def test_a_pod_that_another_plugin_wired_up_keeps_its_address_by_the_runtimes_cache(node):
    ipam = {
        "type": "headcni-ipam",
        "strategy": "dense-pack",
        "subnet": "10.55.1.0/29",
        "dataDir": str(node.tmp / "data"),
    }
    conf = {"cniVersion": "1.0.0", "name": "others", "type": "bridge", "ipam": ipam}
    pod = node.pod()
    first = node.cnitool("add", conf, pod)
    try:
        deleted(node)
        assert node.add(small(node)).address != first.address
    finally:
        node.cnitool("del", conf, pod).succeeds()


def test_an_add_that_loses_the_store_halfway_is_tried_again(node, served):
    """Its address is in no store by then, and might be given to another pod."""
    plugin = node.tmp / "bin" / "loses-the-store"
    plugin.parent.mkdir()
    plugin.write_text(
        "#!/bin/sh\ncat > /dev/null\n[ $CNI_COMMAND = ADD ] || exit 0\n"
        f"rm -r {node.tmp}/data\n"
        'echo \'{"cniVersion": "1.1.0", "ips": [{"address": "10.55.1.9/24"}]}\'\n'
    )
    plugin.chmod(0o755)
    conf, pod = node.conf(ipam={"type": plugin.name}), node.pod()
    error = node.add(conf, pod, CNI_PATH=str(plugin.parent)).error
    assert error["code"] == errors.TRY_AGAIN and "replaced" in error["msg"]
    assert pod.links() == {"lo"}
    assert not [one for one in node.netns.links() if one.startswith("hc")]


def test_two_adds_do_not_get_one_address_when_the_store_is_lost_between_them(node, datapath):
    conf, pod, other = small(node, datapath=datapath, ip_masq=False), node.pod(), node.pod()
    plugin, data_dir = str(node.plugins / "headcni"), str(node.tmp / "data")
    argv, env = node.python_command("-c", INTERRUPTED, data_dir, plugin, json.dumps(conf))
    env = {**node.environment("ADD", pod), **env, "OTHER_NETNS": other.path}
    second, first = map(json.loads, sh(*argv, env=env).stdout.split("\n\n", 1))
    assert second["ips"][0]["address"].startswith("10.55.1.2/")
    assert first.get("ips") != second["ips"]
    assert first["code"] == errors.TRY_AGAIN and "replaced" in first["msg"]
    assert pod.links() == {"lo"}
    assert node.add(conf, pod).address == "10.55.1.3"


def holders(node):
    """The container that each address is leased to; "" for addresses without a known owner."""
    with sqlite3.connect(node.tmp / "data" / "headcni.db") as db:
        rows = db.execute("SELECT address, network, container_id FROM allocation").fetchall()
    return {str(ip_address(row[0])): row[2] if row[1] else "" for row in rows}


def upkeep(node, place="data"):
    argv, env = node.python_command("-c", UPKEEP, str(node.tmp / place))
    return sh(*argv, env=env)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_pod_that_claims_its_neighbours_address_does_not_get_it(node, datapath, guarded):
    """Whoever has NET_ADMIN in a pod can add any address to the pod's own interface."""
    conf = small(node, datapath=datapath, anti_spoofing=guarded)
    thief, victim = node.pod(), node.pod()
    own = node.add(conf, thief).address  # its link is listed first
    claimed = node.add(with_port(conf, 8080), victim).address
    thief.ip(f"addr add {claimed}/32 dev eth0")
    deleted(node)
    new = node.pod()
    assert node.add(conf, new).address not in (own, claimed)
    found = holders(node)
    unclear = not guarded and datapath == "bridge"  # nothing but the pods themselves can tell
    assert found[own] == thief.name
    assert found[claimed] == ("" if unclear else victim.name)
    upkeep(node)
    rules = [line for line in node.nft().splitlines() if claimed in line and '"hc' in line]
    assert not any(host_name(Owner("pods", thief.name, "eth0")) in line for line in rules), rules
    node.delete(conf, thief).succeeds()
    assert mapped(node) == (set() if unclear else {"8080"})
    valid = [{"containerID": pod.name, "ifname": "eth0"} for pod in (victim, new)]
    node.call("GC", {**conf, "cni.dev/valid-attachments": valid}).succeeds()
    assert claimed not in [node.add(conf).address for _ in range(3)]


def test_a_pod_that_the_runtime_remembers_has_only_the_addresses_that_it_was_given(node):
    conf, pod = small(node), node.pod()
    given = node.cnitool("add", conf, pod).address
    try:
        pod.ip("addr add 10.55.1.6/32 dev eth0")
        deleted(node)
        node.add(conf).succeeds()
        found = holders(node)
        assert [one for one, holder in found.items() if holder and one in (given, "10.55.1.6")] == [
            given
        ]
        assert "10.55.1.6" in found  # in use, so nobody gets it
    finally:
        node.cnitool("del", conf, pod).succeeds()
    node.call("GC", {**conf, "cni.dev/valid-attachments": []}).succeeds()
    assert node.is_empty()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_pod_cannot_have_the_whole_pool_kept_for_itself(node, guarded):
    conf, pod = node.conf(anti_spoofing=guarded), node.pod()
    node.add(conf, pod).succeeds()
    batch = "".join(f"addr add 10.55.1.{number}/32 dev eth0\n" for number in range(3, 255))
    sh("ip", "-n", pod.name, "-batch", "-", input=batch)
    deleted(node)
    node.add(conf).succeeds()
    assert len(holders(node)) <= 66


def test_a_daemon_that_nobody_calls_reconstructs_the_store(node):
    """Its upkeep would replace the nft table, or complain of pods that it does not know."""
    conf, pod = small(node), node.pod()
    address = node.add(with_port(conf, 8080), pod).address
    deleted(node)
    done = upkeep(node)
    assert done.stderr.count(LOUD) == 1
    assert mapped(node) == {"8080"}
    assert [row[0] for row in node.leftovers()["allocation"]] == [ip_address(address).packed]
    answer = node.add(conf)
    assert answer.address != address and loud(node, answer) == 0


@pytest.mark.parametrize("cached", [True, False])
def test_pods_of_an_ipam_without_ranges_stay_masqueraded(node, datapath, cached):
    """What is masqueraded is known from the pods' addresses alone."""
    addresses = [{"address": "10.66.1.5/24", "gateway": "10.66.1.1"}]
    ipam = {"type": "static", "addresses": addresses}
    conf = node.conf(pod_cidr=None, cluster_cidr=None, ipam=ipam, datapath=datapath)
    pod = node.pod()
    add = (lambda: node.cnitool("add", conf, pod)) if cached else (lambda: node.add(conf, pod))
    add().succeeds()
    try:
        deleted(node)
        node.call("STATUS", conf).succeeds()
        upkeep(node)
        with node.outside.serving(80):
            assert pod.asks(node.OUTSIDE_IP, 80) == node.NODE_IP
    finally:
        if cached:
            node.cnitool("del", conf, pod).succeeds()


def test_check_names_ranges_that_the_pod_needs_and_the_firewall_does_not_have(node):
    conf, pod = node.conf(), node.pod()
    result = node.add(conf, pod).ok
    node.check(conf, pod, result).succeeds()
    ranges = '{"cluster": [], "masqueraded": [], "pods": []}'
    node.sql("UPDATE firewall_need SET ranges = ?", ranges)
    node.runs(
        "import sys; from headcni.datapath import ruleset; from headcni.store import Store\n"
        "Store.in_directory(sys.argv[1]).atomically(ruleset.write); print('[]')"
    )
    details = node.check(conf, pod, result).error["details"]
    assert "masqueraded" in details and "10.55.1.0/24" in details


def test_a_first_install_is_quiet(node, served):
    answer = node.add(node.conf())
    answer.succeeds()
    assert loud(node, answer) == 0


@pytest.mark.parametrize("place", ["data", "second"])
def test_a_store_that_the_daemon_made_without_the_runtimes_cache_serves_pods(node, datapath, place):
    """The ranges of the running pod are known only from the node's nft table then."""
    conf, pod = small(node, datapath=datapath), node.pod()
    address = node.add(conf, pod).address
    deleted(node)
    upkeep(node, place)
    assert address not in [
        node.add({**conf, "data_dir": str(node.tmp / place)}).address for _ in range(3)
    ]


def test_a_second_store_on_the_node_is_not_a_lost_one(node, served):
    """Its own network has no pods yet. What the other network's pods use is not handed out."""
    conf, pod = small(node), node.pod()
    address = node.add(conf, pod).address
    other = {**conf, "name": "second", "data_dir": str(node.tmp / "second")}
    answer = node.add(other)
    assert answer.address != address
    assert loud(node, answer) == 0
    node.delete(conf, pod).succeeds()
    node.wait_for(lambda: len([one for one in node.netns.links() if one.startswith("hc")]) == 1)
    valid = {"cni.dev/valid-attachments": []}
    node.call("GC", {**other, **valid}).succeeds()
    with sqlite3.connect(node.tmp / "second" / "headcni.db") as db:
        assert db.execute("SELECT * FROM allocation").fetchall() == []


@pytest.mark.parametrize("finder", ["add", "daemon"])
def test_a_changed_data_dir_hands_out_no_address_of_a_running_pod(node, datapath, finder):
    """The pods are still in the old store, and their DELs go to the new one."""
    old, pod = small(node, datapath=datapath), node.pod()
    address = node.cnitool("add", old, pod).address
    new = {**old, "data_dir": str(node.tmp / "second")}
    try:
        if finder == "daemon":
            argv, env = node.python_command("-c", UPKEEP, new["data_dir"])
            sh(*argv, env=env)
        assert address not in [node.add(new).address for _ in range(3)]
    finally:
        node.cnitool("del", old, pod).succeeds()
    node.call("GC", {**new, "cni.dev/valid-attachments": []}).succeeds()
    assert node.add(new).address == address


def test_a_changed_data_dir_keeps_addresses_of_pods_that_another_plugin_wired_up(node):
    """The runtime's cache is the only one to know them."""
    ipam = {"type": "headcni-ipam", "strategy": "dense-pack", "subnet": "10.55.1.0/29"}
    conf = {"cniVersion": "1.0.0", "name": "others", "type": "bridge"}
    old, new = ({**conf, "ipam": {**ipam, "dataDir": str(node.tmp / one)}} for one in "ab")
    pods = [node.pod(), node.pod()]
    try:
        first = node.cnitool("add", old, pods[0]).address
        assert node.cnitool("add", new, pods[1]).address != first
    finally:
        node.cnitool("del", new, pods[1])
        node.cnitool("del", old, pods[0])


def test_an_address_in_use_whose_owner_is_unknown_is_not_handed_out(node):
    """A pod whose link lost its alias, and one that somebody put on the bridge by hand."""
    conf, pod = small(node), node.pod()
    address = node.add(conf, pod).address
    host = next(one for one in node.netns.links() if one.startswith("hc"))
    node.netns.ip(f"link set {host} name by-hand")
    sh("ip", "netns", "exec", pod.name, "ping", "-c1", "-W1", "10.55.1.1", check=False)
    deleted(node)
    assert node.add(conf).address != address


def test_what_another_network_of_the_same_store_has_is_recovered_too(node, served):
    first = small(node)
    second = {**first, "name": "second"}
    pods = [node.pod(), node.pod()]
    node.add(with_port(first, 8080), pods[0]).succeeds()
    address = node.add(with_port(second, 8081), pods[1]).address
    deleted(node)
    answer = node.add(first)
    assert answer.address != address
    assert mapped(node) == {"8080", "8081"}
    node.delete(second, pods[1]).succeeds()
    assert mapped(node) == {"8080"}
    node.wait_for(lambda: node.leftovers()["tombstone"] == [])  # until then it holds the address
    assert node.add(second).address == address


def test_a_reboot_after_the_loss_finds_nothing_of_the_old_boot(node, tmp_path):
    """Files of the cache survive a reboot, and namespaces do not."""
    conf, pod = small(node), node.pod()
    first = node.cnitool("add", conf, pod)
    try:
        deleted(node)
        host = next(one for one in node.netns.links() if one.startswith("hc"))
        node.netns.ip(f"link del {host}")
        pod.remove()
        answer = node.add(conf)
        assert answer.address == first.address
        assert loud(node, answer) == 0
    finally:
        node.cnitool("del", conf, pod)
