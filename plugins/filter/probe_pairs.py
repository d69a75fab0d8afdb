# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which pod asks which: a number of pairs that does not grow with the square of the nodes."""

from __future__ import annotations

DOCUMENTATION = r"""
name: probe_pairs
short_description: Choose which nodes' pods ask which
version_added: 0.1.0
description:
  - Up to 20 nodes every pod asks every other. Above that, a node asks twelve others, at six
    distances before and behind it in the inventory, from the next node to half of the way round. So
    each pair is asked in both directions, each node asks and is asked equally often, and a run asks
    the same pairs as the last one.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
options:
  hostvars:
    description: Everyone's variables. C(headcni_probe) is what made the pod of a node.
  every:
    description: Ask every pair, however many nodes there are.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Choose who asks whom
  ansible.builtin.set_fact:
    headcni_probe_pairs: "{{ ansible_play_hosts | headcni.mesh.probe_pairs(hostvars) }}"
  run_once: true
"""

RETURN = r"""
_value:
  description: C(targets), the names of whom each node asks, and C(probes), each node's pod.
  type: dict
"""

from collections.abc import Mapping, Sequence
from typing import Any

ALL_UP_TO = 20  # nodes: above it, pairs are sampled and only failures are shown
DISTANCES = 6


def pairs(hosts: Sequence[str], hostvars: Mapping[str, Any], every: bool = False) -> dict[str, Any]:
    made = {host: (hostvars[host].get("headcni_probe") or {}).get("probe") for host in hosts}
    probes = {host: probe for host, probe in made.items() if probe}
    return {"probes": probes, "targets": chosen(list(probes), every)}


def chosen(names: Sequence[str], every: bool = False) -> dict[str, list[str]]:
    total = len(names)
    steps = range(1, total) if every or total <= ALL_UP_TO else _steps(total)
    return {name: [names[(at + step) % total] for step in steps] for at, name in enumerate(names)}


def _steps(total: int) -> list[int]:
    """Few near ones and few far ones, in both directions."""
    farthest = (total - 1) // 2
    ahead = {round(farthest ** (number / (DISTANCES - 1))) for number in range(DISTANCES)}
    return sorted({*ahead, *(total - step for step in ahead)})


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"probe_pairs": pairs}
