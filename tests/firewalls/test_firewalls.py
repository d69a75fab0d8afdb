"""Real firewalls on real nodes: every way that pods need is open, and stays open.

The tests run in this order on one lab: each leaves the nodes as the next one expects them.
HEADCNI_WRITE_DOCS=1 puts what was seen into docs/firewalls.md.
"""

from __future__ import annotations

import pytest
from firewalled_nodes import CONTAINER_PORT, FIREWALLED, FIREWALLS, NODES, Fleet
from traffic import Traffic

pytestmark = pytest.mark.timeout(1200)

LONGEST_GAP = 4.0  # seconds without an answer; the older iptables is looked at every two seconds
RELOADS = {
    "Docker: restart": ("node1", "systemctl restart docker"),
    "ufw: reload": ("node2", "ufw reload"),
    "ufw: restart": ("node2", "systemctl restart ufw"),
    "firewalld: reload": ("node3", "firewall-cmd --reload"),
    "firewalld: complete reload": ("node3", "firewall-cmd --complete-reload"),
    "firewalld: restart": ("node3", "systemctl restart firewalld"),
    "iptables-nft: restore": ("node4", "iptables-nft-restore /root/rules"),
    "iptables-legacy: restore": ("node5", "iptables-legacy-restore /root/rules"),
    "nftables: flush ruleset": ("node4", "nft flush ruleset; iptables-nft -P FORWARD DROP"),
}
# As an operator has it saved, from before HeadCNI came.
RULES = b"*filter\n:INPUT ACCEPT\n:FORWARD DROP\n:OUTPUT ACCEPT\nCOMMIT\n"


@pytest.fixture(scope="module", autouse=True)
def provisioned(fleet: Fleet):
    """Some firewalls were there first; on node2 and node4 they come after HeadCNI."""
    for node in ("node1", "node3", "node5"):
        fleet.turn_on(node)
    fleet.site()
    for node in ("node2", "node4"):
        fleet.turn_on(node)
    for node in ("node4", "node5"):
        fleet.lab.write(node, "/root/rules", RULES)
    fleet.add_pods()
    return fleet


@pytest.fixture
def neighbours(fleet: Fleet, request) -> Traffic:
    """Pods of the node in question and of the next one, which talk all the time."""
    node = RELOADS[request.getfixturevalue("reload")][0]
    other = NODES[(NODES.index(node) + 1) % len(NODES)]
    talking = Traffic(fleet.lab, (node, other))
    talking.find_pods()
    return talking


def test_every_way_is_open_in_host_mode_on_a_bridge(fleet, seen):
    assert fleet.closed(seen, "host, bridge") == []


@pytest.mark.parametrize("node", FIREWALLED, ids=FIREWALLS.get)
def test_status_and_diagnose_say_which_firewall_it_is_and_what_was_added(fleet, node):
    said = " ".join(one["summary"] for one in fleet.status(node)["firewalls"])
    name = FIREWALLS[node].removesuffix("-nft")
    assert name in said and "HeadCNI added" in said, said
    assert name in fleet.lab.on(node, "headcnictl diagnose")


def test_on_a_node_without_a_firewall_nothing_is_added(fleet):
    assert fleet.status("node6")["firewalls"] == []
    assert "HEADCNI-" not in fleet.lab.on("node6", "iptables-save; ip6tables-save")


def test_tailscaled_has_its_own_rules_again_though_firewalld_flushed_them(fleet):
    fleet.lab.wait("node3", "iptables -S ts-forward", seconds=15)


def test_the_containers_of_docker_itself_go_on_working(fleet, container):
    published = f"http://{fleet.addresses['node1']['node'][0]}:{CONTAINER_PORT}/"
    fleet.lab.wait("control", f"curl -s -m 3 -o /dev/null {published}", seconds=15)
    outside = fleet.node_addresses("control")[0]
    fleet.lab.on("node1", f"docker exec {container} /bin/busybox ping -c 1 -W 3 {outside}")


@pytest.mark.parametrize("reload", RELOADS)
def test_pods_go_on_talking_while_the_firewall_reloads(fleet, neighbours, reload, seen):
    node, command = RELOADS[reload]
    with neighbours.flowing() as costs:
        fleet.lab.on(node, command)
    for pair, cost in costs.items():
        print(f"{reload}: {pair}: {cost}")
    seen.gaps[reload] = max(cost.gap for cost in costs.values())
    assert all(cost.transfer for cost in costs.values())
    assert seen.gaps[reload] < LONGEST_GAP
    assert [way for way, is_open in fleet.ways(node).items() if not is_open] == []


def test_every_way_is_open_in_host_mode_routed(fleet, seen):
    fleet.remove_pods()
    fleet.site(headcni_node_datapath="routed")
    fleet.add_pods()
    assert fleet.closed(seen, "host, routed") == []


def test_every_way_is_open_in_daemon_mode_routed(fleet, seen):
    fleet.site(
        playbook="playbooks/switch_mode.yml",
        headcni_mode="daemon",
        headcni_node_datapath="routed",
        timeout=900,
    )
    assert fleet.closed(seen, "daemon, routed") == []


def test_every_way_is_open_in_daemon_mode_on_a_bridge(fleet, seen):
    fleet.remove_pods()
    fleet.site(headcni_mode="daemon")
    fleet.add_pods()
    assert fleet.closed(seen, "daemon, bridge") == []


def test_with_none_nothing_is_added_and_what_blocks_is_reported(fleet):
    fleet.site("--limit", "node2", headcni_mode="daemon", headcni_node_firewall="none")
    fleet.lab.wait("node2", "! iptables -S | grep HEADCNI", seconds=20)
    said = " ".join(fleet.lab.on("node2", "headcnictl diagnose", check=False).split())
    assert "ufw blocks forward, input by default" in said
    assert "network.firewall is none" in said
    fleet.site("--limit", "node2", headcni_mode="daemon")
    fleet.lab.wait("node2", "iptables -S FORWARD | grep -q HEADCNI-FORWARD", seconds=20)


def test_an_uninstall_takes_everything_out_again(fleet):
    fleet.remove_pods()
    fleet.site(playbook="playbooks/uninstall.yml", headcni_mode="daemon", timeout=900)
    for node in NODES:
        left = fleet.lab.on(
            node,
            "{ iptables-nft-save; ip6tables-nft-save; iptables-legacy-save; ip6tables-legacy-save;"
            " nft list ruleset; } 2>/dev/null | grep -i headcni",
            check=False,
        )
        assert left == "", node
    assert fleet.lab.on("node3", "firewall-cmd --zone=trusted --list-sources").split() == []
    assert fleet.lab.on("node3", "firewall-cmd --permanent --zone=trusted --list-sources") == "\n"
    assert "DROP" in fleet.lab.on("node2", "iptables -S FORWARD")
