"""What applications use: services, names by CoreDNS, host ports, probes, exec, logs."""

from __future__ import annotations

import pytest
from k8s_cluster import (
    NODES,
    PORT,
    deployment,
    is_ready,
    pod,
    reached,
    service,
    serving,
    until,
)

NODE_PORT = 30080


@pytest.fixture(scope="module")
def web(cluster):
    """Two servers, one on each node, behind one service; and a client on each node."""
    port = {"port": 80, "targetPort": PORT, "nodePort": NODE_PORT}
    cluster.apply(
        deployment("web", 2, container=serving()), service("web", type="NodePort", ports=[port])
    )
    pods = cluster.until_pods("web", 2)
    assert {one["spec"]["nodeName"] for one in pods} == set(NODES)
    for node in NODES:
        cluster.run_pod(f"client-{node}", node)
    yield {one["metadata"]["name"] for one in pods}
    cluster.kubectl("delete", "deployment/web", "service/web")
    for node in NODES:
        cluster.delete_pod(f"client-{node}")


def curl(cluster, machine: str, address: str, port: int) -> str:
    return cluster.on(machine, f"curl -sS -m 5 http://{address}:{port}/").strip()


@pytest.mark.parametrize("node", NODES)
def test_pods_reach_a_service_by_its_cluster_ip_on_both_nodes(cluster, web, node):
    address = cluster.get("service", "web")["spec"]["clusterIP"]
    reached(lambda: cluster.http(f"client-{node}", address, 80), web)


@pytest.mark.parametrize("node", NODES)
def test_a_node_itself_reaches_the_service(cluster, web, node):
    address = cluster.get("service", "web")["spec"]["clusterIP"]
    reached(lambda: curl(cluster, node, address, 80), web)


@pytest.mark.parametrize("node", NODES)
def test_from_outside_each_nodes_port_leads_to_servers_on_both(cluster, web, node):
    """control is neither in the cluster nor in the tailnet."""
    reached(lambda: curl(cluster, "control", node, NODE_PORT), web)


@pytest.mark.parametrize("node", NODES)
def test_a_pod_reaches_its_own_service_by_way_of_itself(cluster, web, node):
    (name,) = [
        one["metadata"]["name"] for one in cluster.pods("web") if one["spec"]["nodeName"] == node
    ]
    address = cluster.get("service", "web")["spec"]["clusterIP"]
    reached(lambda: cluster.http(name, address, 80), web)


@pytest.mark.parametrize("node", NODES)
def test_coredns_answers_pods_on_both_nodes(cluster, web, node):
    """Of k3s there is one CoreDNS, so one of the nodes asks across the mesh."""
    until(
        lambda: [
            one
            for one in cluster.get("pods", "-n", "kube-system", "-l", "k8s-app=kube-dns")["items"]
            if is_ready(one)
        ],
        what="CoreDNS",
    )
    address = cluster.get("service", "web")["spec"]["clusterIP"]
    ask = "nslookup web.default.svc.cluster.local"
    until(lambda: address in cluster.exec(f"client-{node}", ask, check=False), 60)
    server = cluster.get("service", "kube-dns", "-n", "kube-system")["spec"]["clusterIP"]
    assert server in cluster.exec(f"client-{node}", "cat /etc/resolv.conf")


def test_a_name_that_is_not_there_is_said_not_to_be(cluster, web):
    said = cluster.exec("client-node1", "nslookup none.default.svc.cluster.local 2>&1", False)
    assert "NXDOMAIN" in said, said


def test_a_host_port_leads_to_its_pod_from_outside_and_from_the_other_node(cluster):
    ports = [{"containerPort": PORT, "hostPort": 8181}]
    cluster.run_pod("ported", "node2", container=serving(ports=ports))
    for machine in ("control", "node1", "node2"):
        assert curl(cluster, machine, "node2", 8181) == "ported", machine
    cluster.delete_pod("ported")
    until(lambda: "ported" not in cluster.attachments("node2"))
    gone = cluster.on("control", "curl -sS -m 3 http://node2:8181/ 2>&1", check=False)
    assert "ported" not in gone


def test_probes_decide_over_readiness_and_over_life(cluster):
    """By HTTP, by TCP and by a command; kubelet asks from the node."""
    healthy = serving(
        livenessProbe={"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        startupProbe={"exec": {"command": ["ls", "/www/index.html"]}, "periodSeconds": 1},
    )
    dies = {
        "command": ["sh", "-c", "httpd -p 8080; exec sleep 1000"],
        "livenessProbe": {"tcpSocket": {"port": 8081}, "periodSeconds": 1, "failureThreshold": 2},
    }
    never = serving(readinessProbe={"httpGet": {"path": "/none", "port": PORT}, "periodSeconds": 1})
    cluster.run_pod("healthy", "node2", container=healthy)
    cluster.apply(pod("dies", "node2", container=dies), pod("never", "node2", container=never))

    def state(name: str):
        return (cluster.get("pod", name)["status"].get("containerStatuses") or [{}])[0]

    until(lambda: state("dies").get("restartCount"), what="a restart by the liveness probe")
    until(lambda: state("never").get("started"))
    assert not state("never")["ready"]
    assert state("healthy")["ready"] and state("healthy")["restartCount"] == 0
    for name in ("healthy", "dies", "never"):
        cluster.delete_pod(name)


def test_exec_and_logs_work_on_both_nodes(cluster):
    for node in NODES:
        said = f"said-on-{node}"
        command = {"command": ["sh", "-c", f"echo {said}; exec sleep 1000"]}
        cluster.run_pod("speaks", node, container=command)
        assert cluster.exec("speaks", "hostname").strip() == "speaks"
        assert cluster.kubectl("logs", "speaks").strip() == said
        cluster.delete_pod("speaks")


def test_port_forward_reaches_a_pod(cluster):
    cluster.run_pod("forwarded", "node2", container=serving())
    script = (
        "kubectl port-forward pod/forwarded 18080:8080 >/dev/null & job=$!;"
        " for i in $(seq 50); do curl -sf -m 2 http://127.0.0.1:18080/ && break; sleep 0.2; done;"
        " kill $job"
    )
    assert cluster.on("node1", script).strip() == "forwarded"
    cluster.delete_pod("forwarded")
