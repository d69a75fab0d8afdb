# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Check the names of the variables that an inventory sets."""

from __future__ import annotations

DOCUMENTATION = r"""
name: variable_names
short_description: Find old, contradictory and ineffective variables
version_added: 0.2.0
description:
  - Warns about variables that have been renamed. The old names work for one more release.
  - Finds nodes with two different modes, modes that do not exist, and a C(headcni_hosts)
    that has no effect.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
options:
  groups:
    description: The groups of the inventory, C(groups).
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Show the problems
  ansible.builtin.debug:
    msg: "{{ (ansible_play_hosts_all | headcni.mesh.variable_names(hostvars, groups)).problems }}"
"""

RETURN = r"""
_value:
  description: C(problems), which stop a run, and C(former), the old names that are in use.
  type: dict
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.utils.display import Display
from ansible_collections.headcni.mesh.plugins.filter.mesh_hosts import matched
from ansible_collections.headcni.mesh.plugins.module_utils.shared.modes import MODES
from ansible_collections.headcni.mesh.plugins.plugin_utils.former_names import FORMER

MOST = 8  # names to show; a mistake in a group's variables concerns all of its hosts


def variable_names(
    hosts: Sequence[str], hostvars: Mapping[str, Any], groups: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    problems: dict[str, list[str]] = {}
    former: dict[str, list[str]] = {}
    for host in hosts:
        known = hostvars.get(host, {})
        for name in FORMER:
            if name in known:
                former.setdefault(name, []).append(host)
        for problem in _of_mode(known):
            problems.setdefault(problem, []).append(host)
    for name, users in former.items():
        Display().deprecated(
            f"{name} (set for {_short(users)}) is now {FORMER[name]}",
            version="0.3.0",
            collection_name="headcni.mesh",
        )
    wrong = [f"{_short(who)}: {problem}" for problem, who in problems.items()]
    return {"problems": wrong + _of_pattern(hosts, hostvars, groups), "former": sorted(former)}


def _of_mode(known: Mapping[str, Any]) -> list[str]:
    given = {
        name: str(known[name]) for name in ("headcni_mode", "headcni_node_mode") if name in known
    }
    wrong = [
        f"{name}: {mode}, expected {' or '.join(MODES)}"
        for name, mode in given.items()
        if mode not in MODES
    ]
    if len(set(given.values())) > 1:
        wrong.append(
            f"headcni_mode is {given['headcni_mode']}, and its former name headcni_node_mode is "
            f"{given['headcni_node_mode']}: remove headcni_node_mode"
        )
    return wrong


def _of_pattern(
    hosts: Sequence[str], hostvars: Mapping[str, Any], groups: Mapping[str, Sequence[str]]
) -> list[str]:
    """In an inventory `headcni_hosts` comes too late: Ansible has already chosen the hosts."""
    pattern = hostvars.get(hosts[0], {}).get("headcni_hosts") if hosts else None
    if not pattern or set(hosts) <= set(matched(groups, str(pattern))):
        return []
    return [
        f"headcni_hosts: {pattern}, in the inventory, has no effect: say "
        f"-e headcni_hosts={pattern}, or put the nodes into a group 'headcni'"
    ]


def _short(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST])
    return f"{shown} and {len(names) - MOST} more" if len(names) > MOST else shown


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"variable_names": variable_names}
