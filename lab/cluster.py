"""The cluster on the lab's nodes, once they have booted."""

from __future__ import annotations

import os
import time

from . import machines
from .k3s import HOME, server, unit
from .layout import Lab, LabError, Plan

START_LIMIT = 180


def start(lab: Lab, plan: Plan, nodes: tuple[str, ...]) -> None:
    """The server first; then all agents at once."""
    for node in sorted(nodes, key=lambda name: name != server(plan)):
        name = unit(plan, node)
        machines.inside(lab, node, "systemctl", "enable", "--quiet", name)
        block = ("--no-block",) if name == "k3s-agent" else ()
        machines.inside(lab, node, "systemctl", "start", *block, name, timeout=START_LIMIT)
        if name == "k3s":
            _keep_kubeconfig(lab, plan)
    for node in nodes:
        _wait_for_node(lab, plan, node)


def _keep_kubeconfig(lab: Lab, plan: Plan) -> None:
    """For use on this machine: with the server's own address in the place of its loopback."""
    done = machines.inside(lab, server(plan), "cat", "/etc/rancher/k3s/k3s.yaml")
    assert done is not None
    text = done.stdout.replace("https://127.0.0.1:", f"https://{plan.address(server(plan))}:")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with os.fdopen(os.open(lab.kubeconfig, flags, 0o600), "w") as out:
        out.write(text)


def _wait_for_node(lab: Lab, plan: Plan, node: str) -> None:
    """Until it is registered; Ready it cannot be yet."""
    deadline = time.monotonic() + START_LIMIT
    question = (f"{HOME}/bin/kubectl", "get", "node", node, "-o", "name")
    while True:
        done = machines.inside(lab, server(plan), *question, check=False)
        if done is not None and done.returncode == 0:
            return
        if time.monotonic() > deadline:
            raise LabError(
                f"{node} did not join the cluster within {START_LIMIT} s: "
                f"`make shell NODE={node}`, then `journalctl -u {unit(plan, node)}`"
            )
        time.sleep(0.5)
