"""What Ansible is told about the lab."""

from __future__ import annotations

from typing import Any

from . import k3s
from .layout import CONTROL, Lab, Plan


def data(lab: Lab, plan: Plan) -> dict[str, Any]:
    hostvars = {
        m: {"ansible_host": str(plan.address(m)), "lab_number": plan.number(m)}
        for m in plan.machines
    }
    virtual = {"vm": {"hosts": list(plan.vms)}} if plan.vms else {}
    return {
        "_meta": {"hostvars": hostvars},
        **_nodes(plan),
        **virtual,
        "all": {"children": ["headcni", "headscale"]},
        "headscale": {"hosts": [CONTROL]},
        "lab": {
            "children": ["headcni", "headscale"],
            "vars": {
                "lab_dir": str(lab.dir),
                "lab_headscale_url": plan.headscale_url,
                "lab_mirror_url": plan.mirror_url,
                "lab_tailscale_version": plan.tailscale_version,
                "lab_underlay": str(plan.underlay),
            },
        },
    }


def _nodes(plan: Plan) -> dict[str, Any]:
    """The groups of inventories/k3s, where there is a cluster."""
    if not plan.k3s:
        return {"headcni": {"hosts": list(plan.members)}}
    return {
        "headcni": {"children": ["k3s"], "hosts": list(plan.vms)},
        "k3s": {"children": ["k3s_server", "k3s_agent"]},
        "k3s_server": {"hosts": [k3s.server(plan)]},
        "k3s_agent": {"hosts": [node for node in plan.nodes if node != k3s.server(plan)]},
    }
