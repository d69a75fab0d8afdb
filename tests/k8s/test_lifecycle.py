"""Pods that come and go, nodes and servers that restart: addresses stay whose they are."""

from __future__ import annotations

import os
import time

import pytest
from k8s_cluster import NODES, PORT, deployment, get, service, serving, until

ROUNDS = int(os.environ.get("HEADCNI_SCALE_ROUNDS", "3"))
MANY = 60


@pytest.fixture
def talking(cluster):
    """A server on each node, and what they were when the test began."""
    cluster.apply(deployment("talk", 2, container=serving()))
    pods = cluster.until_pods("talk", 2)
    yield {one["metadata"]["name"]: one for one in pods}
    cluster.kubectl("delete", "deployment/talk")
    until(lambda: not cluster.all("pods", "-l", "app=talk"))


def assert_the_same(cluster, pods) -> None:
    """Neither made anew nor restarted, and at their addresses."""
    now = {one["metadata"]["name"]: one for one in cluster.pods("talk")}
    assert set(now) == set(pods)
    for name, pod in pods.items():
        assert now[name]["status"]["podIP"] == pod["status"]["podIP"]
        assert now[name]["status"]["containerStatuses"][0]["restartCount"] == 0


def assert_addresses_are_of_pods(cluster, node: str) -> None:
    """No address is taken but by a pod that is there, and no link is left."""

    def agreed() -> bool:
        pods = cluster.all("pods", "-A", "--field-selector", f"spec.nodeName={node}")
        wanted = {
            (one["metadata"]["name"], one["status"].get("podIP"))
            for one in pods
            if not one["spec"].get("hostNetwork")
        }
        names = {name for name, _ in wanted}
        taken = cluster.addresses(node)
        links = cluster.on(node, "ls /sys/class/net | grep -c ^hc", check=False).strip()
        return len(taken) == len(wanted) == int(links) and set(cluster.attachments(node)) == names

    until(agreed, 60, f"the addresses of {node} to be those of its pods")


@pytest.mark.timeout(120 + 240 * ROUNDS)
def test_sixty_pods_come_and_go_and_leave_no_address_behind(cluster, capsys):
    cluster.apply(deployment("many", 0))
    for _ in range(ROUNDS):
        began = time.monotonic()
        cluster.kubectl("scale", "deployment/many", f"--replicas={MANY}")
        pods = cluster.until_pods("many", MANY, 240)
        up = time.monotonic() - began
        assert len({one["status"]["podIP"] for one in pods}) == MANY
        began = time.monotonic()
        cluster.kubectl("scale", "deployment/many", "--replicas=0")
        until(lambda: not cluster.all("pods", "-l", "app=many"), 240, "pods to go")
        with capsys.disabled():
            down = time.monotonic() - began
            print(f"\n  {MANY} pods: ready in {up:.0f} s, gone in {down:.0f} s", end="")
        for node in NODES:
            assert_addresses_are_of_pods(cluster, node)
    cluster.kubectl("delete", "deployment/many")


def test_pods_talk_on_while_what_runs_them_restarts_on_every_node(cluster, talking):
    cluster.everyone_reaches_everyone(talking)
    first, second = talking
    ask = get(talking[second]["status"]["podIP"], PORT)
    turn = f"{ask} | grep -q {second} && echo ok || echo lost; sleep 0.2"
    loop = f"for i in $(seq 100); do {turn}; done"
    cluster.exec(first, f"mkdir -p /log; ({loop}) > /log/it 2>/dev/null </dev/null &")
    for node, unit in zip(NODES, cluster.kind.units):
        cluster.on(node, f"systemctl restart {unit}")
    cluster.until_ready()
    said = until(lambda: full(cluster.exec(first, "cat /log/it", False).split(), 100), 120)
    assert said.count("lost") == 0, said
    assert_the_same(cluster, talking)
    cluster.everyone_reaches_everyone(talking)


