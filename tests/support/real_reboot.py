"""What a virtual machine keeps, loses and brings back when it reboots, in whatever mode it is."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any

from lab_command import LabCommand
from mesh_state import at_headscale, pod_ranges
from node_listing import differences, listing
from patience import until
from traffic import CNITOOL

NODES = ("node1", "vm1", "vm2")
STORE = "/var/lib/cni/headcni/headcni.db"
PATIENCE = 600  # seconds; a machine in software needs most of a minute to start its daemons
# What changes by itself, what the program that we make pods with keeps of them, what the last pod
# with a host port has turned on until the bridge goes, and what a tailscaled that was the host's
# until the mode was switched has left until the next boot: empty chains and a sysctl.
NOISE = re.compile(
    r"local fe80::\S+ dev (tailscale0|headcni01)|unit ldconfig|/var/lib/cni/results"
    r"|headcni0\.route_localnet|all\.src_valid_mark|/run/headcni-switch\.lock"
    r"|^- nft (table ip6? (filter|mangle|nat) |\tchain [A-Z]+ |\t\ttype .* policy accept;)"
)


@dataclass(frozen=True)
class Mesh:
    lab: LabCommand

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


def reboot_itself(lab: LabCommand, vm: str) -> None:
    boot = "cat /proc/sys/kernel/random/boot_id"
    before = lab.on(vm, boot)
    lab.on(vm, "systemctl reboot", check=False)
    until(
        lambda: lab.on(vm, boot, check=False) not in ("", before),
        PATIENCE,
        f"{vm} is back",
        every=2,
    )


def pull_the_plug(lab: LabCommand, vm: str) -> None:
    lab("reboot", "--hard", vm)


def assert_only_pods_are_gone(
    mesh: Mesh, vm: str, reboot: Callable[[LabCommand, str], None]
) -> None:
    registered, there = mesh.registered(), mesh.add("node1", "stays")
    mesh.add(vm, "first")  # the first pod after a boot brings the bridge, which stays
    mesh.remove(vm, "first")
    before = listing(mesh.lab, vm)
    old = [mesh.add(vm, pod) for pod in ("old1", "old2")]
    mesh.reaches("node1", "stays", old[0])
    assert {*old} < mesh.held(vm)

    began = time.monotonic()
    reboot(mesh.lab, vm)
    back = time.monotonic()
    mesh.settled(vm)
    print(f"{vm} was back in {back - began:.0f} s, all routes in {time.monotonic() - began:.0f} s")
    assert mesh.held(vm) == set()
    assert mesh.lab.on(vm, "ip netns list | grep ^old", check=False) == ""

    new = mesh.add(vm, "new")
    assert ip_address(new) in ip_network(pod_ranges(vm)[0])
    if reboot is reboot_itself:  # after a power cut the store may not know the last ones
        assert new not in old, "addresses of before the reboot are not used again at once"
    assert mesh.held(vm) & {new, *old} == {new}
    mesh.reaches("node1", "stays", new)
    mesh.reaches(vm, "new", there)
    assert mesh.registered() == registered
    mesh.remove(vm, "new")
    mesh.remove("node1", "stays")
    assert mesh.held(vm) == set()
    mesh.settled(vm)
    left = [one for one in differences(before, listing(mesh.lab, vm)) if not NOISE.search(one)]
    assert left == [], "\n".join(left)
