"""A lab with a cluster on it, by k3s or by kubeadm, and what tests ask of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import patience
import pytest
from lab_command import LabCommand
from leftovers import assert_nothing_left
from site_run import Site

from lab import kubeadm, tools
from lab.images import BUSYBOX
from lab.layout import Lab

NODES = ("node1", "node2")
PORT = 8080
LOOKS_OFTEN = {"daemon": {"reconcileInterval": "10s"}}
SERVE = f"mkdir -p /www; hostname > /www/index.html; exec httpd -f -p {PORT} -h /www"


def until(wanted: Callable[[], Any], seconds: float = 90.0, what: str = "the condition") -> Any:
    """With the patience that a cluster needs."""
    return patience.until(wanted, seconds, what, every=0.3)


@dataclass(frozen=True)
class Kind:
    """What differs from one kind of cluster to another."""

    name: str
    pods_range: str
    units: tuple[str, str]  # what runs pods, on each of NODES
    crictl: str  # kubectl needs the API server; a node's own containerd does not
    stop_api_server: str  # on node1
    start_api_server: str


MANIFEST = "kube-apiserver.yaml"
KINDS = {
    one.name: one
    for one in (
        Kind(
            "k3s",
            "10.42.0.0/16",
            ("k3s", "k3s-agent"),
            "/opt/lab/k3s/bin/crictl -r unix:///run/k3s/containerd/containerd.sock",
            "systemctl stop k3s",
            "systemctl start k3s",
        ),
        Kind(
            "kubeadm",
            kubeadm.POD_SUBNET,
            ("kubelet", "kubelet"),
            "/opt/lab/cri/crictl",
            f"mv /etc/kubernetes/manifests/{MANIFEST} /root",
            f"mv /root/{MANIFEST} /etc/kubernetes/manifests",
        ),
    )
}


@dataclass(frozen=True)
class Cluster(LabCommand):
    """The lab with its cluster, and kubectl."""

    kind: Kind = KINDS["k3s"]

    def kubectl(self, *words: str, check: bool = True, stdin: str = "") -> str:
        env = {**os.environ, "KUBECONFIG": str(Lab.named(self.name).kubeconfig), "HOME": "/"}
        done = subprocess.run(
            [tools.CLUSTERS[self.kind.name][0].bin / "kubectl", *words],
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
        return Site(self, {"headcni_node_extra_config": LOOKS_OFTEN, **given})

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

    def ready_conditions(self) -> dict[str, Any]:
        """How Ready each node says it is, and why."""
        found = {}
        for node in NODES:
            conditions = self.get("node", node)["status"]["conditions"]
            (found[node],) = [one for one in conditions if one["type"] == "Ready"]
        return found

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

    def everyone_reaches_everyone(self, pods: dict[str, dict[str, Any]]) -> None:
        """Each of the pods, which serve, gets the name of each by its address, its own too."""
        for source in pods:
            for target, pod in pods.items():
                assert self.http(source, pod["status"]["podIP"]) == target, (source, target)

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


def reached(ask: Callable[[], str], wanted: set[str], tries: int = 40) -> None:
    """Every try is answered, and in the end each of the servers has answered."""
    seen = set()
    for _ in range(tries):
        seen.add(ask())
        if seen == wanted:
            return
    raise AssertionError(f"{seen} answered, not {wanted}")


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
def made(name: str, *options: str, kind: str = "k3s") -> Iterator[Cluster]:
    """A lab with a cluster on it, for as long as it is needed; nothing of it is left."""
    if absent := tools.missing(tools.CLUSTERS[kind]):
        names = " ".join(tool.name for tool in absent)
        pytest.skip(f"{names}: not built; `python3 -m lab tools {names}`, some 15 minutes")
    cluster = Cluster(name, kind=KINDS[kind])
    cluster("down")
    before = cluster.listing()
    cluster("up", "--nodes", str(len(NODES)), f"--{kind}", *options)
    try:
        yield cluster
    finally:
        cluster("down")
    assert_nothing_left(before, cluster.listing())
