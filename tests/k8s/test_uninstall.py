"""uninstall.yml on a cluster: nothing of HeadCNI is left, on the nodes and in Kubernetes, and
site.yml may put it there again."""

from __future__ import annotations

import pytest
from k8s_cluster import NODES, deployment, serving, until
from mesh_state import at_headscale

pytestmark = pytest.mark.timeout(900)
UNINSTALL = "playbooks/uninstall.yml"
# By the names that ours have; what runs, what is enabled and what the kernel has.
LEFT = r"""
ls -d /etc/headcni /opt/headcni /var/lib/headcni /var/lib/cni/headcni /run/headcni \
  /etc/cni/net.d/*headcni* /opt/cni/bin/headcni* /etc/systemd/system/headcni* 2>/dev/null
ls /sys/class/net | grep -E '^(hc|headcni|tailscale)'
ip netns | grep headcni
for family in -4 -6; do ip $family rule | grep -E '^(51..|52..):'; done
ip route show table 5200 2>/dev/null
nft list tables | grep -iE 'headcni|ts-'
systemctl list-units --all --plain --no-legend | grep -E 'headcni|tailscaled'
true
"""


def in_kubernetes(cluster) -> str:
    kinds = "secrets,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings"
    return "\n".join(
        line
        for line in cluster.kubectl("get", kinds, "-A", "-o", "name").splitlines()
        if "headcni" in line
    )


def cluster_dns(cluster) -> str:
    """All ConfigMaps of CoreDNS, k3s' own and those that it reads as well."""
    return cluster.kubectl("get", "configmaps", "-n", "kube-system", "-o", "yaml")


@pytest.fixture
def drained(cluster):
    """Nodes without pods of their own; afterwards they take pods again."""
    for node in NODES:
        cluster.kubectl("drain", node, "--force", "--ignore-daemonsets", "--timeout=90s")
    yield
    for node in NODES:
        cluster.kubectl("uncordon", node)


def test_it_refuses_while_pods_use_the_network(cluster):
    """Each node that has some: one without would go."""
    for node in NODES:
        cluster.run_pod(f"tenant-{node}", node)
    refused = cluster.site()(playbook=UNINSTALL, check=False)
    assert refused.code != 0
    for node in NODES:
        assert f"tenant-{node}" in refused.failures(node)
    assert all(cluster.is_ready(node) for node in NODES)
    for node in NODES:
        cluster.delete_pod(f"tenant-{node}")


def test_a_drained_cluster_is_left_without_a_trace_and_may_be_taken_again(cluster, drained):
    cluster.site()(headcni_node_cluster_dns=True)
    assert "headcni-node" in in_kubernetes(cluster) and "mesh.lab" in cluster_dns(cluster)
    until(lambda: not any(cluster.attachments(node) for node in NODES))
    cluster.site()(playbook=UNINSTALL)
    for node in NODES:
        assert cluster.on(node, LEFT) == "", node
    assert in_kubernetes(cluster) == "" and "headcni" not in cluster_dns(cluster)
    assert at_headscale(cluster) == []
    until(lambda: not any(cluster.is_ready(node) for node in NODES), 120, "nodes not Ready")
    assert cluster.site()(playbook=UNINSTALL).changed == set()

    cluster.site()()
    cluster.until_ready()
    for node in NODES:
        cluster.kubectl("uncordon", node)
    cluster.apply(deployment("again", 2, container=serving()))
    pods = {one["metadata"]["name"]: one for one in cluster.until_pods("again", 2)}
    cluster.everyone_reaches_everyone(pods)
    cluster.kubectl("delete", "deployment/again")
    until(lambda: not cluster.all("pods", "-l", "app=again"))
