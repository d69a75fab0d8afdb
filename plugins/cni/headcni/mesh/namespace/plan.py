"""What the host and the namespace need to forward packets: rules, routes and nft chains, computed
as data from the settings and the cable between the two."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import collapse_addresses
from typing import Any, NamedTuple, Tuple

from ...datapath.rtnl import RT_TABLE_MAIN
from ...model import Address, Network
from ...port_ranges import ANSWERED_PROTOCOLS, intervals
from ..mesh import TABLE as PODS_TABLE
from .settings import MeshConfig

ROUTES_TABLE = 5201
TUN = "tailscale0"
INSIDE = "eth0"
TUN_MTU = 1280

# All come before Tailscale's rules (5210 to 5270), except the last, which comes after. ANSWERS is
# after the routes to pods (5200), and before the rule for the node's own networks (5205).
OWN_UNDERLAY, BACK_TO_MESH, FROM_MESH, TO_LINK = 5188, 5189, 5190, 5191
PODS_TO_TAILNET, FROM_TAILSCALED, ANSWERS, NODE_TO_TAILNET = 5192, 5193, 5204, 5280
PRIORITIES = (
    *(OWN_UNDERLAY, BACK_TO_MESH, FROM_MESH, TO_LINK),
    *(PODS_TO_TAILNET, FROM_TAILSCALED, ANSWERS, NODE_TO_TAILNET),
)
MAIN = 32766  # the kernel's own rule for the main table
# The mark that every tailscaled sets on packets of its own sockets.
TAILSCALED_MARK, TAILSCALED_MASK = 0x80000, 0xFF0000

ANYWHERE: dict[int, str] = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}  # noqa: S104 – no socket
_FAMILIES = {4: ("ip", socket.AF_INET), 6: ("ip6", socket.AF_INET6)}


class Rule(NamedTuple):
    """A rule of ours in the form in which rules are compared."""

    version: int
    priority: int
    table: int = 0
    iif: str = ""
    src: str = ""
    dst: str = ""
    mark: int = 0  # under TAILSCALED_MASK
    goto: int = 0


@dataclass(frozen=True)
class Cable:
    """The veth pair as it should be. The host has the first address of each link network."""

    links: Tuple[Network, ...]
    mtu: int
    underlay: Tuple[Address, ...]

    @property
    def host(self) -> dict[int, Address]:
        return {link.version: link[1] for link in self.links}

    @property
    def inside(self) -> dict[int, Address]:
        return {link.version: link[2] for link in self.links}

    def prefixed(self, end: Mapping[int, Address]) -> set[str]:
        return {f"{end[link.version]}/{link.prefixlen}" for link in self.links}

    @property
    def families(self) -> list[tuple[int, str]]:
        """IP versions, and their names in nft."""
        return [(link.version, _FAMILIES[link.version][0]) for link in self.links]


def endpoint(address: Address, port: int) -> str:
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


def host_rules(config: MeshConfig, cable: Cable) -> list[Rule]:
    """Packets that leave the namespace, and answers to them, use the main table, whatever a
    tailscaled of the host accepts. Pods' packets for the tailnet go into the namespace. So do the
    node's own, except packets to peers of the host's tailscaled, which comes first.

    kube-proxy may redirect a packet from the namespace to a pod of another node: it goes back into
    the namespace, and so does the answer. The table of routes to pods decides which packets these
    are, so the cluster's range need not be known. tailscaled's own packets never go back.

    The node's answers to tailnet peers have the link's address, so they go back over the link even
    if the host has another route to the peer.

    A tailscaled tells its peers every address of its node as an endpoint, including the pods'
    gateway. The host's tailscaled must not use that of another node: it would be a tunnel in our
    tunnel.
    """
    found = []
    link = config.interface
    for network in cable.links:
        version = network.version
        own, host = f"{cable.inside[version]}/{network.max_prefixlen}", cable.host[version]
        found.append(Rule(version, OWN_UNDERLAY, RT_TABLE_MAIN, iif=link, src=own))
        found.append(Rule(version, BACK_TO_MESH, PODS_TABLE, iif=link))
        found.append(Rule(version, FROM_MESH, RT_TABLE_MAIN, iif=link))
        found.append(Rule(version, TO_LINK, RT_TABLE_MAIN, dst=str(network)))
        found.append(Rule(version, FROM_TAILSCALED, mark=TAILSCALED_MARK, goto=MAIN))
        if config.answer_for_node:
            answers = f"{host}/{network.max_prefixlen}"
            found.append(Rule(version, ANSWERS, ROUTES_TABLE, src=answers))
        for dst in _tailnet(config, version):
            for src in (cidr for cidr in config.pod_cidrs if cidr.version == version):
                found.append(
                    Rule(version, PODS_TO_TAILNET, ROUTES_TABLE, src=str(src), dst=str(dst))
                )
            found.append(Rule(version, BACK_TO_MESH, ROUTES_TABLE, iif=link, dst=str(dst)))
            if config.answer_for_node:
                found.append(Rule(version, NODE_TO_TAILNET, ROUTES_TABLE, dst=str(dst)))
    return found


def host_routes(config: MeshConfig, cable: Cable) -> list[dict[str, Any]]:
    """The routes of ROUTES_TABLE. Callers behind a tailnet peer may have any address, so answers
    need a default route."""
    found = []
    for version, _unused in cable.families:
        anywhere = f"{ANYWHERE[_FAMILIES[version][1]]}/0"
        wanted = [str(cidr) for cidr in _tailnet(config, version)]
        for dst in [*wanted, anywhere] if config.answer_for_node else wanted:
            found.append(
                {
                    "dst": dst,
                    "gateway": str(cable.inside[version]),
                    "prefsrc": str(cable.host[version]),
                    "mtu": TUN_MTU,
                }
            )
    return found


def inside_rules(config: MeshConfig, cable: Cable) -> list[Rule]:
    """These keep the link and this node's pods local even if a peer advertises their ranges."""
    home = [link for link in (*cable.links, *config.pod_cidrs) if link.version in cable.host]
    return [Rule(cidr.version, TO_LINK, RT_TABLE_MAIN, dst=str(cidr)) for cidr in home]


