"""The ranges in the nft sets: those that live pods need, and no others."""

from __future__ import annotations

import json
import sqlite3

import pytest
from cni_node import REPAIR_FIREWALL, mapped

OTHER = "198.51.100.0/24"


def held(node, name):
    """What a set holds, as nft shows it."""
    listed = json.loads(node.netns.run("nft", "-j", "list", "set", "inet", "headcni", name).stdout)
    return str(listed["nftables"][1]["set"].get("elem", []))


def with_own_ranges(node, subnet):
    return node.conf(
        pod_cidr=None,
        capabilities={"ipRanges": True},
        ipam={"type": "headcni-ipam"},
        runtimeConfig={"ipRanges": [[{"subnet": subnet}]]},
    )


@pytest.fixture
def renamed(node):
    """A node whose network had another name and cluster range, and no pod of it is left."""
    old, pod = node.conf(name="old", cluster_cidr=["10.55.0.0/16", OTHER]), node.pod()
    node.add(old, pod).succeeds()
    node.delete(old, pod).succeeds()
    return node


def test_a_pods_own_ranges_stay_while_it_lives(node):
    pod, own = node.pod(), with_own_ranges(node, "10.55.3.0/24")
    node.add(own, pod).succeeds()
    node.add(node.conf(pod_cidr=None)).succeeds()
    with node.outside.serving(8000):
        assert pod.asks(node.OUTSIDE_IP, 8000) == node.NODE_IP
    node.delete(own, pod).succeeds()
    assert node.runs(REPAIR_FIREWALL) == [False, False]
    assert "10.55.3.0" not in held(node, "masqueraded4")


def test_the_first_pod_of_a_renamed_network_ends_the_old_names_ranges(renamed):
    assert OTHER.partition("/")[0] in held(renamed, "cluster4")
    renamed.add(renamed.conf(name="new")).succeeds()
    assert OTHER.partition("/")[0] not in held(renamed, "cluster4")


def test_gc_ends_the_ranges_of_a_network_without_pods(renamed):
    renamed.call("GC", renamed.conf(**{"cni.dev/valid-attachments": []})).succeeds()
    assert held(renamed, "cluster4") == held(renamed, "masqueraded4") == "[]"


def test_the_daemon_ends_the_ranges_of_a_network_without_pods_which_is_no_repair(renamed):
    assert renamed.runs(REPAIR_FIREWALL) == [False, False]
    assert held(renamed, "cluster4") == "[]"


def test_a_network_with_pods_keeps_its_ranges(node):
    old = node.conf(name="old", cluster_cidr=["10.55.0.0/16", OTHER])
    node.add(old).succeeds()
    node.add(node.conf(name="new")).succeeds()
    node.call("GC", {**node.conf(), "cni.dev/valid-attachments": []}).succeeds()
    assert node.runs(REPAIR_FIREWALL) == [False, False]
    assert OTHER.partition("/")[0] in held(node, "cluster4")


def test_the_newest_pod_decides_whether_its_range_is_masqueraded(node):
    node.outside.ip(f"route add 10.55.1.0/24 via {node.NODE_IP}")
    node.add(node.conf()).succeeds()
    mapping = [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]
    plain = node.conf(
        ipMasq=False,
        capabilities={"portMappings": True},
        runtimeConfig={"portMappings": mapping},
    )
    pod = node.pod()
    own = node.add(plain, pod).address
    with node.outside.serving(8000):
        assert pod.asks(node.OUTSIDE_IP, 8000) == own
        node.add(node.conf()).succeeds()
        assert pod.asks(node.OUTSIDE_IP, 8000) == node.NODE_IP


def test_pods_of_an_older_release_keep_their_ranges(node):
    """Their attachments do not say which those are."""
    pod = node.pod()
    node.add(node.conf(name="old"), pod).succeeds()
    with sqlite3.connect(node.tmp / "data" / "headcni.db") as db:
        db.execute("UPDATE attachment SET state = '{}'")
    assert node.runs(REPAIR_FIREWALL) == [False, False]
    node.add(node.conf(name="new", ipMasq=False)).succeeds()
    with node.outside.serving(8000):
        assert pod.asks(node.OUTSIDE_IP, 8000) == node.NODE_IP


def rows_of_older_releases(node):
    """The table that releases before `firewall_need` read and write: a row for each network."""
    with sqlite3.connect(node.tmp / "data" / "headcni.db") as db:
        return sorted(db.execute("SELECT network, pods, masqueraded, cluster FROM firewall"))


def test_an_older_release_finds_the_ranges_of_every_network_with_pods(node):
    own, pod = with_own_ranges(node, "10.55.3.0/24"), node.pod()
    node.add(node.conf(name="one")).succeeds()
    node.add(own, pod).succeeds()
    node.add(node.conf(pod_cidr=None)).succeeds()
    one = '["10.55.1.0/24"]'
    both = '["10.55.1.0/24", "10.55.3.0/24"]'
    assert rows_of_older_releases(node) == [
        ("one", one, one, '["10.55.0.0/16", "10.55.1.0/24"]'),
        ("pods", both, both, '["10.55.0.0/16", "10.55.1.0/24", "10.55.3.0/24"]'),
    ]
    node.delete(own, pod).succeeds()
    assert node.runs(REPAIR_FIREWALL) == [False, False]
    assert rows_of_older_releases(node)[1][1:3] == (one, one)
    node.call("GC", node.conf(name="one", **{"cni.dev/valid-attachments": []})).succeeds()
    assert [row[0] for row in rows_of_older_releases(node)] == ["pods"]


def test_the_daemon_restores_what_an_older_release_reads(node):
    node.add(node.conf()).succeeds()
    rows = rows_of_older_releases(node)
    node.sql("DELETE FROM firewall")
    assert node.runs(REPAIR_FIREWALL) == [False, False]
    assert rows_of_older_releases(node) == rows != []


@pytest.mark.parametrize("network", ["theirs", "pods"])
@pytest.mark.parametrize("replaced_by", ["ADD", "DEL", "the daemon"])
def test_pods_that_an_older_release_added_keep_their_ranges(node, network, replaced_by):
    """After a roll-back: it writes its own table of ranges and not ours."""
    pod, with_port = node.pod(), node.pod()
    published = {**node.conf(), **mapped((8080, 80, "tcp"))}
    node.add(published, with_port).succeeds()
    node.add({**with_own_ranges(node, "10.55.3.0/24"), "name": network}, pod).succeeds()
    theirs, cluster = '["10.55.3.0/24"]', '["10.55.0.0/16", "10.55.3.0/24"]'
    node.sql("DELETE FROM firewall_need WHERE ranges LIKE '%10.55.3.0%'")
    node.sql("UPDATE attachment SET state = '{}' WHERE container_id = ?", pod.name)
    node.sql(
        "INSERT OR REPLACE INTO firewall VALUES (?, ?, ?, ?)", network, theirs, theirs, cluster
    )
    if replaced_by == "ADD":
        node.add(node.conf()).succeeds()
    elif replaced_by == "DEL":
        node.netns.run("nft", "flush map inet headcni ports4")  # so that the table is replaced
        node.delete(published, with_port).succeeds()
    else:
        assert node.runs(REPAIR_FIREWALL) == [True, False]
    with node.outside.serving(8000):
        assert pod.asks(node.OUTSIDE_IP, 8000) == node.NODE_IP
