"""The cluster on the lab's nodes: what they boot with of it, and how it starts once they have."""

from __future__ import annotations

import os
import time

from . import image, k3s, kubeadm, machines, tools
from .layout import CONTROL, Lab, LabError, Plan

START_LIMIT = 180
# On the server: kubectl, and the administrator's kubeconfig.
KUBECTL = {"k3s": "/usr/local/bin/kubectl", "kubeadm": "/usr/bin/kubectl"}
ADMIN = {"k3s": "/etc/rancher/k3s/k3s.yaml", "kubeadm": "/etc/kubernetes/admin.conf"}


def version(plan: Plan) -> str:
    known = tools.k3s_version() if plan.k3s else tools.kubernetes_version()
    return f"{plan.cluster} {known}"


def files(lab: Lab, plan: Plan, machine: str) -> dict[str, bytes]:
    """What a machine's own layer has of the cluster; nothing where there is none."""
    if machine == CONTROL or not plan.cluster:
        return {}
    tool, dns = tools.CLUSTERS[plan.cluster]
    if plan.k3s:
        return k3s.files(lab, plan, machine, tool.home, dns.bin, image.base_root())
    return kubeadm.files(
        plan, machine, tools.kubernetes_version(), tool.bin, dns.bin, image.base_root()
    )


def start(lab: Lab, plan: Plan, nodes: tuple[str, ...]) -> None:
    """The server first; then the others."""
    (_start_k3s if plan.k3s else _start_kubeadm)(lab, plan, nodes)
    for node in nodes:
        _wait_for_node(lab, plan, node)


def _start_k3s(lab: Lab, plan: Plan, nodes: tuple[str, ...]) -> None:
    for node in sorted(nodes, key=lambda name: name != plan.server):
        name = k3s.unit(plan, node)
        machines.inside(lab, node, "systemctl", "enable", "--quiet", name)
        block = ("--no-block",) if node != plan.server else ()
        machines.inside(lab, node, "systemctl", "start", *block, name, timeout=START_LIMIT)
        if node == plan.server:
            _keep_kubeconfig(lab, plan)


def _start_kubeadm(lab: Lab, plan: Plan, nodes: tuple[str, ...]) -> None:
    for node in nodes:
        machines.inside(lab, node, "systemctl", "enable", "--quiet", "--now", "containerd")
        machines.inside(lab, node, "systemctl", "enable", "--quiet", "kubelet")
        load = f"for file in /{kubeadm.IMAGES}/*; do ctr -n k8s.io images import $file; done"
        machines.inside(lab, node, "sh", "-ec", load, timeout=START_LIMIT)
    if plan.server in nodes:
        machines.inside(lab, plan.server, *kubeadm.INIT, timeout=START_LIMIT)
        machines.inside(lab, plan.server, "sh", "-ec", kubeadm.AFTER_INIT)
        _keep_kubeconfig(lab, plan)
    how = machines.inside(lab, plan.server, *kubeadm.HOW_TO_JOIN)
    assert how is not None
    for node in nodes:
        if node != plan.server:
            join = (*how.stdout.split(), *kubeadm.PASS_OVER)
            machines.inside(lab, node, *join, timeout=START_LIMIT)


def _keep_kubeconfig(lab: Lab, plan: Plan) -> None:
    """For use on this machine: with the server's own address in the place of its loopback."""
    done = machines.inside(lab, plan.server, "cat", ADMIN[plan.cluster])
    assert done is not None
    text = done.stdout.replace("https://127.0.0.1:", f"https://{plan.address(plan.server)}:")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(os.open(lab.kubeconfig, flags, 0o600), "w") as out:
        out.write(text)


def _wait_for_node(lab: Lab, plan: Plan, node: str) -> None:
    """Until it is registered; Ready it cannot be yet."""
    deadline = time.monotonic() + START_LIMIT
    admin = f"--kubeconfig={ADMIN[plan.cluster]}"
    question = (KUBECTL[plan.cluster], admin, "get", "node", node, "-o", "name")
    while True:
        done = machines.inside(lab, plan.server, *question, check=False)
        if done is not None and done.returncode == 0:
            return
        if time.monotonic() > deadline:
            unit = k3s.unit(plan, node) if plan.k3s else "kubelet"
            raise LabError(
                f"{node} did not join the cluster within {START_LIMIT} s: "
                f"`make shell NODE={node}`, then `journalctl -u {unit}`"
            )
        time.sleep(0.5)
