# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The position of a batch among all nodes of a play, in words."""

from __future__ import annotations

DOCUMENTATION = r"""
name: batch_position
short_description: Show how far a play is, such as node 31 of 1,000
version_added: 0.1.0
description:
  - Returns the position of the current batch among all nodes, for plays with C(serial).
  - Do not use it in the name of a task of such a play. Ansible keeps the name of the first batch.
author:
  - The HeadCNI authors (@headcni)
options:
  _input:
    description: The nodes of the current batch, C(ansible_play_batch).
    type: list
    elements: str
    required: true
  every:
    description: All nodes of the play, C(ansible_play_hosts_all), in the order of the batches.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: Show how far this run is
  ansible.builtin.debug:
    msg: "{{ ansible_play_batch | headcni.mesh.batch_position(ansible_play_hosts_all) }}"
  run_once: true
"""

RETURN = r"""
_value:
  description: Such as V(node 31 of 1,000) or V(nodes 31 to 35 of 1,000).
  type: str
"""

from collections.abc import Sequence
from typing import Any


def position(batch: Sequence[str], every: Sequence[str]) -> str:
    # The nodes of a batch are adjacent in the list. Nodes that have failed are no longer in it.
    total = len(every)
    if not batch:
        return f"no node of {total:,}"
    first = every.index(batch[0]) + 1
    last = every.index(batch[-1], first - 1) + 1
    if first == last:
        return f"node {first:,} of {total:,}"
    return f"nodes {first:,} to {last:,} of {total:,}"


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"batch_position": position}