def inside_routes(cable: Cable) -> list[dict[str, Any]]:
    return [
        {"dst": f"{ANYWHERE[_FAMILIES[version][1]]}/0", "gateway": str(cable.host[version])}
        for version, _unused in cable.families
    ]


def host_chains(config: MeshConfig, cable: Cable) -> dict[str, list[str]]:
    """The namespace's way out, and the way in to tailscaled's port: from outside, and from a
    tailscaled of the host, which may be its peer. Also who may not reach the node: a neighbour at
    the link's address; and, if peers may use some ports only, everyone but pods at another address
    of the node. That is decided before node ports and host ports redirect packets."""
    port, name = config.port, config.interface
    to_port, out, aside, around = [], [], [], []
    for version, family in cable.families:
        inside, host = cable.inside[version], cable.host[version]
        to_port.append(
            f"fib daddr type local udp dport {port} dnat {family} to {endpoint(inside, port)}"
        )
        out.append(f'{family} saddr {inside} oifname != "{name}" masquerade')
        aside.append(f'iifname != {{ "{name}", "lo" }} {family} daddr {host} drop')
        if config.answer_for_node is not True:
            around.append(
                f'iifname "{name}" {_not_a_pod(config, version)} {family} daddr != {host} '
                "fib daddr type local meta l4proto { tcp, udp, sctp } ct state new drop"
            )
        for dst in _tailnet(config, version):
            # A program of the node may have bound another address of the node.
            out.append(f'oifname "{name}" {family} daddr {dst} fib saddr type local masquerade')
    return {
        "aside": ["type filter hook prerouting priority raw; policy accept;", *aside],
        "around": ["type filter hook prerouting priority mangle; policy accept;", *around],
        "prerouting": [
            "type nat hook prerouting priority dstnat; policy accept;",
            *(f'iifname != "{name}" {rule}' for rule in to_port),
        ],
        "output": ["type nat hook output priority -100; policy accept;", *to_port],
        "postrouting": ["type nat hook postrouting priority srcnat; policy accept;", *out],
    }


def inside_chains(config: MeshConfig, cable: Cable) -> dict[str, list[str]]:
    """Masquerading gives packets the node's tailnet address, because the TUN has it. tailscaled
    handles what is its own, the peer API and 100.100.100.100, before the TUN. Everything else is
    for the node, on the ports that it answers. The caller's address is kept."""
    into, out, direct = [], [], []
    for version, family in cable.families:
        host = cable.host[version]
        out.append(f'oifname "{TUN}" {family} saddr {host} masquerade')
        direct.append(f'iifname "{TUN}" {family} daddr {host} ct status dnat accept')
        direct.append(f'iifname "{TUN}" {family} daddr {host} drop')
        for ports in _answered(config):
            into.append(f'iifname "{TUN}" fib daddr type local {ports}dnat {family} to {host}')
    return {
        "prerouting": ["type nat hook prerouting priority dstnat; policy accept;", *into],
        "forward": [
            "type filter hook forward priority filter; policy accept;",
            # The tailnet has no such address: the host would send the packet back in a loop.
            f'iifname "{INSIDE}" oifname "{INSIDE}" drop',
            "ct state established,related accept",
            *direct,
        ],
        "postrouting": ["type nat hook postrouting priority srcnat; policy accept;", *out],
    }


def _answered(config: MeshConfig) -> Iterator[str]:
    """Conditions on a packet in nft's syntax. An empty condition matches every packet."""
    if config.answer_for_node is True:
        yield ""
    elif config.answer_for_node:
        for protocol in ANSWERED_PROTOCOLS:
            ports = intervals(config.answer_for_node, protocol)
            if ports:
                yield f"{protocol} dport {{ {', '.join(ports)} }} "


def _not_a_pod(config: MeshConfig, version: int) -> str:
    """The condition that a caller is not a pod. While the cluster's range is unknown, it matches
    only peers themselves, and nobody behind them."""
    family, pods = _FAMILIES[version][0], [*config.cluster_cidrs, *config.pod_cidrs]
    if config.cluster_cidrs:
        known: Any = [pod for pod in pods if pod.version == version]
        ranges = ", ".join(map(str, collapse_addresses(known)))
        return f"{family} saddr != {{ {ranges} }}" if ranges else ""
    return f"{family} saddr {{ {', '.join(map(str, _tailnet(config, version)))} }}"


def _tailnet(config: MeshConfig, version: int) -> list[Network]:
    return [cidr for cidr in config.tailnet if cidr.version == version]
