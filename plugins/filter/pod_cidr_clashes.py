# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Compare the pod CIDRs of nodes, as far as the controller knows them."""

from __future__ import annotations

DOCUMENTATION = r"""
name: pod_cidr_clashes
short_description: Other nodes that have the same pod CIDR
version_added: 0.1.0
description:
  - Tells in words which other nodes have a pod CIDR that overlaps that of one node. Two nodes with
    one CIDR break both, as Headscale serves it from one of them only.
  - A node's CIDRs are what its preflight has found, C(headcni_node_preflight.pod_cidrs). Of a node
    that this run does not touch, it is what the inventory says, C(headcni_node_pod_cidr).
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
options:
  own:
    description: The name of the node that is asked about.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Refuse two nodes with one CIDR
  ansible.builtin.assert:
    that: groups['headcni'] | headcni.mesh.pod_cidr_clashes(hostvars, inventory_hostname) == []
"""

RETURN = r"""
_value:
  description: A sentence for each clash.
  type: list
  elements: str
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.headcni.mesh.plugins.module_utils import podcidr


def clashes(hosts: Sequence[str], hostvars: Mapping[str, Any], own: str) -> list[str]:
    mine = _cidrs(hostvars, own)
    found = []
    for host in hosts:
        if host == own:
            continue
        for other in _cidrs(hostvars, host):
            found += [
                f"pod CIDR: {cidr} of {own} overlaps {other} of {host}: "
                "give one of them another by headcni_node_pod_cidr"
                for cidr in mine
                if cidr.version == other.version and cidr.overlaps(other)
            ]
    return found


def _cidrs(hostvars: Mapping[str, Any], host: str) -> tuple[podcidr.Network, ...]:
    if host not in hostvars:
        return ()
    known = hostvars[host]
    found = known.get("headcni_node_preflight") or {}
    given = found.get("pod_cidrs") or known.get("headcni_node_pod_cidr")
    try:
        return podcidr.parse_pod_cidrs(given)
    except podcidr.PodCidrError:
        return ()  # that node's own preflight says what is wrong with it


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"pod_cidr_clashes": clashes}
