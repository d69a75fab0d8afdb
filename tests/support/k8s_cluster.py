"""A lab with k3s on it, and what tests ask of it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from lab_command import LabCommand
from leftovers import assert_nothing_left
from site_run import Site

from lab import tools
from lab.images import BUSYBOX
from lab.layout import Lab

NODES = ("node1", "node2")
PORT = 8080
SERVE = f"mkdir -p /www; hostname > /www/index.html; exec httpd -f -p {PORT} -h /www"


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

    def site(self, **given: Any) -> Site:
        """site.yml and its neighbours, with a daemon that looks more often than it need."""
        return Site(self, {"headcni_node_reconcile_interval": "10s", **given})

    def get(self, *words: str) -> Any:
        """An object as it is, or nothing."""
        said = self.kubectl("get", *words, "-o", "json", "--ignore-not-found")
        return json.loads(said) if said.strip() else None

    def all(self, *words: str) -> list[dict[str, Any]]:
        """Every object that there is, and none if there is none."""
        found = self.get(*words)
        return found["items"] if found else []

    def apply(self, *objects: dict[str, Any]) -> None:
        made = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(made))

    def is_ready(self, node: str) -> bool:
        conditions = self.get("node", node)["status"]["conditions"]
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def until_ready(self, seconds: float = 120) -> None:
        for node in NODES:
            until(lambda: self.is_ready(node), seconds, f"{node} Ready")  # noqa: B023

    def run_pod(self, name: str, node: str, **spec: Any) -> dict[str, Any]:
        """Start a pod that sleeps, and wait until it runs, is ready and has an address."""
        self.apply(pod(name, node, **spec))

        def running() -> Any:
            found = self.get("pod", name)
            return found if found["status"].get("podIP") and is_ready(found) else None

        return until(running, what=f"pod {name}")

    def delete_pod(self, name: str, *how: str) -> None:
        self.kubectl("delete", "pod", name, "--ignore-not-found", "--wait=true", *how)

    def pods(self, app: str) -> list[dict[str, Any]]:
        """Those with the label that are not on their way out."""
        found = self.all("pods", "-l", f"app={app}")
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]

    def until_pods(self, app: str, count: int, seconds: float = 180) -> list[dict[str, Any]]:
        """Until there are just so many, all ready."""

        def all_ready() -> bool:
            found = self.pods(app)
            return len(found) == count and all(map(is_ready, found))

        until(all_ready, seconds, f"{count} pods of {app} ready")
        return self.pods(app)

    def exec(self, name: str, command: str, check: bool = True) -> str:
        return self.kubectl("exec", name, "--", "sh", "-c", command, check=check)

    def http(self, name: str, address: str, port: int = PORT) -> str:
        """What a pod gets from a server, its last line; nothing if there is no answer."""
        said = self.exec(name, f"{get(address, port)}", check=False).strip()
        return said.splitlines()[-1] if "200 OK" in said else ""

    def attachments(self, node: str) -> dict[str, str]:
        """What the node's store knows: pod → host interface."""
        rows = self._store(node, "select pod_name, host_ifname from attachment")
        return dict(row.split() for row in rows)

    def addresses(self, node: str) -> list[str]:
        """Those that are taken, with the pod that has each."""
        return self._store(node, "select hex(address), pod from allocation")

    def _store(self, node: str, query: str) -> list[str]:
        program = (
            "import sqlite3; db = sqlite3.connect('/var/lib/cni/headcni/headcni.db');"
            f"[print(*row) for row in db.execute('{query}')]"
        )
        return self.on(node, f'python3 -c "{program}"').splitlines()


def get(address: str, port: int) -> str:
    """In the shell of a pod: GET / and print the answer. busybox' wget crashes."""
    return f"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 3 {address} {port}"


def pod(name: str, node: str = "", **spec: Any) -> dict[str, Any]:
    container = {"name": "c", "image": BUSYBOX, "imagePullPolicy": "Never"}
    where = {"nodeName": node} if node else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            **where,
            "terminationGracePeriodSeconds": 0,
            "containers": [{**container, **spec.pop("container", {})}],
            **spec,
        },
    }


def serving(**more: Any) -> dict[str, Any]:
    """A container that answers with its pod's name, and is ready when it does."""
    return {
        "command": ["sh", "-c", SERVE],
        "readinessProbe": {"httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1},
        **more,
    }


def deployment(name: str, replicas: int, kind: str = "Deployment", **spec: Any) -> dict[str, Any]:
    made = pod(name, **spec)
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": name}},
    }
    template = {
        "metadata": {"labels": {"app": name}},
        "spec": {**made["spec"], "topologySpreadConstraints": [spread]},
    }
    extra = {"serviceName": name} if kind == "StatefulSet" else {}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": template,
            **extra,
        },
    }


def service(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": PORT}], **spec},
    }


def is_ready(found: dict[str, Any]) -> bool:
    conditions = found["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


@contextmanager
def made(name: str, *options: str) -> Iterator[Cluster]:
    """A lab with k3s on it, for as long as it is needed; nothing of it is left."""
    if tools.missing(tools.CLUSTER):
        pytest.skip("k3s is not built: `python3 -m lab tools k3s coredns`, some 15 minutes")
    cluster = Cluster(name)
    cluster("down")
    before = cluster.listing()
    cluster("up", "--nodes", str(len(NODES)), "--k3s", *options)
    try:
        yield cluster
    finally:
        cluster("down")
    assert_nothing_left(before, cluster.listing())
