"""Pods on two nodes, over real tailscaled: what they reach, and as whom they are seen."""

from __future__ import annotations

import json

import pytest
from lab_command import CHECKOUT

V4, V6 = 0, 1


class Pods:
    """Pods on the lab's nodes, made by cnitool with our conflist."""

    def __init__(self, lab, datapath):
        self.lab, self.datapath = lab, datapath
        self.made: list[tuple[str, str]] = []
        for number in (1, 2):
            ranges = [[{"subnet": f"10.55.{number}.0/24"}], [{"subnet": f"fd55:0:0:{number}::/64"}]]
            plugin = {
                "type": "headcni",
                "datapath": datapath,
                "bridge": "headcni0",
                "pod_cidr": [f"10.55.{number}.0/24", f"fd55:0:0:{number}::/64"],
                "cluster_cidr": ["10.55.0.0/16", "fd55::/48"],
                "enable_ipv6": True,
                "ipam": {"type": "headcni-ipam", "ranges": ranges},
            }
            conflist = {"cniVersion": "1.0.0", "name": "mesh", "plugins": [plugin]}
            lab.write(
                f"node{number}", "/etc/cni/net.d/10-mesh.conflist", json.dumps(conflist).encode()
            )

    def add(self, node: str) -> tuple[str, list[str]]:
        """A pod's namespace and its addresses, IPv4 first."""
        netns = f"pod{len(self.made)}"
        self.made.append((node, netns))
        self.lab.on(node, f"ip netns add {netns}")
        result = json.loads(self._cnitool("add", node, netns))
        return netns, [ip["address"].partition("/")[0] for ip in result["ips"]]

    def _cnitool(self, verb: str, node: str, netns: str) -> str:
        return self.lab.on(
            node,
            f"CNI_PATH=/opt/cni/bin NETCONFPATH=/etc/cni/net.d "
            f"/opt/lab/cni/cnitool {verb} mesh /run/netns/{netns}",
        )

    def asked(self, client: tuple[str, str], server: tuple[str, str], address: str) -> str:
        """Who the server says that the client is."""
        anywhere = "::" if ":" in address else "0.0.0.0"
        self.lab.on(
            server[0],
            f"ip netns exec {server[1]} timeout 20 python3 /root/echo.py "
            f"serve tcp {anywhere} 8000 >/run/echo 2>&1 & sleep 0.4",
        )
        try:
            return self.lab.on(
                client[0], f"ip netns exec {client[1]} python3 /root/echo.py ask tcp {address} 8000"
            ).strip()
        finally:
            self.lab.on(server[0], "pkill -f 'echo.py serve'", check=False)

    def remove(self) -> None:
        for node, netns in self.made:
            self._cnitool("del", node, netns)
            self.lab.on(node, f"ip netns del {netns}")
        for node in ("node1", "node2"):
            self.lab.on(
                node, "ip link del headcni0; rm -f /etc/cni/net.d/10-mesh.conflist", check=False
            )


@pytest.fixture(scope="module", params=["bridge", "routed"])
def pods(approved, request):
    made = Pods(approved, request.param)
    yield made
    made.remove()


@pytest.fixture(scope="module")
def pair(pods):
    """A pod on each node: (node, namespace) and addresses."""
    here, there = pods.add("node1"), pods.add("node2")
    return ("node1", here[0]), here[1], ("node2", there[0]), there[1]


@pytest.mark.parametrize("family", [V4, V6], ids=["IPv4", "IPv6"])
def test_pods_on_two_nodes_reach_each_other_and_are_seen_as_themselves(pods, pair, family):
    here, mine, there, theirs = pair
    assert pods.asked(here, there, theirs[family]) == mine[family]
    assert pods.asked(there, here, mine[family]) == theirs[family]


def test_a_full_sized_packet_passes_the_mesh_unfragmented(pods, pair):
    here, _, _, theirs = pair
    for address, size in ((theirs[V4], 1280 - 28), (theirs[V6], 1280 - 48)):
        pods.lab.on(here[0], f"ip netns exec {here[1]} ping -c 1 -W 5 -M do -s {size} {address}")


def test_traffic_that_leaves_the_cluster_is_masqueraded(pods, pair, lab):
    """control is on the underlay and knows nothing of pods: it sees the node."""
    here = pair[0]
    node = lab.inventory()["_meta"]["hostvars"]["node1"]["ansible_host"]
    control = lab.inventory()["_meta"]["hostvars"]["control"]["ansible_host"]
    lab.copy(CHECKOUT / "tests/support/echo.py", "control", "/root/echo.py")
    lab.on(
        "control",
        "timeout 20 python3 /root/echo.py serve tcp 0.0.0.0 8000 >/run/echo 2>&1 & sleep 0.4",
    )
    try:
        seen = lab.on(
            here[0], f"ip netns exec {here[1]} python3 /root/echo.py ask tcp {control} 8000"
        )
    finally:
        lab.on("control", "pkill -f 'echo.py serve'", check=False)
    assert seen.strip() == node


def test_a_tailnet_device_is_reached_under_the_nodes_tailnet_address(pods, pair):
    """node2 as a device: by its tailnet address, which no pod route leads to."""
    here = pair[0]
    addresses = {n: pods.lab.on(n, "tailscale ip -4").strip() for n in ("node1", "node2")}
    pods.lab.on(
        "node2",
        "timeout 20 python3 /root/echo.py serve tcp 0.0.0.0 8001 >/run/echo 2>&1 & sleep 0.4",
    )
    try:
        seen = pods.lab.on(
            here[0],
            f"ip netns exec {here[1]} python3 /root/echo.py ask tcp {addresses['node2']} 8001",
        )
    finally:
        pods.lab.on("node2", "pkill -f 'echo.py serve'", check=False)
    assert seen.strip() == addresses["node1"]


def test_a_node_reaches_the_pods_of_its_neighbour(pods, pair):
    _, _, there, theirs = pair
    pods.lab.on(
        there[0],
        f"ip netns exec {there[1]} timeout 20 python3 /root/echo.py "
        "serve tcp 0.0.0.0 8000 >/run/echo 2>&1 & sleep 0.4",
    )
    try:
        assert pods.lab.on("node1", f"python3 /root/echo.py ask tcp {theirs[V4]} 8000").strip()
    finally:
        pods.lab.on(there[0], "pkill -f 'echo.py serve'", check=False)


def test_after_a_reboot_old_addresses_are_free_and_new_pods_talk(pods, pair):
    """The boot id tells that the old pods are dead, though nobody sent a DEL."""
    here, mine, _, _ = pair
    pods.lab("reboot", "node2")
    pods.lab.wait("node2", "ip route show table 52 | grep -q 10.55.1.0/24")
    pods.made = [one for one in pods.made if one[0] != "node2"]
    netns, addresses = pods.add("node2")
    held = pods.lab.on(
        "node2",
        'python3 -c "import sqlite3; print(sqlite3.connect('
        "'/var/lib/cni/headcni/headcni.db').execute("
        "'select count(*) from allocation').fetchone()[0])\"",
    )
    assert held.strip() == "2"
    pods.lab.wait("node1", f"ip netns exec {here[1]} ping -c 1 -W 2 {addresses[V4]}")
    assert pods.asked(here, ("node2", netns), addresses[V4]) == mine[V4]
