# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The socket of the tailscaled that carries the mesh in a mode."""

from __future__ import annotations

DOCUMENTATION = r"""
name: mesh_socket
short_description: Return the socket of the tailscaled that a mode uses
version_added: 0.2.0
description:
  - In host mode it is the socket of the node's own tailscaled, which C(tailscale_socket) may move.
    In daemon mode it is the socket of HeadCNI's own tailscaled, which always has the same path.
author:
  - The HeadCNI authors (@headcni)
options:
  _input:
    description: The mode, V(host) or V(daemon).
    type: str
    required: true
  variables:
    description: The variables of the node, C(hostvars[inventory_hostname]).
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Read the status of the mesh's tailscaled
  headcni.mesh.tailscale_info:
    socket: "{{ headcni_mode | headcni.mesh.mesh_socket(hostvars[inventory_hostname]) }}"
"""

RETURN = r"""
_value:
  description: The path of the socket.
  type: str
"""

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.headcni.mesh.plugins.module_utils.shared.modes import MODES, socket_of


def mesh_socket(mode: str, variables: Mapping[str, Any]) -> str:
    if mode not in MODES:
        raise AnsibleFilterError(f"mode: {mode}, expected {' or '.join(MODES)}")
    moved = variables.get("tailscale_socket") or variables.get("headcni_node_tailscale_socket")
    return socket_of(mode, str(moved or "") if mode == "host" else "")


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"mesh_socket": mesh_socket}
