"""New keys, a new machine, another CIDR, another server: what stays, and what is refused."""

from __future__ import annotations

import json
import urllib.request

import pytest
from mesh_state import server
from patience import until
from traffic import CNITOOL

pytestmark = pytest.mark.timeout(900)
NODES = ("node1", "node2")


def of(cluster, name: str) -> dict:
    (found,) = [one for one in cluster.at_headscale() if one["givenName"] == name]
    return found


def test_a_new_key_leaves_name_addresses_and_routes(cluster, capsys):
    before = {node: of(cluster, node) for node in NODES}
    with cluster.traffic.flowing() as costs:
        cluster.run("rotate_keys")
    cluster.told(capsys, "keys rotated")
    for pair, cost in costs.items():
        assert cost.transfer and cost.gap < 10, f"{pair}: {cost}"
    for node in NODES:
        now = of(cluster, node)
        assert now["nodeKey"] != before[node]["nodeKey"]
        for same in ("id", "ipAddresses", "approvedRoutes", "subnetRoutes"):
            assert sorted(now[same]) == sorted(before[node][same]), same


def test_a_machine_that_lives_is_not_replaced(cluster):
    assert "say which node is replaced" in cluster.run("replace_node", check=False).output
    before = len(cluster.at_headscale())
    cluster.lab.on("node1", "tailscale set --hostname=node2")
    try:
        until(lambda: [one["name"] for one in cluster.at_headscale()].count("node2") == 2)
        refused = cluster.run("replace_node", "--limit", "node2", check=False)
        assert refused.code != 0 and "is online at Headscale" in refused.failures("node2")
    finally:
        cluster.lab.on("node1", "tailscale set --hostname=node1")
        until(lambda: [one["givenName"] for one in cluster.at_headscale()].count("node1") == 1)
    assert len(cluster.at_headscale()) == before


@pytest.mark.parametrize("known_as", ["otherwise", "node2"])
def test_a_new_machine_gets_the_place_of_one_that_is_gone(cluster, known_as):
    """Whatever name the former had: its routes tell whose place it had."""
    cluster.lab.on("node2", f"tailscale set --hostname={known_as}")
    until(lambda: known_as in [one["givenName"] for one in cluster.at_headscale()])
    before, count = of(cluster, known_as), len(cluster.at_headscale())
    cluster.wipe("node2", known_as)
    cluster.run("replace_node", "--limit", "node2")
    now = of(cluster, "node2")
    assert now["id"] != before["id"] and sorted(now["approvedRoutes"]) == sorted(
        before["approvedRoutes"]
    )
    assert len(cluster.at_headscale()) == count
    cluster.lab.on("node2", f"ip netns add pod && {CNITOOL} add headcni /run/netns/pod")
    cluster.traffic.reached()


def test_a_node_that_somebody_has_removed_at_headscale_joins_anew(cluster):
    """tailscaled hears of it later, and until then says that all is well."""
    before = of(cluster, "node2")
    url, key = server(cluster.lab)
    request = urllib.request.Request(
        f"{url}/api/v1/node/{before['id']}",
        method="DELETE",
        headers={"Authorization": f"Bearer {key}"},
    )
    urllib.request.urlopen(request, timeout=10).close()
    joined = cluster.run("site")
    assert joined.counted("changed")["node1"] == 0
    now = of(cluster, "node2")
    assert now["id"] != before["id"]
    assert sorted(now["approvedRoutes"]) == sorted(before["approvedRoutes"])
    cluster.traffic.reached()
    assert not any(cluster.run("site").counted("changed").values())


@pytest.mark.parametrize("playbook", ["upgrade", "rollback", "switch_mode", "rotate_keys"])
def test_no_other_playbook_gives_a_node_another_pod_cidr(cluster, playbook):
    given = {"headcni_node_pod_cidr": "10.55.94.0/24"}
    if playbook == "switch_mode":
        given["headcni_mode"] = "daemon"
    refused = cluster.run(playbook, "--limit", "node2", check=False, **given)
    assert refused.code != 0 and refused.changed == set()
    assert "has 10.55.2.0/24" in refused.failures("node2")
    assert "change it with playbooks/change_pod_cidr.yml" in refused.failures("node2")


def test_another_pod_cidr_is_refused_while_pods_run_and_reached_afterwards(cluster):
    lab, limit = cluster.lab, ("--limit", "node2")
    new = {"headcni_new_pod_cidr": "10.55.93.0/24,fd55:0:0:93::/64"}
    refused = cluster.run("change_pod_cidr", *limit, check=False, **new)
    assert refused.code != 0
    assert "becomes 10.55.93.0/24" in refused.output
    assert "1 pods of node2 have addresses of 10.55.2.0/24" in refused.failures("node2")
    taken = {"headcni_new_pod_cidr": "10.55.1.0/24"}
    assert "overlaps 10.55.1.0/24 of node1" in (
        cluster.run("change_pod_cidr", *limit, check=False, **taken).output
    )
    lab.on("node2", f"{CNITOOL} del headcni /run/netns/pod")
    cluster.run("change_pod_cidr", *limit, **new)
    assert cluster.run("change_pod_cidr", *limit, **new).changed == set()
    made = json.loads(lab.on("node2", f"{CNITOOL} add headcni /run/netns/pod"))
    assert made["ips"][0]["address"] == "10.55.93.2/24"
    assert "10.55.2." not in lab.on("node2", "ip address show dev headcni0")
    assert sorted(of(cluster, "node2")["subnetRoutes"]) == ["10.55.93.0/24", "fd55:0:0:93::/64"]
    lab.wait("node1", "ip netns exec pod ping -c 1 -W 1 10.55.93.2")
    lab.on("node2", f"{CNITOOL} del headcni /run/netns/pod")
    cluster.run("change_pod_cidr", *limit)  # as the inventory has it
    lab.on("node2", f"{CNITOOL} add headcni /run/netns/pod")
    cluster.traffic.reached()


def test_all_nodes_move_to_another_server_and_back(cluster, elsewhere):
    key = elsewhere.command("apikeys", "create").strip().splitlines()[-1]
    there = {
        "headcni_headscale_url": elsewhere.url,
        "headcni_headscale_api_key": key,
    }
    refused = cluster.run("move_server", check=False, **there)
    assert refused.code != 0 and "Say -e headcni_yes=true" in refused.output
    cluster.run("move_server", headcni_yes=True, **there)
    nodes = json.loads(elsewhere.command("nodes", "list", "-o", "json"))
    assert sorted(one["given_name"] for one in nodes) == ["node1", "node2"]
    cluster.traffic.reached()
    back = {"headcni_former_url": elsewhere.url, "headcni_former_api_key": key}
    cluster.run("move_server", headcni_yes=True, **back)
    cluster.traffic.reached()
    assert json.loads(elsewhere.command("nodes", "list", "-o", "json")) in (None, [])
