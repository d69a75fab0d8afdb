# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The address ranges of the cluster's pods, as far as the controller knows them."""

from __future__ import annotations

DOCUMENTATION = r"""
name: pod_ranges
short_description: Collect the address ranges of the cluster's pods
version_added: 0.1.0
description:
  - Collects the ranges that the preflight or the configuration of nodes has found
    (C(headcni_node_preflight), C(headcni_node_configured)).
  - For a node outside of this run the range comes from the inventory, C(headcni_node_pod_cidr).
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
"""

EXAMPLES = r"""
- name: Show the pod ranges
  ansible.builtin.debug:
    msg: "{{ groups['headcni'] | headcni.mesh.pod_ranges(hostvars) }}"
"""

RETURN = r"""
_value:
  description:
    - V(ranges) are the ranges of the whole cluster, V(nodes) those of its nodes. Adjacent ranges
      are merged. V(nodes) is empty if the range of any node is unknown, and both are empty if
      nothing is known about any node.
  type: dict
"""

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import collapse_addresses
from typing import Any

from ansible_collections.headcni.mesh.plugins.module_utils.shared import podcidr


def pod_ranges(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> dict[str, list[str]]:
    cluster: list[podcidr.Network] = []
    nodes: list[podcidr.Network] = []
    complete = True
    for host in hosts:
        known = hostvars.get(host, {})
        found = known.get("headcni_node_configured") or known.get("headcni_node_preflight") or {}
        own = _networks(found.get("pod_cidrs") or known.get("headcni_node_pod_cidr"))
        complete = complete and bool(own)
        nodes += own
        cluster += [podcidr.parse_cidr(cidr) for cidr in found.get("cluster_cidrs") or ()]
        if found:
            cluster += own  # the node's range may be outside of the cluster's
    ranges = _collapsed(cluster)
    return {"ranges": ranges, "nodes": _collapsed(nodes) if complete and ranges else []}


def _networks(given: Any) -> list[podcidr.Network]:
    try:
        return list(podcidr.parse_pod_cidrs(given)) if given else []
    except podcidr.PodCidrError:
        return []  # the preflight of that node reports it


def _collapsed(networks: Iterable[podcidr.Network]) -> list[str]:
    found: list[str] = []
    for version in (4, 6):
        same: Any = [network for network in networks if network.version == version]
        found += map(str, collapse_addresses(same))
    return found


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"pod_ranges": pod_ranges}
