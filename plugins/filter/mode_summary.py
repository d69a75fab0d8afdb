# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where each node stands between the two modes, as a table to be read."""

from __future__ import annotations

DOCUMENTATION = r"""
name: mode_summary
short_description: A table of where each node stands between the two modes
version_added: 0.1.0
description:
  - A line for each node, of what C(playbooks/switch_mode.yml) has found and done.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
options:
  wanted:
    description: The mode that they are to be in.
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Show it
  ansible.builtin.debug:
    msg: "{{ ansible_play_hosts_all | headcni.mesh.mode_summary(hostvars, 'daemon') }}"
"""

RETURN = r"""
_value:
  description: Lines to be shown.
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
    stands = known.get("headcni_mode_state") or {}
    mode = str(stands.get("mode") or "?")
    return [host, mode, _state(known, stands, mode, wanted)]


def _state(known: Mapping[str, Any], stands: Mapping[str, Any], mode: str, wanted: str) -> str:
    if "mode" not in stands:
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
        return "switched" if stands.get("left_mode") != wanted else "put back"
    if stands.get("unfinished"):
        return "in the midst of a switch that was cut off: to be finished"
    return "left alone" if mode == wanted else "to be switched"


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"mode_summary": summary}
