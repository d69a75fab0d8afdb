# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Compare the routes that peers serve in the tailnet with the networks that a node is in."""

from __future__ import annotations

DOCUMENTATION = r"""
name: served_route_clashes
short_description: Find routes of the tailnet that overlap nodes' own networks
version_added: 0.1.0
description:
  - In host mode a node accepts all routes that peers serve. HeadCNI still reaches the networks of
    the node's main routing table directly. This filter names routes to such networks.
  - It also checks whether the controller is in a served network that a node reaches only through
    its default route. Such a node would answer the controller through the tunnel.
  - It reads the variables of every node, so run it once for all nodes, not once per node.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
options:
  routes:
    description: The routes, RV(headcni.mesh.headscale_info#module:routes).
    type: list
    elements: dict
    required: true
"""

EXAMPLES = r"""
- name: Compare the tailnet's routes with the nodes' own networks
  ansible.builtin.set_fact:
    clashes: "{{ ansible_play_hosts | headcni.mesh.served_route_clashes(hostvars, known.routes) }}"
  run_once: true
"""

RETURN = r"""
_value:
  description: By name of the node, the sentences C(problems), which stop a run, and C(notes). A
    node without any is not included.
  type: dict
"""

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any, NamedTuple

Network = IPv4Network | IPv6Network


class Served(NamedTuple):
    network: Network
    node: str


def clashes(
    hosts: Sequence[str], hostvars: Mapping[str, Any], routes: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, list[str]]]:
    served = list(_served(routes))
    beside: dict[
        tuple[str, ...], list[Served]
    ] = {}  # routes outside of the cluster's CIDRs, by those CIDRs
    found = {}
    for host in hosts:
        known = hostvars[host]
        node = known.get("headcni_node_preflight") or {}
        cluster = tuple(node.get("cluster_cidrs") or ())
        if cluster not in beside:
            beside[cluster] = list(_outside_of(served, cluster))
        joined = bool((known.get("tailscale_preflight") or {}).get("node_key"))
        said = _of_node(node, cluster, beside[cluster], joined)
        if any(said.values()):
            found[host] = said
    return found


def _of_node(
    node: Mapping[str, Any], cluster: Sequence[str], served: Sequence[Served], joined: bool
) -> dict[str, list[str]]:
    notes = [
        f"tailnet: {route.node} serves {route.network}, which holds the cluster's {cidr}: nodes' "
        "own pod CIDRs are narrower, and win"
        for route in served
        for cidr in map(ip_network, cluster)
        if _overlap(route.network, cidr)
    ]
    if node.get("mode") == "daemon":
        return {"problems": [], "notes": notes}
    own = [
        (ip_network(route["network"]), str(route["interface"]))
        for route in node.get("networks", ())
    ]
    notes += [
        f"tailnet: {route.node} serves {route.network}, and this node is in {network} by "
        f"{interface}: the node goes on reaching it directly"
        for route in served
        for network, interface in own
        if _overlap(route.network, network)
    ]
    # The controller reaches a node that has already joined, so nothing will change for it.
    problems = [] if joined else list(_lost_controller(served, own, node.get("controller")))
    return {"problems": problems, "notes": notes}


def _served(routes: Sequence[Mapping[str, Any]]) -> Iterator[Served]:
    """Without the routes of exit nodes, which a node uses only if it chooses to."""
    for route in routes:
        if route.get("served"):
            network = ip_network(route["route"])
            if network.prefixlen:
                yield Served(network, str(route["node"]))


def _outside_of(served: Sequence[Served], cluster: Sequence[str]) -> Iterator[Served]:
    cidrs = [ip_network(cidr) for cidr in cluster]
    for route in served:
        if not any(
            _overlap(route.network, cidr) and route.network.prefixlen >= cidr.prefixlen
            for cidr in cidrs
        ):
            yield route


def _lost_controller(
    served: Sequence[Served], own: Sequence[tuple[Network, str]], address: str | None
) -> Iterator[str]:
    if not address:
        return
    controller = ip_address(address)
    if any(controller in network for network, _unused in own):
        return
    for route in served:
        if controller in route.network:
            yield (
                f"tailnet: {route.node} serves {route.network}, and the controller, {controller}, "
                "is in it: this node would answer the controller through the tunnel, and the run "
                f"would lose the node; give it a route to {route.network} in its main table, take "
                f"the approval of {route.network} from {route.node} at Headscale, or set "
                "headcni_mode to daemon"
            )


def _overlap(network: Network, other: Network) -> bool:
    return network.version == other.version and network.overlaps(other)


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"served_route_clashes": clashes}
