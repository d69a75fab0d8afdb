"""A lab with k3s on it, and what tests ask of it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from lab_command import LabCommand

from lab import tools
from lab.images import BUSYBOX
from lab.layout import Lab

NODES = ("node1", "node2")


def until(wanted: Callable[[], Any], seconds: float = 90.0, what: str = "it") -> Any:
    deadline = time.monotonic() + seconds
    while True:
        found = wanted()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not come true within {seconds:.0f} s"
        time.sleep(0.3)


@dataclass(frozen=True)
class Cluster(LabCommand):
    """The lab with k3s, and kubectl."""

    def kubectl(self, *words: str, check: bool = True, stdin: str = "") -> str:
        env = {**os.environ, "KUBECONFIG": str(Lab.named(self.name).kubeconfig), "HOME": "/"}
        done = subprocess.run(
            [tools.K3S.bin / "kubectl", *words],
            env=env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if check and done.returncode != 0:
            pytest.fail(f"kubectl {' '.join(words)} → {done.returncode}\n{done.stderr}")
        return done.stdout

    def get(self, *words: str) -> Any:
        """An object as it is, or nothing."""
        said = self.kubectl("get", *words, "-o", "json", "--ignore-not-found")
        return json.loads(said) if said.strip() else None

    def is_ready(self, node: str) -> bool:
        conditions = self.get("node", node)["status"]["conditions"]
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def run_pod(self, name: str, node: str, **spec: Any) -> dict[str, Any]:
        """Start a pod that sleeps, and wait until it runs and has an address."""
        container = {"name": "c", "image": BUSYBOX, "imagePullPolicy": "Never"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {
                "nodeName": node,
                "terminationGracePeriodSeconds": 0,
                "containers": [{**container, **spec.pop("container", {})}],
                **spec,
            },
        }
        self.kubectl("apply", "-f", "-", stdin=json.dumps(pod))

        def running() -> Any:
            found = self.get("pod", name)
            return found if found["status"].get("podIP") and _is_up(found) else None

        return until(running, what=f"pod {name}")

    def delete_pod(self, name: str, *how: str) -> None:
        self.kubectl("delete", "pod", name, "--ignore-not-found", "--wait=true", *how)

    def attachments(self, node: str) -> dict[str, str]:
        """What the node's store knows: pod → host interface."""
        program = (
            "import sqlite3; db = sqlite3.connect('/var/lib/cni/headcni/headcni.db');"
            "[print(*row) for row in db.execute('select pod_name, host_ifname from attachment')]"
        )
        return dict(line.split() for line in self.on(node, f'python3 -c "{program}"').splitlines())


def _is_up(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") == "Running"
