"""What Ansible is told about the lab."""

from __future__ import annotations

from typing import Any

from .layout import CONTROL, Lab, Plan


def data(lab: Lab, plan: Plan) -> dict[str, Any]:
    hostvars = {
        m: {"ansible_host": str(plan.address(m)), "lab_number": plan.number(m)}
        for m in plan.machines
    }
    cluster = {"k3s": {"hosts": list(plan.nodes)}} if plan.k3s else {}
    virtual = {"vm": {"hosts": list(plan.vms)}} if plan.vms else {}
    return {
        "_meta": {"hostvars": hostvars},
        **cluster,
        **virtual,
        "all": {"children": ["headcni", "headscale"]},
        "headcni": {"hosts": list(plan.members)},
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
