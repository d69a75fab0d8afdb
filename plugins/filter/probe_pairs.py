# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Choose which pairs of pods to test: their number does not grow with the square of the nodes."""

from __future__ import annotations

DOCUMENTATION = r"""
name: probe_pairs
short_description: Choose the pairs of nodes whose pods test each other
version_added: 0.1.0
description:
  - With up to 20 nodes, every pod tests every other pod. With more nodes, each tests twelve others,
    at six distances before and after it in the inventory, from the next node to half of the list.
    So each pair is tested in both directions, each node has the same number of tests, and every run
    tests the same pairs.
  - Throughput is measured one pair after the other. With up to 8 nodes these are all pairs, with
    more nodes each node sends to the next one of the inventory.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
options:
  hostvars:
    description: The variables of all hosts. C(headcni_probe) is the result of starting a pod.
  every:
    description: Whether to test every pair, for any number of nodes.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Choose the pairs of pods to test
  ansible.builtin.set_fact:
    headcni_probe_pairs: "{{ ansible_play_hosts | headcni.mesh.probe_pairs(hostvars) }}"
  run_once: true
"""

RETURN = r"""
_value:
  description:
    - C(targets), the names of the nodes that each node tests; C(measured), those to which it
      measures the throughput; and C(probes), their pods.
  type: dict
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.headcni.mesh.plugins.module_utils.pair_choice import (
    ALL_MEASURED_UP_TO,
    chosen,
)


def pairs(hosts: Sequence[str], hostvars: Mapping[str, Any], every: bool = False) -> dict[str, Any]:
    made = {host: (hostvars[host].get("headcni_probe") or {}).get("probe") for host in hosts}
    probes = {host: probe for host, probe in made.items() if probe}
    targets = chosen(list(probes), every)
    few = len(probes) <= ALL_MEASURED_UP_TO
    measured = {host: others if few else others[:1] for host, others in targets.items()}
    return {"probes": probes, "targets": targets, "measured": measured}


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"probe_pairs": pairs}
