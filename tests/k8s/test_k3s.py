"""k3s on the lab, and HeadCNI as the network of its pods."""

from __future__ import annotations

from k8s_cluster import NODES, until

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


def test_pods_have_addresses_of_their_nodes_range_and_reach_each_other(cluster):
    pods = {node: cluster.run_pod(f"on-{node}", node) for node in NODES}
    for node, pod in pods.items():
        cidr = cluster.get("node", node)["spec"]["podCIDR"]
        assert pod["status"]["podIP"].rpartition(".")[0] == cidr.rpartition(".")[0]
    other = cluster.run_pod("neighbour", "node1")
    serve = "mkdir -p /www; echo hello > /www/index.html; httpd -p 80 -h /www"
    cluster.kubectl("exec", "neighbour", "--", "sh", "-c", serve)
    get = f"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 3 {other['status']['podIP']} 80"
    until(
        lambda: "hello" in cluster.kubectl("exec", "on-node1", "--", "sh", "-c", get, check=False)
    )
    for name in ("neighbour", "on-node1", "on-node2"):
        cluster.delete_pod(name)
    until(lambda: not any(cluster.attachments(node) for node in NODES))


def test_the_machine_keeps_its_own_kernel_parameters(cluster):
    assert machine() == BEFORE
    shown = cluster.on("node1", f"cd /proc/sys && cat {' '.join(SYSCTLS)}").split()
    assert shown == ["1", "0", "10", "1"]
