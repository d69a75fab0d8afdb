"""Five nodes, each with another firewall that drops what it was not told about, and one without."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from debian_packages import install
from lab_command import LabCommand
from site_run import Site
from traffic import CNITOOL

HOST_PORT, POD_PORT, NODE_PORT, CONTAINER_PORT = 8080, 8000, 9999, 8090
PACKAGES = {"node1": "docker.io", "node2": "ufw", "node3": "firewalld"}
FIREWALLS = {
    "node1": "Docker",
    "node2": "ufw",
    "node3": "firewalld",
    "node4": "iptables-nft",
    "node5": "iptables-legacy",
    "node6": "none",
}
NODES = tuple(FIREWALLS)
FIREWALLED = NODES[:-1]
# Docker sets the policy to drop only where it is the first to turn forwarding on.
TURN_ON = {
    "node1": "iptables -P FORWARD DROP",
    "node2": "ufw allow 22/tcp && ufw --force enable",
    "node3": "systemctl is-active firewalld",
    "node4": "iptables-nft -P FORWARD DROP && ip6tables-nft -P FORWARD DROP",
    "node5": "iptables-legacy -P FORWARD DROP && ip6tables-legacy -P FORWARD DROP",
}
# Docker's package brings Debian's containerd, which looks into the second one.
SITE = {"headcni_node_cni_bin_dirs": ["/opt/cni/bin", "/usr/lib/cni"]}
SERVE = "systemd-run -q --unit={unit} {where} python3 -m http.server --bind :: -d /var/empty {port}"


@dataclass
class Seen:
    """What the tests have seen, for the table in docs/firewalls.md."""

    ways: dict[tuple[str, str], dict[str, bool]] = field(default_factory=dict)
    gaps: dict[str, float] = field(default_factory=dict)

    def table(self) -> str:
        """A row for each way, a column for each firewall; then the gaps."""
        firewalls = list(FIREWALLS.values())
        rows = [["way", *firewalls], ["---"] * (len(firewalls) + 1)]
        for way in dict.fromkeys(
            w.partition(", IPv")[0] for ways in self.ways.values() for w in ways
        ):
            cells = []
            for firewall in firewalls:
                found = [
                    is_open
                    for (which, _), ways in self.ways.items()
                    for name, is_open in ways.items()
                    if which == firewall and name.startswith(f"{way}, IPv")
                ]
                cells.append(f"{sum(found)} of {len(found)}")
            rows.append([way, *cells])
        gaps = [["what was done", "longest gap"], ["---"] * 2]
        gaps += [[what, f"{gap:.2f} s"] for what, gap in self.gaps.items()]
        return "\n\n".join(
            "\n".join(f"| {' | '.join(row)} |" for row in one) for one in (rows, gaps)
        )


@dataclass
class Fleet:
    """The lab, its pods, and what of all that reaches what."""

    lab: LabCommand
    site: Site
    addresses: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    def node_addresses(self, node: str) -> list[str]:
        shown = json.loads(self.lab.on(node, "ip -j address show dev eth0 scope global"))
        found = [one["local"] for link in shown for one in link.get("addr_info", ()) if one]
        return sorted(found, key=lambda one: ":" in one)[:2]

    def turn_on(self, node: str) -> None:
        """Install the node's firewall, as an operator would, and have it block."""
        if node in PACKAGES:
            install(self.lab, node, PACKAGES[node])
        self.lab.on(node, TURN_ON[node])

    def add_pods(self) -> None:
        """On each node one with a host port, and a neighbour; all of them serve."""
        ports = [{"hostPort": HOST_PORT, "containerPort": POD_PORT, "protocol": "tcp"}]
        for node in NODES:
            self.addresses[node] = {"node": self.node_addresses(node)}
            for pod, given in (("pod", {"portMappings": ports}), ("pod2", {})):
                self.lab.on(node, f"ip netns add {pod}")
                made = json.loads(
                    self.lab.on(
                        node,
                        f"CAP_ARGS='{json.dumps(given)}' {CNITOOL} add headcni /run/netns/{pod}",
                    )
                )
                self.addresses[node][pod] = [
                    one["address"].partition("/")[0] for one in made["ips"]
                ]
                where = f"ip netns exec {pod}"
                self.lab.on(node, SERVE.format(unit=f"web-{pod}", where=where, port=POD_PORT))

    def remove_pods(self) -> None:
        for node in NODES:
            for pod in ("pod", "pod2"):
                self.lab.on(
                    node,
                    f"systemctl stop web-{pod}; {CNITOOL} del headcni /run/netns/{pod};"
                    f" ip netns del {pod}",
                    check=False,
                )

    def serve(self, machine: str) -> None:
        self.lab.on(machine, SERVE.format(unit="web-node", where="", port=NODE_PORT), check=False)

    def ways(self, node: str) -> dict[str, bool]:
        """Each way of the issue, for one node, of both families: is it open?"""
        other = NODES[(NODES.index(node) + 1) % len(NODES)]
        mine, theirs = self.addresses[node], self.addresses[other]
        outside = self.node_addresses("control")
        pod, there = "ip netns exec pod", "ip netns exec pod"
        asked: list[tuple[str, str, str, list[str], int]] = [
            ("pod to pod, one node", node, pod, mine["pod2"], POD_PORT),
            ("pod to pod of another node", node, pod, theirs["pod"], POD_PORT),
            ("pod of another node to pod", other, there, mine["pod"], POD_PORT),
            ("pod to outside", node, pod, outside, NODE_PORT),
            ("outside to host port", "control", "", mine["node"], HOST_PORT),
            ("node to pod", node, "", mine["pod"], POD_PORT),
            ("another node to pod", other, "", mine["pod"], POD_PORT),
            ("pod to node", node, pod, mine["node"], NODE_PORT),
        ]
        return {
            f"{way}, {version}": self._answers(machine, where, address, port)
            for way, machine, where, addresses, port in asked
            for version, address in zip(("IPv4", "IPv6"), addresses)
        }

    def _answers(self, machine: str, where: str, address: str, port: int) -> bool:
        host = f"[{address}]" if ":" in address else address
        asks = f"{where} curl -sg -m 3 -o /dev/null http://{host}:{port}/"
        done = self.lab.on(
            machine, f"for i in 1 2; do {asks} && echo open && break; done", check=False
        )
        return done.strip() == "open"

    def closed(self, seen: Seen, setup: str) -> list[str]:
        """The ways that are not open, of all nodes; all of it is noted."""
        for node in NODES:
            seen.ways[FIREWALLS[node], setup] = self.ways(node)
        return [
            f"{firewall}: {way}"
            for (firewall, which), ways in seen.ways.items()
            for way, is_open in ways.items()
            if which == setup and not is_open
        ]

    def status(self, node: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.lab.on(node, "headcnictl status --json", check=False)
        )
        return found
