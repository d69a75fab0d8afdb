"""headcni-daemon on nodes of a cluster, as site.yml set it up: it watches and mends its pods."""

from __future__ import annotations

import json
import re

from k8s_cluster import NODES, until

from headcni.shared import bearer_token

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
        assert said["username"] == f"system:serviceaccount:kube-system:headcni-node-{node}"
        assert "system:masters" not in said["groups"]


def token_of(cluster, node: str) -> bearer_token.BearerToken:
    assert cluster.on(node, f"stat -c %a {bearer_token.FILE}").strip() == "600"
    found = bearer_token.read(cluster.on(node, f"cat {bearer_token.FILE}").strip())
    assert found is not None
    return found


def test_its_token_expires_and_may_renew_itself_and_nothing_else(cluster):
    kubectl = "kubectl --kubeconfig /etc/headcni/kubeconfig -n kube-system"
    for node, other in (NODES, NODES[::-1]):
        token = token_of(cluster, node)
        assert token.account == f"headcni-node-{node}" and token.lifetime == 90 * 86400
        mine = cluster.on(node, f"{kubectl} create token headcni-node-{node} --duration 1h")
        assert bearer_token.read(mine.strip()).account == f"headcni-node-{node}"
        for refused in (f"create token headcni-node-{other}", "get secrets", "delete pod none"):
            said = cluster.on(node, f"{kubectl} {refused} 2>&1", check=False)
            assert "Forbidden" in said, (refused, said)
    secrets = cluster.kubectl("get", "secrets", "-A", "-o", "name")
    assert "headcni" not in secrets


def test_the_daemon_renews_its_token_by_itself(cluster):
    """A token of ten minutes is due after three and a third; one that is older is due at once."""
    first = cluster.kubectl(
        "create", "token", f"headcni-node-{NODE}", "-n", "kube-system", "--duration=10m"
    )
    cluster.write(NODE, "/root/short-token", first.strip().encode())
    cluster.on(NODE, f"cp --no-preserve=mode /root/short-token {bearer_token.FILE}")
    cluster.on(NODE, f"chmod 600 {bearer_token.FILE}; rm /root/short-token")
    until(lambda: token_of(cluster, NODE).lifetime == 90 * 86400, 300, "a renewed token")
    assert "token for Kubernetes: until" in cluster.on(NODE, "headcnictl status", check=False)
    assert cluster.site()().changed == set()


def test_a_token_of_a_deleted_account_is_replaced_by_site_yml(cluster):
    cluster.kubectl("delete", "serviceaccount", f"headcni-node-{NODE}", "-n", "kube-system")
    before = token_of(cluster, NODE)
    site = cluster.site()
    written = (NODE, "headcni.mesh.headcni_node : Write the daemon's token")
    assert written in site("--check").changed and token_of(cluster, NODE) == before
    assert written in site().changed
    assert token_of(cluster, NODE).issued > before.issued
    assert site().changed == set()
    until(lambda: "pods: ok" in cluster.on(NODE, "headcnictl status", check=False))


def test_a_secret_of_an_earlier_version_is_deleted(cluster):
    """As that version made it: one account for all, and a secret for each node."""
    label = {"app.kubernetes.io/managed-by": "headcni"}
    account = {"kubernetes.io/service-account.name": "headcni-node"}
    here = {"namespace": "kube-system"}
    meta = {**here, "name": f"headcni-node-{NODE}", "labels": label, "annotations": account}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {**here, "name": "headcni-node"},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/service-account-token",
            "metadata": meta,
        },
    )
    cluster.site()()
    found = cluster.kubectl("get", "secrets,serviceaccounts", "-n", "kube-system", "-o", "name")
    assert f"secret/headcni-node-{NODE}" not in found.split()
    assert "serviceaccount/headcni-node" not in found.split()
    assert f"serviceaccount/headcni-node-{NODE}" in found.split()
    assert cluster.site()().changed == set()


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
