"""headcni-daemon on a node of k3s, as systemd runs it, hardened: it watches and mends its pods.

The lab's nodes are not joined to a tailnet here, so it is not ready; that keeps it from nothing.
"""

from __future__ import annotations

import json
import re

import pytest
from k8s_cluster import until

NODE = "node2"
KUBELET = "/var/lib/rancher/k3s/agent/kubelet.kubeconfig"


@pytest.fixture(scope="module")
def daemon(cluster):
    cidr = cluster.get("node", NODE)["spec"]["podCIDR"]
    config = (
        f"daemon:\n  kubeconfig: {KUBELET}\n  reconcileInterval: 10s\n"
        f"network:\n  podCIDR:\n    nodeLocal: {cidr}\n    base: 10.42.0.0/16\n"
    )
    cluster.write(NODE, "/etc/headcni/config.yaml", config.encode())
    cluster.on(
        NODE,
        "cp /opt/headcni/current/units/headcni-daemon.service /etc/systemd/system/"
        " && systemctl daemon-reload && systemctl start headcni-daemon",
    )
    yield cluster
    cluster.on(NODE, "systemctl stop headcni-daemon; rm /etc/systemd/system/headcni-daemon.service")


def measured(cluster, name: str) -> float:
    text = cluster.on(NODE, "curl -fsS http://127.0.0.1:9001/metrics")
    return sum(float(n) for n in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def events(cluster, name: str) -> list[str]:
    told = cluster.on(NODE, "/opt/headcni/current/bin/headcnictl events --json")
    lines = [json.loads(line) for line in told.splitlines()]
    return [line["type"] for line in lines if line.get("pod") == name]


def test_the_pods_condition_holds_with_the_kubelets_own_credentials(daemon):
    until(
        lambda: "pods: ok" in daemon.on(NODE, "curl -sS http://127.0.0.1:9001/ready", check=False)
    )


def test_a_pod_is_added_mended_and_deleted_by_the_daemon(daemon):
    pod = daemon.run_pod("served", NODE)
    address = pod["status"]["podIP"]
    until(lambda: measured(daemon, "headcni_pods") >= 1)
    daemon.on(NODE, f"ip link del {daemon.attachments(NODE)['served']}")
    until(lambda: "pod-repaired" in events(daemon, "served"))
    daemon.on(NODE, f"ping -c 1 -W 2 {address} >/dev/null")
    assert measured(daemon, "headcni_reconcile_changes_total") >= 1
    daemon.delete_pod("served")
    until(lambda: "served" not in daemon.attachments(NODE))
    assert events(daemon, "served") == ["pod-added", "pod-repaired", "pod-deleted"]
    assert measured(daemon, "headcni_kubernetes_request_duration_seconds_count") >= 2
