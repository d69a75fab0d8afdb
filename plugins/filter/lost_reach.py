# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a pod reached before a change, and does not reach after it."""

from __future__ import annotations

DOCUMENTATION = r"""
name: lost_reach
short_description: Find what a pod no longer reaches after a change
version_added: 0.1.0
description:
  - Compares two results of M(headcni.mesh.headcni_probe). A target that was not reached before,
    such as a node that is down, does not count as lost.
author:
  - The HeadCNI authors (@headcni)
options:
  _input:
    description: RV(headcni.mesh.headcni_probe#module:reached) before the change.
    type: dict
    required: true
  after:
    description: The same after the change.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Check that the pod still reaches everything
  ansible.builtin.assert:
    that: before.reached | headcni.mesh.lost_reach(now.reached) == []
"""

RETURN = r"""
_value:
  description: A sentence for each loss.
  type: list
  elements: str
"""

from collections.abc import Mapping
from typing import Any

PINGS = ("v4", "v6", "mtu4", "mtu6")


def lost(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    found = []
    for target, checks in before.items():
        for check in PINGS:
            if not (checks.get(check) or {}).get("ok"):
                continue
            now = (after.get(target) or {}).get(check) or {"ok": False, "detail": "not asked"}
            if not now["ok"]:
                found.append(f"{target} was reached before, and is not now: {now['detail']}")
    return found


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"lost_reach": lost}
