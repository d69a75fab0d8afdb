# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether the pod CIDRs and the names of interfaces fit this node's network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from . import kernel, node_config, other_networks
from .shared import podcidr

OUR_LINKS = ("headcni", "tailscale", "hc")  # prefixes of their names


def pod_cidrs(
    config: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[podcidr.Resolution | None, list[str]]:
    try:
        found = node_config.resolved(config, os.environ)
    except podcidr.PodCidrError as problem:
        return None, [f"pod CIDR: {problem}"]
    wrong = []
    if found.guessed and given["require_pod_cidr"]:
        wrong.append(
            f"pod CIDR: {podcidr.join(found.cidrs)} is a guess ({found.source}): "
            "set headcni_node_pod_cidr for this node"
        )
    six = any(cidr.version == 6 for cidr in found.cidrs)
    if given["enable_ipv6"] is True and not six:
        wrong.append(
            f"enable_ipv6: true, but {podcidr.join(found.cidrs)} has no IPv6: "
            "give an IPv6 range in headcni_node_pod_cidr or headcni_node_cluster_cidr"
        )
    if given["enable_ipv6"] is False and six:
        wrong.append(
            f"enable_ipv6: false, but {podcidr.join(found.cidrs)} has IPv6: leave it out there"
        )
    return found, wrong


def former_cidrs(cidrs: Sequence[podcidr.Network], given: Mapping[str, Any]) -> list[str]:
    """Another pod CIDR than the node has: pods may still use addresses of the old one."""
    if given["may_change_pod_cidr"] or given["awaits_pod_cidr"]:
        return []
    change = node_config.cidr_change(cidrs, node_config.PATH)
    return [f"pod CIDR: {change}"] if change else []


def overlaps(
    config: Mapping[str, Any], own: Sequence[podcidr.Network], given: Mapping[str, Any]
) -> list[str]:
    """Pod and cluster CIDRs that overlap services or networks that the node reaches."""
    wrong = []
    network = node_config.section(config, "network")
    for service in cidrs_of(network.get("serviceCIDR")):
        for cidr in own:
            if service.version == cidr.version and service.overlaps(cidr):
                wrong.append(f"pod CIDR: {cidr} overlaps the services' {service}")
    allowed = cidrs_of(given["ignore_routes"])
    cluster = cidrs_of(node_config.cluster_cidrs(config, own))
    for cidr, route in kernel.clashes([*own, *cluster], own_routes(given), allowed):
        if cidr not in own and not route.connected:
            continue
        what = "pod CIDR" if cidr in own else "cluster CIDR"
        text = f"{what}: {cidr} overlaps {route.network}, which this node reaches by "
        if not any(text in said for said in wrong):
            wrong.append(f"{text}{route.interface}{way_out(route)}")
    return wrong


def own_routes(given: Mapping[str, Any]) -> list[kernel.Route]:
    """The node's routes, without those of HeadCNI and Tailscale."""
    return kernel.routes(lambda name: name == given["bridge"] or name.startswith(OUR_LINKS))


def way_out(route: kernel.Route) -> str:
    """Who owns the network that a range overlaps, and how to change either side."""
    ours = "choose another range by headcni_node_cluster_cidr or headcni_node_pod_cidr"
    owner = other_networks.owner_of(route.interface)
    if owner is None:
        return f": {ours}, or allow it by headcni_node_ignore_routes: [{route.network}]"
    if owner.name == "flannel's":
        return f", which is {owner.name}: {owner.change}; or {ours}"
    return f", which is {owner.name}: {ours}, or {owner.change}"


def cidrs_of(value: Any) -> list[podcidr.Network]:
    texts = value.split(",") if isinstance(value, str) else value or []
    found = []
    for text in texts:
        try:
            found.append(podcidr.parse_cidr(str(text).strip()))
        except podcidr.PodCidrError:
            continue  # the check of the configuration reports it
    return found


def names(config: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    wrong = []
    if given["datapath"] == "bridge" and kernel.is_bridge(given["bridge"]) is False:
        wrong.append(
            f"interface: {given['bridge']} is there and is no bridge: "
            "choose another name by headcni_node_bridge"
        )
    tailscale = node_config.section(config, "tailscale")
    mesh = tailscale.get("interfaceName") or "headcni01"
    is_bridge = kernel.is_bridge(mesh)
    if tailscale.get("mode") == "daemon" and is_bridge:
        wrong.append(
            f"interface: {mesh} is there and is a bridge: "
            "choose another name by tailscale.interfaceName in headcni_node_extra_config"
        )
    return wrong
