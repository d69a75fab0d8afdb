"""k3s with two families: nodes, pods and services have an IPv4 and an IPv6 address each."""

from __future__ import annotations

import ipaddress
import json

import pytest
from k8s_cluster import NODES, PORT, deployment, made, service, serving, until

from lab.layout import Lab, Plan

pytestmark = pytest.mark.timeout(900)
PODS = ["10.42.0.0/16", "fd42::/56"]
SERVICES = ["10.43.0.0/16", "fd43::/112"]
NODE_PORT = 30082
RANGES = {"headcni_node_cluster_cidr": PODS, "headcni_node_service_cidr": SERVICES}


@pytest.fixture(scope="module")
def cluster():
    with made("k8s4", "--k3s-idle") as found:
        for node, addresses in node_addresses(found).items():
            lines = [f"s/^node-ip: .*/node-ip: {','.join(addresses)}/"]
            if node == "node1":
                lines.append(f"$ a cluster-cidr: {','.join(PODS)}")
                lines.append(f"$ a service-cidr: {','.join(SERVICES)}")
            options = " ".join(f"-e '{line}'" for line in lines)
            found.on(node, f"sed -i {options} /etc/rancher/k3s/config.yaml")
        found("k3s-start")
        found.site(**RANGES)()
        found.until_ready()
        yield found


@pytest.fixture(scope="module")
def web(cluster):
    """Two servers, one on each node, behind one service; and a client on each node."""
    port = {"port": 80, "targetPort": PORT, "nodePort": NODE_PORT}
    both = {"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"]}
    cluster.apply(
        deployment("web", 2, container=serving()),
        service("web", type="NodePort", ports=[port], **both),
    )
    pods = cluster.until_pods("web", 2)
    for node in NODES:
        cluster.run_pod(f"client-{node}", node)
    return {one["metadata"]["name"]: one for one in pods}


def node_addresses(cluster) -> dict[str, list[str]]:
    """On the underlay, one of each family."""
    plan = Plan.load(Lab.named(cluster.name))
    return {node: [str(plan.address(node)), str(plan.address6(node))] for node in NODES}


def addresses(pod) -> list[str]:
    return [one["ip"] for one in pod["status"]["podIPs"]]


def test_each_node_has_both_its_ranges_from_k3s(cluster):
    for node in NODES:
        given = cluster.get("node", node)["spec"]["podCIDRs"]
        assert [ipaddress.ip_network(one).version for one in given] == [4, 6]
        conflist = json.loads(cluster.on(node, "cat /etc/cni/net.d/10-headcni.conflist"))
        (plugin,) = conflist["plugins"]
        assert plugin["pod_cidr"] == given and plugin["cluster_cidr"] == PODS


def test_verify_yml_is_green_and_site_yml_run_again_changes_nothing(cluster):
    cluster.site(**RANGES).verify()
    assert cluster.site(**RANGES)().changed == set()


def test_a_pod_has_an_address_of_each_of_its_nodes_ranges(cluster, web):
    assert {pod["spec"]["nodeName"] for pod in web.values()} == set(NODES)
    for pod in web.values():
        given = cluster.get("node", pod["spec"]["nodeName"])["spec"]["podCIDRs"]
        found = addresses(pod)
        assert len(found) == len(given) == 2
        for address, cidr in zip(found, given):
            assert ipaddress.ip_address(address) in ipaddress.ip_network(cidr)


def test_pods_reach_each_other_by_both_families(cluster, web):
    for source in (*web, *(f"client-{node}" for node in NODES)):
        for target, pod in web.items():
            for address in addresses(pod):
                assert cluster.http(source, address) == target, (source, target, address)


def test_a_pod_is_seen_by_its_own_ipv6_address_on_the_other_node(cluster, web):
    client = cluster.get("pod", "client-node1")
    (target,) = [pod for pod in web.values() if pod["spec"]["nodeName"] == "node2"]
    source, address = addresses(client)[1], addresses(target)[1]
    watch = f"tcpdump -lnni any ip6 and tcp port {PORT}"
    cluster.on("node2", f"(timeout 20 {watch} > /run/seen 2>&1 &); sleep 2")
    assert cluster.http("client-node1", address) == target["metadata"]["name"]
    until(lambda: f" {source}." in cluster.on("node2", f"grep '> {address}.' /run/seen"), 20)


@pytest.mark.parametrize("node", NODES)
def test_a_service_answers_at_both_its_addresses(cluster, web, node):
    found = cluster.get("service", "web")["spec"]["clusterIPs"]
    assert [ipaddress.ip_address(one).version for one in found] == [4, 6]
    for address in found:
        seen = {cluster.http(f"client-{node}", address, 80) for _ in range(30)}
        assert seen == set(web), address


@pytest.mark.parametrize("node", NODES)
def test_a_node_port_answers_by_both_families_from_outside(cluster, web, node):
    four, six = node_addresses(cluster)[node]
    for host in (four, f"[{six}]"):
        fetch = f"for i in $(seq 30); do curl -sS -m 5 http://{host}:{NODE_PORT}/; done"
        seen = cluster.on("control", fetch).split()
        assert len(seen) == 30 and set(seen) == set(web), host


def test_a_name_leads_to_both_addresses_of_a_service(cluster, web):
    found = cluster.get("service", "web")["spec"]["clusterIPs"]
    ask = "nslookup web.default.svc.cluster.local"

    def said() -> bool:
        answer = cluster.exec("client-node1", ask, check=False)
        return all(address in answer for address in found)

    until(said, 60, "both addresses in CoreDNS")


def test_what_leaves_the_cluster_by_ipv6_is_masqueraded(cluster, web):
    """control knows no way back to a pod."""
    control = str(Plan.load(Lab.named(cluster.name)).address6("control"))
    cluster.on(
        "control", "systemd-run --quiet --collect --unit=page python3 -m http.server -b :: 8099"
    )
    cluster.wait("control", "curl -s -o /dev/null http://[::1]:8099/", 20)
    try:
        for node in NODES:
            assert cluster.http(f"client-{node}", control, 8099), node
    finally:
        cluster.on("control", "systemctl stop page", check=False)
