"""k3s on the nodes' tailnet addresses: they join the tailnet first, and the cluster by it."""

from __future__ import annotations

import pytest
from k8s_cluster import NODES, deployment, made, service, serving

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster():
    with made("k8s3", "--k3s-idle") as found:
        found.site()("--tags", "tailscale")
        addresses = {node: found.on(node, "tailscale ip -4").strip() for node in NODES}
        for node in NODES:
            underlay = found.inventory()["_meta"]["hostvars"][node]["ansible_host"]
            lines = [f"s/^node-ip: .*/node-ip: {addresses[node]}/"]
            if node == "node1":
                lines.append(f"$ a tls-san: {underlay}")  # for kubectl outside of the tailnet
            else:
                lines.append(f"s#^server: .*#server: https://{addresses['node1']}:6443#")
            options = " ".join(f"-e '{line}'" for line in lines)
            found.on(node, f"sed -i {options} /etc/rancher/k3s/config.yaml")
        found("k3s-start")
        found.site()()
        found.until_ready()
        found.site().verify()
        yield found


def test_nodes_know_each_other_by_their_tailnet_addresses_only(cluster):
    for node in NODES:
        own = cluster.on(node, "tailscale ip -4").strip()
        said = cluster.get("node", node)["status"]["addresses"]
        assert [one["address"] for one in said if one["type"] == "InternalIP"] == [own]


def test_pods_services_exec_and_logs_work(cluster):
    command = f"echo started; {serving()['command'][2]}"
    cluster.apply(
        deployment("web", 2, container=serving(command=["sh", "-c", command])), service("web")
    )
    pods = {one["metadata"]["name"]: one for one in cluster.until_pods("web", 2)}
    address = cluster.get("service", "web")["spec"]["clusterIP"]
    for source in pods:
        assert cluster.kubectl("logs", source).strip() == "started"
        for target, pod in pods.items():
            assert cluster.http(source, pod["status"]["podIP"]) == target, (source, target)
        assert {cluster.http(source, address, 80) for _ in range(30)} == set(pods)


def test_a_pod_reaches_the_api_server_by_its_service(cluster):
    """Its endpoint is the server's tailnet address."""
    (server,) = cluster.get("endpoints", "kubernetes")["subsets"][0]["addresses"]
    assert server["ip"] == cluster.on("node1", "tailscale ip -4").strip()
    for node in NODES:
        cluster.run_pod("asks", node)
        said = cluster.exec("asks", "nc -w 3 10.43.0.1 443 </dev/null && echo open", check=False)
        assert "open" in said, node
        cluster.delete_pod("asks")