def full(said: list[str], count: int) -> list[str]:
    return said if len(said) >= count else []


def test_pods_talk_on_while_the_api_server_is_away_for_a_minute(cluster, talking):
    node2 = next(n for n, p in talking.items() if p["spec"]["nodeName"] == "node2")
    node1 = next(n for n in talking if n != node2)
    address = talking[node1]["status"]["podIP"]
    cluster.on("node1", cluster.kind.stop_api_server)
    try:
        until(lambda: not cluster.kubectl("get", "--raw", "/livez", check=False), 60)
        began, lost, asked = time.monotonic(), 0, 0
        crictl = cluster.kind.crictl
        (container,) = cluster.on(
            "node2", f"{crictl} ps -q --label io.kubernetes.pod.name={node2}"
        ).split()
        while time.monotonic() - began < 60:
            ask = f'{crictl} exec {container} sh -c "{get(address, PORT)}"'
            said = cluster.on("node2", ask, check=False)
            asked, lost = asked + 1, lost + (node1 not in said)
            time.sleep(0.5)
    finally:
        cluster.on("node1", cluster.kind.start_api_server)
        until(lambda: cluster.kubectl("get", "--raw", "/readyz", check=False), 120, "API server")
    cluster.until_ready()
    assert asked > 10 and lost == 0, f"{lost} of {asked} lost"
    for node in NODES:  # the daemon has found it again
        cluster.wait(node, "curl -sS http://127.0.0.1:9001/ready | grep -q 'pods: ok'", 60)
    assert_the_same(cluster, talking)
    cluster.everyone_reaches_everyone(talking)


def test_a_pod_of_a_stateful_set_comes_back_under_its_name(cluster):
    cluster.apply(
        deployment("db", 2, "StatefulSet", container=serving()), service("db", clusterIP="None")
    )
    cluster.until_pods("db", 2)
    other = cluster.get("pod", "db-1")
    for _ in range(3):
        uid = cluster.get("pod", "db-0")["metadata"]["uid"]
        cluster.kubectl("delete", "pod", "db-0", "--wait=true")
        cluster.until_pods("db", 2)
        anew = cluster.get("pod", "db-0")
        assert anew["metadata"]["uid"] != uid
        assert cluster.http("db-1", anew["status"]["podIP"]) == "db-0"
        name = "nslookup db-0.db.default.svc.cluster.local"
        # CoreDNS, which has lost the API server a moment ago, may wait 60 s before it asks again.
        until(lambda: anew["status"]["podIP"] in cluster.exec("db-1", name, False), 120)  # noqa: B023
    assert cluster.get("pod", "db-1")["status"]["podIP"] == other["status"]["podIP"]
    for node in NODES:
        assert_addresses_are_of_pods(cluster, node)
    cluster.kubectl("delete", "statefulset/db", "service/db")
    until(lambda: not cluster.all("pods", "-l", "app=db"))


@pytest.mark.parametrize("how", [(), ("--hard",)], ids=["shut down", "plug pulled"])
def test_a_node_that_was_rebooted_has_its_pods_again_and_no_address_of_old(cluster, talking, how):
    def boot() -> str:
        return cluster.get("node", "node2")["status"]["nodeInfo"]["bootID"]

    def talk() -> bool:
        """As the pods are now: what Kubernetes says at first is of before the reboot."""
        pods = {one["metadata"]["name"]: one for one in cluster.pods("talk")}
        return {one["spec"]["nodeName"] for one in pods.values()} == set(NODES) and all(
            cluster.http(source, pod["status"].get("podIP", "")) == target
            for source in pods
            for target, pod in pods.items()
        )

    before = boot()
    cluster("reboot", "node2", *how)
    until(lambda: boot() != before and cluster.is_ready("node2"), 180, "node2 Ready again")
    until(talk, 180, "pods to reach each other")
    for node in NODES:
        assert_addresses_are_of_pods(cluster, node)
