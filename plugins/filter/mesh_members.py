# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""All nodes of the mesh, including those outside of this run."""

from __future__ import annotations

DOCUMENTATION = r"""
name: mesh_members
short_description: Return the names of all nodes of the mesh
version_added: 0.2.0
description:
  - The hosts that P(headcni.mesh.mesh_hosts#filter) selects, including hosts that C(--limit)
    excludes. If your own playbook uses a role for other hosts, only those hosts.
author:
  - The HeadCNI authors (@headcni)
options:
  _input:
    description: The groups of the inventory, C(groups).
    type: dict
    required: true
  given:
    description: The value of C(headcni_hosts), if there is one.
    type: str
    required: true
  play_hosts:
    description: The hosts of the current play, C(ansible_play_hosts_all).
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: Show all nodes
  ansible.builtin.debug:
    msg: "{{ groups | headcni.mesh.mesh_members('', ansible_play_hosts_all) }}"
"""

RETURN = r"""
_value:
  description: The names of the nodes.
  type: list
  elements: str
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.headcni.mesh.plugins.filter.mesh_hosts import matched, mesh_hosts


def mesh_members(
    groups: Mapping[str, Sequence[str]], given: str, play_hosts: Sequence[str]
) -> list[str]:
    try:
        members = matched(groups, mesh_hosts(groups, given))
    except AnsibleFilterError:
        return list(play_hosts)
    known = set(members)
    return members if known.issuperset(play_hosts) else list(play_hosts)


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"mesh_members": mesh_members}
