# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the pods of all nodes reached, as a table to be read."""

from __future__ import annotations

DOCUMENTATION = r"""
name: probe_matrix
short_description: A table of what pods reached
version_added: 0.1.0
description:
  - Makes a table of the results of M(headcni.mesh.headcni_probe), a row for each node and a column
    for each node, and below it what is wrong, line by line.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
options:
  hostvars:
    description:
      - Everyone's variables. C(headcni_probed) is what the probe of a node found, and
        C(headcni_probe_problem) why there was none.
"""

EXAMPLES = r"""
- name: Show it
  ansible.builtin.debug:
    msg: "{{ (ansible_play_hosts_all | headcni.mesh.probe_matrix(hostvars)).lines }}"
"""

RETURN = r"""
_value:
  description: C(lines) to be shown, and C(failed), how many checks or nodes are red.
  type: dict
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.headcni.mesh.plugins.plugin_utils.table import table

CHECKS = ("v4", "v6", "mtu4", "mtu6", "port", "route", "dns")


def of_hosts(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for host in hosts:
        known = hostvars.get(host, {})
        results = (known.get("headcni_probed") or {}).get("reached")
        problem = known.get("headcni_probe_problem") or "it cannot be reached"
        found[host] = {"problem": problem} if results is None else {"results": results}
    return matrix(found)


def matrix(found: Mapping[str, Any]) -> dict[str, Any]:
    names = list(found)
    bad = list(_bad(found))
    rows = [["from \\ to", *names]]
    rows += [[name, *(_cell(found, name, other) for other in names)] for name in names]
    lines = [*table(rows), "", f"checked from each pod: {', '.join(_asked(found)) or 'nothing'}"]
    lines += [f"not checked: {text}" for text in _skipped(found)]
    lines += bad or ["every pod reaches every other"] if len(names) > 1 else bad
    return {"lines": lines, "failed": len(bad)}


def _cell(found: Mapping[str, Any], name: str, other: str) -> str:
    if name == other:
        return "NONE" if found[name].get("problem") else "-"
    checks = (found[name].get("results") or {}).get(other)
    if checks is None:
        return "NONE"
    wrong = [check for check in CHECKS if checks.get(check, {}).get("ok") is False]
    if wrong:
        return f"FAIL {' '.join(wrong)}"
    ping = checks.get("v4") or checks.get("v6") or {}
    return f"ok {ping.get('detail', '')}".strip()


def _every(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    for name, one in found.items():
        for other, checks in (one.get("results") or {}).items():
            for check in CHECKS:
                if check in checks:
                    yield name, other, check, checks[check]


def _bad(found: Mapping[str, Any]) -> Iterator[str]:
    for name, one in found.items():
        if one.get("problem"):
            yield f"{name}: {one['problem']}"
    for name, other, check, result in _every(found):
        if result["ok"] is False:
            yield f"{name} -> {other}: {check}: {result['detail']}"


def _asked(found: Mapping[str, Any]) -> list[str]:
    seen = {check for _unused, _unused, check, result in _every(found) if result["ok"] is not None}
    return [check for check in CHECKS if check in seen]


def _skipped(found: Mapping[str, Any]) -> list[str]:
    seen = {
        f"{c}: {r['detail']}": None for _unused, _unused, c, r in _every(found) if r["ok"] is None
    }
    return list(seen)


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"probe_matrix": of_hosts}
