# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""A table of the versions on each node before and after an upgrade."""

from __future__ import annotations

DOCUMENTATION = r"""
name: version_summary
short_description: Make a table of the versions on each node
version_added: 0.1.0
description:
  - One line per node, with what C(playbooks/upgrade.yml) or C(playbooks/rollback.yml) has found and
    done.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
"""

EXAMPLES = r"""
- name: Show the versions on each node
  ansible.builtin.debug:
    msg: "{{ ansible_play_hosts_all | headcni.mesh.version_summary(hostvars) }}"
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

HEAD = ["node", "runtime", "tailscale", "state"]


def summary(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> list[str]:
    return table([HEAD, *(_row(host, hostvars.get(host, {})) for host in hosts)])


def _row(host: str, known: Mapping[str, Any]) -> list[str]:
    before, after = known.get("headcni_before") or {}, known.get("headcni_after") or {}
    runtime = _change(before.get("release"), after.get("release"))
    tailscale = _change(before.get("tailscale_running"), after.get("tailscale_running"))
    return [host, runtime, tailscale, _state(known, before, after)]


def _change(before: Any, after: Any) -> str:
    if not after or before == after:
        return str(before or "?")
    return f"{before} -> {after}"


def _state(known: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    problem, back = known.get("headcni_problem"), known.get("headcni_restore_problem")
    if problem and back:
        return f"FAILED, and NOT PUT BACK ({back}). It failed at: {problem}"
    if problem:
        return f"FAILED, and put back. It failed at: {problem}"
    if not before:
        return "NOT ASKED: see above"
    if not known.get("headcni_upgraded"):
        return "not reached"
    versions = ("release", "tailscale_running")
    if all(before.get(name) == after.get(name) for name in versions):
        return "left as it was"
    return "done"


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"version_summary": summary}
