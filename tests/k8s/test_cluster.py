"""A cluster on the lab, and HeadCNI as the network of its pods, as site.yml makes it."""

from __future__ import annotations

import json

from k8s_cluster import NODES, serving, until

SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")


def machine() -> list[str]:
    found = []
    for name in SYSCTLS:
        with open(f"/proc/sys/{name}") as file:
            found.append(file.read().strip())
    return found


BEFORE = machine()


def test_a_node_without_a_conflist_is_not_ready_and_with_ours_it_is(ready_before, cluster):
    for ready in ready_before.values():
        assert ready["status"] == "False" and "cni" in ready["message"].lower(), ready
    assert all(cluster.is_ready(node) for node in NODES)


def test_each_node_has_the_pod_cidr_that_kubernetes_gave_it(cluster):
    for node in NODES:
        given = cluster.get("node", node)["spec"]["podCIDRs"]
        (plugin,) = json.loads(cluster.on(node, "cat /etc/cni/net.d/10-headcni.conflist"))[
            "plugins"
        ]
        assert plugin["pod_cidr"] == given
        assert plugin["cluster_cidr"] == [cluster.kind.pods_range]


def test_verify_yml_is_green_and_site_yml_run_again_changes_nothing(cluster):
    cluster.site().verify()
    assert cluster.site()().changed == set()


def test_pods_have_addresses_of_their_nodes_range_and_reach_each_other(cluster):
    pods = {
        f"on-{node}": cluster.run_pod(f"on-{node}", node, container=serving()) for node in NODES
    }
    pods["neighbour"] = cluster.run_pod("neighbour", "node1", container=serving())
    for pod in pods.values():
        cidr = cluster.get("node", pod["spec"]["nodeName"])["spec"]["podCIDR"]
        assert pod["status"]["podIP"].rpartition(".")[0] == cidr.rpartition(".")[0]
    cluster.everyone_reaches_everyone(pods)
    for name in pods:
        cluster.delete_pod(name)
    until(lambda: not any(set(cluster.attachments(node)) & set(pods) for node in NODES))


def test_a_pod_is_seen_by_its_own_address_on_the_other_node(cluster):
    """Nothing on the way changes the source of what goes from pod to pod."""
    server = cluster.run_pod("server", "node2", container=serving())
    client = cluster.run_pod("client", "node1")
    cluster.on("node2", "(timeout 20 tcpdump -lnni any tcp port 8080 > /run/seen 2>&1 &); sleep 2")
    assert cluster.http("client", server["status"]["podIP"]) == "server"
    source, target = client["status"]["podIP"], server["status"]["podIP"]
    until(lambda: f" {source}." in cluster.on("node2", f"grep '> {target}.8080' /run/seen"), 20)
    for name in ("server", "client"):
        cluster.delete_pod(name)


def test_the_machine_keeps_its_own_kernel_parameters(cluster):
    assert machine() == BEFORE
    shown = cluster.on("node1", f"cd /proc/sys && cat {' '.join(SYSCTLS)}").split()
    assert shown == ["1", "0", "10", "1"]
