"""What kubeadm lays out differs from k3s: where files are, who the nodes are, what runs where."""

from __future__ import annotations

import ipaddress
import json

import pytest
from k8s_cluster import NODES, is_ready, until

PKI = "/etc/kubernetes/pki"
CONTROLLER = "/etc/kubernetes/manifests/kube-controller-manager.yaml"
KUBELET_CONF = "/etc/kubernetes/kubelet.conf"
# A configuration that says nothing of pod CIDRs, so that the node's files are looked at.
EMPTY = "/root/empty.yaml"


def static_pods(cluster) -> dict[str, list[str]]:
    """Of each, the command line that it really has."""
    found = {}
    for pod in cluster.all("pods", "-n", "kube-system", "-l", "tier=control-plane"):
        assert pod["metadata"]["annotations"]["kubernetes.io/config.source"] == "file"
        assert is_ready(pod), pod["metadata"]["name"]
        found[pod["metadata"]["labels"]["component"]] = pod["spec"]["containers"][0]["command"]
    return found


def test_the_control_plane_is_static_pods_with_tls_and_the_authorizers_of_kubeadm(cluster):
    found = static_pods(cluster)
    names = {"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}
    assert set(found) == names
    manifests = cluster.on("node1", "ls /etc/kubernetes/manifests").split()
    assert {name.removesuffix(".yaml") for name in manifests} == names
    assert "--authorization-mode=Node,RBAC" in found["kube-apiserver"]
    assert "--enable-admission-plugins=NodeRestriction" in found["kube-apiserver"]
    assert f"--client-ca-file={PKI}/ca.crt" in found["kube-apiserver"]
    assert f"--cluster-cidr={cluster.kind.pods_range}" in found["kube-controller-manager"]
    refused = cluster.on("node2", "curl -sk https://node1:6443/api/v1/nodes")
    assert json.loads(refused)["reason"] == "Forbidden"


@pytest.mark.parametrize("node", NODES)
def test_a_kubelet_is_a_node_of_the_cluster_and_may_look_at_no_other(cluster, node):
    kubectl = f"kubectl --kubeconfig {KUBELET_CONF}"
    said = json.loads(cluster.on(node, f"{kubectl} auth whoami -o json"))["status"]["userInfo"]
    assert said["username"] == f"system:node:{node}" and "system:nodes" in said["groups"]
    (other,) = set(NODES) - {node}
    assert cluster.on(node, f"{kubectl} get node {node} -o name").strip() == f"node/{node}"
    refused = cluster.on(node, f"{kubectl} get node {other} 2>&1", check=False)
    assert "only its own Node object" in refused, refused


def test_a_worker_has_no_administrator_and_needs_none(cluster):
    """site.yml asks Kubernetes as the worker's own kubelet."""
    assert cluster.on("node2", "ls /etc/kubernetes").split() == ["kubelet.conf", "pki"]
    assert cluster.on("node2", f"ls {PKI}").split() == ["ca.crt"]


def test_kube_proxy_and_coredns_run_as_pods_once_there_is_a_network(cluster):
    def ready(label: str) -> list[dict]:
        found = cluster.all("pods", "-n", "kube-system", "-l", f"k8s-app={label}")
        return found if all(map(is_ready, found)) else []

    proxies = until(lambda: ready("kube-proxy"))
    assert {one["spec"]["nodeName"] for one in proxies} == set(NODES)
    names = until(lambda: ready("kube-dns"), what="CoreDNS")
    for one in names:
        address = ipaddress.ip_address(one["status"]["podIP"])
        assert address in ipaddress.ip_network(cluster.kind.pods_range)


def resolved(cluster, node: str, *options: str) -> dict:
    cluster.write(node, EMPTY, b"")
    asked = " ".join(("headcnictl pod-cidr --json --config", EMPTY, *options))
    found = json.loads(cluster.on(node, asked))
    found["considered"] = {one["path"] or one["source"]: one for one in found["considered"]}
    return found


def assert_a_share(cluster, cidr: str) -> None:
    network = ipaddress.ip_network(cidr)
    assert network.prefixlen == 24
    assert network.subnet_of(ipaddress.ip_network(cluster.kind.pods_range))


def test_without_kubernetes_the_control_planes_files_tell_the_clusters_cidr(cluster):
    found = resolved(cluster, "node1")
    assert found["considered"][CONTROLLER]["value"] == cluster.kind.pods_range
    assert found["source"] == "hash" and found["guessed"]
    assert_a_share(cluster, *found["cidrs"])
    # Kubelet's own configuration and the administrator's kubeconfig were read, and hold none.
    for path in ("/var/lib/kubelet/config.yaml", "/etc/kubernetes/admin.conf"):
        assert found["considered"][path]["verdict"] == "holds no CIDR"


def test_without_kubernetes_a_worker_has_no_file_that_tells(cluster):
    """Which is why site.yml asks Kubernetes; the guess is called one."""
    found = resolved(cluster, "node2")
    assert found["considered"]["/var/lib/kubelet/config.yaml"]["verdict"] == "holds no CIDR"
    assert found["considered"][CONTROLLER]["verdict"] == "not there"
    assert found["source"] == "default" and found["guessed"]


def test_kubeadms_own_configuration_tells_a_worker_that_keeps_it(cluster):
    """As `kubectl -n kube-system get cm kubeadm-config` has it."""
    said = cluster.get("configmap", "kubeadm-config", "-n", "kube-system")
    text = said["data"]["ClusterConfiguration"].encode()
    cluster.write("node2", "/root/kept/etc/kubernetes/kubeadm-config.yaml", text)
    found = resolved(cluster, "node2", "--root", "/root/kept")
    kept = found["considered"]["/etc/kubernetes/kubeadm-config.yaml"]
    assert kept["value"] == cluster.kind.pods_range and "taken as base" in kept["verdict"]
    assert found["source"] == "hash"
    assert_a_share(cluster, *found["cidrs"])
