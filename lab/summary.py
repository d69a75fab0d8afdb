"""The table that `make up` ends with: what the lab's machines say of themselves."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, Optional

from . import machines
from .layout import CONTROL, Lab, Plan

NEXT = (
    "Go on with:\n"
    "    make shell NODE=node1                     log in\n"
    "    ansible -i inventories/lab all -m ping    use it with Ansible\n"
    "    make status | make test | make down"
)
HEADER = ("node", "underlay", "state", "tailnet address", "mode", "pod CIDR", "approved", "memory")


def table(lab: Lab, plan: Plan) -> str:
    registered = _headscale_nodes(lab, plan)
    memory = machines.memory(lab, plan.machines)
    rows = [HEADER]
    for machine in plan.machines:
        known = registered.get(machine, {})
        running = machines.running(lab, machine)
        approved = known.get("subnetRoutes") or known.get("approvedRoutes") or []
        rows.append(
            (
                machine,
                str(plan.address(machine)),
                "running" if running else "stopped",
                (known.get("ipAddresses") or ["–"])[0],
                _mode(lab, machine) if running and machine != CONTROL else "–",
                ", ".join(known.get("availableRoutes") or []) or "–",
                "yes" if approved else "–",
                f"{memory[machine] / 2**20:.0f} MiB" if memory[machine] else "–",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join(
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows
    )


def _mode(lab: Lab, machine: str) -> str:
    """What the node's own daemon says."""
    said = machines.inside(lab, machine, "headcnictl", "status", "--json", check=False)
    try:
        return str(json.loads(said.stdout)["mode"]) if said else "–"
    except (ValueError, KeyError):  # no daemon, or none that answers
        return "–"


def _headscale_nodes(lab: Lab, plan: Plan) -> dict[str, dict[str, Any]]:
    """By name; nothing if Headscale is away, for a status must show just that."""
    answer = _get(f"{plan.headscale_url}/api/v1/node", lab.api_key.read_text().strip())
    return {node["givenName"]: node for node in (answer or {}).get("nodes", [])}


def _get(url: str, key: str) -> Optional[dict[str, Any]]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (urllib.error.URLError, OSError, ValueError):
        return None
