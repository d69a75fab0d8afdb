# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""A table with the mode of each node, and with what a switch of modes has done."""

from __future__ import annotations

DOCUMENTATION = r"""
name: mode_summary
short_description: Make a table of the nodes' modes
version_added: 0.1.0
description:
  - One line per node, with what C(playbooks/switch_mode.yml) has found and done.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
options:
  wanted:
    description: The mode to switch to.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Show the mode of each node
  ansible.builtin.debug:
    msg: "{{ ansible_play_hosts_all | headcni.mesh.mode_summary(hostvars, 'daemon') }}"
"""

RETURN = r"""
_value:
  description: The lines of the table.
  type: list
  elements: str
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.headcni.mesh.plugins.plugin_utils.table import table

HEAD = ["node", "mode", "state"]


def summary(hosts: Sequence[str], hostvars: Mapping[str, Any], wanted: str) -> list[str]:
    return table([HEAD, *(_row(host, hostvars.get(host, {}), wanted) for host in hosts)])


def _row(host: str, known: Mapping[str, Any], wanted: str) -> list[str]:
    found = known.get("headcni_mode_state") or {}
    mode = str(found.get("mode") or "?")
    return [host, mode, _state(known, found, mode, wanted)]


def _state(known: Mapping[str, Any], found: Mapping[str, Any], mode: str, wanted: str) -> str:
    if "mode" not in found:
        return "NOT ASKED: see above"
    problem, back = known.get("headcni_problem"), known.get("headcni_restore_problem")
    if problem and back:
        return (
            f"FAILED, and NOT PUT BACK ({back}); its pods are served by both modes: run again to "
            f"go on. It failed at: {problem}"
        )
    if problem and mode == wanted:
        return f"NOT FINISHED, but it works in this mode: run again. It failed at: {problem}"
    if problem:
        return f"FAILED, and put back. It failed at: {problem}"
    if known.get("headcni_switched"):
        return "switched" if found.get("left_mode") != wanted else "put back"
    if found.get("unfinished"):
        return "in the midst of a switch that was cut off: to be finished"
    return "left alone" if mode == wanted else "to be switched"


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"mode_summary": summary}
