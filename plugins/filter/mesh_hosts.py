# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which hosts of an inventory are the nodes of the mesh."""

from __future__ import annotations

DOCUMENTATION = r"""
name: mesh_hosts
short_description: Return the host pattern of the mesh's nodes
version_added: 0.2.0
description:
  - For C(hosts) of a play. The pattern is C(headcni_hosts) if it is given, otherwise the group
    C(headcni), otherwise the group C(k3s_cluster) of k3s-ansible.
  - Fails if the pattern matches no host. Otherwise a misspelt group would look like success.
author:
  - The HeadCNI authors (@headcni)
options:
  _input:
    description: The groups of the inventory, C(groups).
    type: dict
    required: true
  given:
    description:
      - The value of C(headcni_hosts), if there is one. It works from the command line only,
        since Ansible chooses the hosts of a play before it reads the variables of an inventory.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Do something on every node
  hosts: "{{ groups | headcni.mesh.mesh_hosts(headcni_hosts | default('')) }}"
"""

RETURN = r"""
_value:
  description: A host pattern that matches at least one host.
  type: str
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ansible import context
from ansible.errors import AnsibleFilterError
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader

GROUPS = ("headcni", "k3s_cluster")


def mesh_hosts(groups: Mapping[str, Sequence[str]], given: str = "") -> str:
    pattern = given or next((name for name in GROUPS if groups.get(name)), "")
    if context.CLIARGS.get("syntax"):  # --syntax-check needs no inventory
        return pattern or GROUPS[0]
    if not pattern:
        raise AnsibleFilterError(
            f"the inventory has no group 'headcni' with hosts in it ({_known(groups)}): add the "
            "nodes to that group, or name another one with -e headcni_hosts=GROUP"
        )
    if not matched(groups, pattern):
        raise AnsibleFilterError(
            f"headcni_hosts: '{pattern}' matches no host of the inventory ({_known(groups)}): "
            "correct the name, or name the inventory with -i"
        )
    return pattern


def matched(groups: Mapping[str, Sequence[str]], pattern: str) -> list[str]:
    """The hosts that Ansible itself finds for the pattern."""
    if pattern in groups:
        return list(groups[pattern])
    inventory = InventoryManager(DataLoader(), parse=False)
    for group, hosts in groups.items():
        inventory.add_group(group)
        for host in hosts:
            inventory.add_host(host, group=group)
    return [str(host.name) for host in inventory.get_hosts(pattern=pattern)]


def _known(groups: Mapping[str, Sequence[str]]) -> str:
    names = [name for name, hosts in groups.items() if hosts and name not in ("all", "ungrouped")]
    return f"groups with hosts: {', '.join(names[:20])}" if names else "it has no group with hosts"


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"mesh_hosts": mesh_hosts}
