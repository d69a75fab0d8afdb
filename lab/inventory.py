"""What Ansible is told about the lab."""

from __future__ import annotations

from typing import Any

from . import kubeadm, tools
from .layout import CONTROL, Lab, Plan

GROUPS = {
    "k3s": ("k3s_server", "k3s_agent"),
    "kubeadm": ("kubeadm_control_plane", "kubeadm_worker"),
}


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
                "lab_tailscale_checksums": _checksums(),
                "lab_tailscale_version": plan.tailscale_version,
                "lab_underlay": str(plan.underlay),
                **_ranges(plan),
            },
        },
    }


def _ranges(plan: Plan) -> dict[str, Any]:
    if not plan.kubeadm:
        return {}
    pods, services = kubeadm.ranges(plan)
    return {"lab_pod_ranges": pods, "lab_service_ranges": services}


def _checksums() -> dict[str, str]:
    """The SHA-256 of the mirror's tarballs, by their names."""
    files = (tools.TAILSCALE.home / "mirror" / "stable").glob("*.tgz.sha256")
    return {file.stem: file.read_text().strip() for file in files}


def _nodes(plan: Plan) -> dict[str, Any]:
    """The groups of inventories/k3s and inventories/kubeadm, where there is a cluster."""
    if not plan.cluster:
        return {"headcni": {"hosts": list(plan.members)}}
    first, others = GROUPS[plan.cluster]
    return {
        "headcni": {"children": [plan.cluster], "hosts": list(plan.vms)},
        plan.cluster: {"children": [first, others]},
        first: {"hosts": [plan.server]},
        others: {"hosts": [node for node in plan.nodes if node != plan.server]},
    }
