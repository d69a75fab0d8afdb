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


def test_a_namespaces_annotation_limits_what_its_pods_reach_of_the_tailnet(cluster):
    """The kubelet of the other node, by its tailnet address, is a server that every node has."""
    cluster.run_pod("limited", NODE)
    address = cluster.on("node1", "tailscale ip -4").strip()

    def status() -> str:
        return cluster.on(NODE, "headcnictl status", check=False)

    def reaches() -> bool:
        said = cluster.exec("limited", f"nc -z -w 3 {address} 10250 && echo yes", check=False)
        return "yes" in said

    assert "cannot be watched" not in status()
    assert reaches()
    cluster.kubectl("annotate", "namespace", "default", "headcni.dev/tailnet-access=pods")
    try:
        until(lambda: "namespace default: pods" in status())
        assert not reaches()
        cluster.on(NODE, "systemctl restart headcni-daemon")
        assert not reaches()
        opened = f"headcni.dev/tailnet-access={address}:10250"
        cluster.kubectl("annotate", "--overwrite", "namespace", "default", opened)
        until(reaches)
    finally:
        cluster.kubectl("annotate", "namespace", "default", "headcni.dev/tailnet-access-")
    until(lambda: "namespace default" not in status())
    assert reaches()
    cluster.delete_pod("limited")
