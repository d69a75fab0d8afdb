"""headcni-daemon on nodes of a cluster, as site.yml set it up: it watches and mends its pods."""

from __future__ import annotations

import json
import re

from k8s_cluster import NODES, until

NODE = "node2"


def measured(cluster, name: str) -> float:
    text = cluster.on(NODE, "curl -fsS http://127.0.0.1:9001/metrics")
    return sum(float(n) for n in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def events(cluster, name: str) -> list[str]:
    told = cluster.on(NODE, "headcnictl events --json")
    lines = [json.loads(line) for line in told.splitlines()]
    return [line["type"] for line in lines if line.get("pod") == name]


def test_its_identity_is_a_service_account_and_its_kubeconfig_is_roots_alone(cluster):
    for node in NODES:
        assert cluster.on(node, "stat -c '%a %U' /etc/headcni/kubeconfig").split() == [
            "600",
            "root",
        ]
        who = "kubectl --kubeconfig /etc/headcni/kubeconfig auth whoami -o json"
        said = json.loads(cluster.on(node, who))["status"]["userInfo"]
        assert said["username"] == "system:serviceaccount:kube-system:headcni-node"
        assert "system:masters" not in said["groups"]


def test_with_it_the_pods_condition_holds(cluster):
    for node in NODES:
        until(
            lambda: (
                "pods: ok" in cluster.on(node, "curl -sS http://127.0.0.1:9001/ready", check=False)  # noqa: B023
            )
        )


def test_a_pod_is_added_mended_and_deleted_by_the_daemon(cluster):
    pod = cluster.run_pod("served", NODE)
    address = pod["status"]["podIP"]
    until(lambda: measured(cluster, "headcni_pods") >= 1)
    cluster.on(NODE, f"ip link del {cluster.attachments(NODE)['served']}")
    until(lambda: "pod-repaired" in events(cluster, "served"))
    cluster.on(NODE, f"ping -c 1 -W 2 {address} >/dev/null")
    assert measured(cluster, "headcni_reconcile_changes_total") >= 1
    cluster.delete_pod("served")
    until(lambda: "served" not in cluster.attachments(NODE))
    assert events(cluster, "served") == ["pod-added", "pod-repaired", "pod-deleted"]
    assert measured(cluster, "headcni_kubernetes_request_duration_seconds_count") >= 2
