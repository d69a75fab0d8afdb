"""site.yml and verify.yml over virtual machines and a node, and what a real reboot leaves.

The tests of this module follow each other on one lab, as an operator would go on with it.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from lab_command import LabCommand
from mesh_state import at_headscale
from node_listing import differences, listing
from site_run import Site

pytestmark = pytest.mark.timeout(3600)
NODES = ("node1", "vm1", "vm2")
CIDRS = {"node1": "10.55.1.0/24", "vm1": "10.55.201.0/24", "vm2": "10.55.202.0/24"}
CNITOOL = "CNI_PATH=/opt/cni/bin /opt/lab/cni/cnitool"
STORE = "/var/lib/cni/headcni/headcni.db"
PATIENCE = 600  # seconds; a machine in software needs most of a minute to start its daemons
# What changes by itself, and what the program that we make pods with keeps of them.
NOISE = re.compile(r"/var/lib/cni/results|local fe80::\S+ dev tailscale0|unit ldconfig")


@dataclass(frozen=True)
class Mesh:
    lab: LabCommand
    site: Site

    def add(self, node: str, pod: str) -> str:
        self.lab.on(node, f"ip netns add {pod}")
        made = json.loads(self.lab.on(node, f"{CNITOOL} add headcni /run/netns/{pod}"))
        return str(made["ips"][0]["address"]).partition("/")[0]

    def remove(self, node: str, pod: str) -> None:
        self.lab.on(node, f"{CNITOOL} del headcni /run/netns/{pod} && ip netns del {pod}")

    def reaches(self, node: str, pod: str, address: str) -> None:
        ping = f"ip netns exec {pod} ping -c 1 -W 2 {address} >/dev/null"
        self.lab.wait(node, ping, seconds=PATIENCE)

    def settled(self, node: str) -> None:
        """Ready, with a way to each of the others."""
        self.lab.wait(node, "headcnictl status >/dev/null", seconds=PATIENCE)
        others = len(NODES) - 1
        look = f'headcnictl routes --json | grep -c \'"state": "ok"\' | grep -qx {2 * others}'
        self.lab.wait(node, look, seconds=PATIENCE)

    def held(self, node: str) -> set[str]:
        """The addresses that its store has given away."""
        ask = f"import sqlite3; store = sqlite3.connect('{STORE}')"
        tell = "print(*(row[0].hex() for row in store.execute('select address from allocation')))"
        found = self.lab.on(node, f'python3 -c "{ask}; {tell}"').split()
        return {str(ip_address(bytes.fromhex(one))) for one in found}

    def registered(self) -> dict[str, tuple[Any, ...]]:
        return {
            node["givenName"]: (node["id"], node["ipAddresses"], sorted(node["subnetRoutes"]))
            for node in at_headscale(self.lab)
        }


@pytest.fixture(scope="module")
def mesh(lab, site) -> Mesh:
    return Mesh(lab, site)


def test_pods_reach_each_other_between_virtual_machines_and_the_node(mesh):
    assert_verified(mesh)


def assert_verified(mesh: Mesh) -> None:
    found = mesh.site.verify()
    for node in NODES:
        assert re.search(rf" {node} .*ok [\d.]+ ms", found.output)
    assert "checked from each pod: v4, v6, mtu4, mtu6, port, route, dns" in found.output
    assert "every pod reaches every other" in found.output


def reboot_itself(lab: LabCommand, vm: str) -> None:
    boot = "cat /proc/sys/kernel/random/boot_id"
    before = lab.on(vm, boot)
    lab.on(vm, "systemctl reboot", check=False)
    until = time.monotonic() + PATIENCE
    while lab.on(vm, boot, check=False) in ("", before):
        assert time.monotonic() < until, f"{vm} did not come back"
        time.sleep(2)


def pull_the_plug(lab: LabCommand, vm: str) -> None:
    lab("reboot", "--hard", vm)


REBOOTS = {
    "vm1 reboots itself": ("vm1", reboot_itself),
    "the plug of vm2 is pulled": ("vm2", pull_the_plug),
}


@pytest.mark.parametrize("how", REBOOTS)
def test_after_a_real_reboot_the_pods_of_before_are_gone_and_nothing_else_is(mesh, how):
    vm, reboot = REBOOTS[how]
    registered, stays = mesh.registered(), f"beside-{vm}"
    there = mesh.add("node1", stays)
    mesh.add(vm, "first")  # the first pod after a boot brings the bridge, which stays
    mesh.remove(vm, "first")
    before = listing(mesh.lab, vm)
    old = [mesh.add(vm, pod) for pod in ("old1", "old2")]
    mesh.reaches("node1", stays, old[0])
    assert {*old} < mesh.held(vm)

    reboot(mesh.lab, vm)
    mesh.settled(vm)
    assert mesh.held(vm) == set()
    assert mesh.lab.on(vm, "ip netns list | grep ^old", check=False) == ""

    new = mesh.add(vm, "new")
    assert ip_address(new) in ip_network(CIDRS[vm])
    assert new not in old, "addresses of before the reboot are not used again at once"
    assert mesh.held(vm) & {new, *old} == {new}
    mesh.reaches("node1", stays, new)
    mesh.reaches(vm, "new", there)
    assert mesh.registered() == registered
    mesh.remove(vm, "new")
    mesh.remove("node1", stays)
    assert mesh.held(vm) == set()
    mesh.settled(vm)
    left = [one for one in differences(before, listing(mesh.lab, vm)) if not NOISE.search(one)]
    assert left == [], "\n".join(left)


def test_after_the_reboots_site_yml_has_nothing_to_do(mesh):
    assert mesh.site().counted("changed") == dict.fromkeys(NODES, 0)


def test_a_restart_of_networkd_does_not_cut_pods_off(mesh):
    there, here = mesh.add("node1", "there"), mesh.add("vm1", "here")
    mesh.reaches("vm1", "here", there)
    mesh.lab.on("vm1", "systemctl restart systemd-networkd")
    mesh.settled("vm1")
    mesh.reaches("vm1", "here", there)
    mesh.reaches("node1", "there", here)
    mesh.remove("node1", "there")
    mesh.remove("vm1", "here")
