# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""One line per node for status.yml, problems first."""

from __future__ import annotations

DOCUMENTATION = r"""
name: status_lines
short_description: Make a table of the nodes' status, problems first
version_added: 0.2.0
description:
  - One line per node, from the result of M(headcni.mesh.headcni_status) that the playbook has
    registered as C(headcni_status).
  - Then the reasons for what is wrong, each with the name of its node.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
"""

EXAMPLES = r"""
- name: Show the status of all nodes
  ansible.builtin.debug:
    msg: "{{ (ansible_play_hosts_all | headcni.mesh.status_lines(hostvars)).lines }}"
"""

RETURN = r"""
_value:
  description:
    - C(lines) has the table and the reasons, C(bad) the names of the nodes that are not ready, and
      C(nodes) the status of each node, or the reason why there is none.
  type: dict
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.headcni.mesh.plugins.module_utils.shared import node_status
from ansible_collections.headcni.mesh.plugins.plugin_utils.table import table

UNREACHABLE = "it cannot be reached: see above"


def of_hosts(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> dict[str, Any]:
    found = {host: _status(hostvars.get(host, {}).get("headcni_status") or {}) for host in hosts}
    rows, said = node_status.lines(found)
    ready = sum(row[1] == "yes" for row in rows)
    return {
        "lines": [
            *table([list(node_status.HEAD), *rows]),
            f"{ready} of {len(rows)} nodes are ready",
            *said,
        ],
        "bad": [row[0] for row in rows if row[1] != "yes"],
        "nodes": found,
    }


def _status(result: Mapping[str, Any]) -> Mapping[str, Any] | str:
    if result.get("status"):
        status: Mapping[str, Any] = result["status"]
        return status
    return str(result.get("problem") or UNREACHABLE)


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"status_lines": of_hosts}
