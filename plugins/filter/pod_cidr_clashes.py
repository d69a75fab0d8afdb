# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Compare the pod CIDRs of nodes, as far as the controller knows them."""

from __future__ import annotations

DOCUMENTATION = r"""
name: pod_cidr_clashes
short_description: Find nodes whose pod CIDRs overlap
version_added: 0.1.0
description:
  - Returns a sentence for each overlap. If two nodes have the same CIDR, Headscale sends its
    traffic to only one of them.
  - A node's CIDRs are those that preflight has found, C(headcni_node_preflight.pod_cidrs). For a
    node outside of this run they come from the inventory, C(headcni_node_pod_cidr).
  - It reads the variables of every node, so run it once for all nodes, not once per node.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
"""

EXAMPLES = r"""
- name: Compare the pod CIDRs of all nodes
  ansible.builtin.set_fact:
    clashes: "{{ groups['headcni'] | headcni.mesh.pod_cidr_clashes(hostvars) }}"
  run_once: true

- name: Refuse overlapping CIDRs
  ansible.builtin.assert:
    that: inventory_hostname not in clashes
    fail_msg: "{{ clashes[inventory_hostname] }}"
"""

RETURN = r"""
_value:
  description:
    - The sentences by name of the node. A node without an overlap is not included.
    - For each CIDR at most five other nodes are named. A last sentence counts the rest.
  type: dict
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.headcni.mesh.plugins.module_utils.shared import podcidr

MOST_NAMED = 5
ADVICE = "give one of them another by headcni_node_pod_cidr"


class Claim(NamedTuple):
    """The pod CIDR of a node. Claims sort by their first address, the wider one first."""

    version: int
    first: int
    negative_last: int
    place: int  # of the node among all nodes
    host: str
    cidr: str

    def holds(self, other: Claim) -> bool:
        """Whether a claim that sorts after this one lies within it."""
        return self.version == other.version and -self.negative_last >= other.first


def clashes(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> dict[str, list[str]]:
    """Two CIDRs are either nested or disjoint. So in sorted order, the CIDRs around the current one
    form a stack, and the CIDRs within it follow directly after it."""
    claims = sorted(_claims(hosts, hostvars))
    within = [0] * len(claims)  # how many claims lie within each
    around: list[tuple[int, list[int]]] = []  # how many lie around each, and the nearest of them
    open_claims: list[int] = []
    for at, claim in enumerate(claims):
        while open_claims and not claims[open_claims[-1]].holds(claim):
            ended = open_claims.pop()
            within[ended] = at - ended - 1
        around.append((len(open_claims), open_claims[-MOST_NAMED:]))
        open_claims.append(at)
    for ended in open_claims:
        within[ended] = len(claims) - ended - 1
    found: dict[str, list[str]] = {}
    for at, claim in enumerate(claims):
        count, near = around[at]
        if count + within[at]:
            near = [*near, *range(at + 1, at + 1 + min(within[at], MOST_NAMED))]
            others = [claims[other] for other in near[:MOST_NAMED]]
            sentences = _sentences(claim, others, count + within[at])
            found.setdefault(claim.host, []).extend(sentences)
    return found


def _claims(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> Iterator[Claim]:
    for place, host in enumerate(dict.fromkeys(hosts)):
        for cidr in _cidrs(hostvars, host):
            first, last = int(cidr.network_address), int(cidr.broadcast_address)
            yield Claim(cidr.version, first, -last, place, host, str(cidr))


def _sentences(own: Claim, others: Sequence[Claim], count: int) -> Iterator[str]:
    for other in others:
        yield f"pod CIDR: {own.cidr} of {own.host} overlaps {other.cidr} of {other.host}: {ADVICE}"
    if count > len(others):
        more = count - len(others)
        yield f"pod CIDR: {own.cidr} of {own.host} overlaps those of {more} more nodes: {ADVICE}"


def _cidrs(hostvars: Mapping[str, Any], host: str) -> tuple[podcidr.Network, ...]:
    if host not in hostvars:
        return ()
    known = hostvars[host]
    found = known.get("headcni_node_preflight") or {}
    given = found.get("pod_cidrs") or known.get("headcni_node_pod_cidr")
    try:
        return podcidr.parse_pod_cidrs(given)
    except podcidr.PodCidrError:
        return ()  # the preflight of that node reports it


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"pod_cidr_clashes": clashes}
