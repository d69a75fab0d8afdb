"""Another mode for the nodes of a cluster, one after the other, while a Deployment serves."""

from __future__ import annotations

import pytest
from k8s_cluster import NODES, PORT, deployment, get, service, serving, until

pytestmark = pytest.mark.timeout(900)
LOG = "/log/it"
NODE_PORT = 30081
MANY = 100  # so often asked, each of four servers has answered
SWITCH = "playbooks/switch_mode.yml"


@pytest.fixture(scope="module")
def shop(cluster):
    """A service with two servers on each node, and a customer on each node who never stops."""
    port = {"port": 80, "targetPort": PORT, "nodePort": NODE_PORT}
    cluster.apply(
        deployment("shop", 4, container=serving()), service("shop", type="NodePort", ports=[port])
    )
    cluster.until_pods("shop", 4)
    for node in NODES:
        cluster.run_pod(f"customer-{node}", node)
    yield cluster.get("service", "shop")["spec"]["clusterIP"]
    cluster.kubectl("delete", "deployment/shop", "service/shop")
    for node in NODES:
        cluster.delete_pod(f"customer-{node}")


def start(cluster, address: str) -> None:
    """Each asks some five times a second, and writes down what came of it."""
    turn = f"{get(address, 80)} | grep -q ^shop- && echo ok || echo lost; sleep 0.1"
    loop = f"while [ ! -e /log/stop ]; do {turn}; done"
    for node in NODES:
        script = f"mkdir -p /log; rm -f /log/*; ({loop}) > {LOG} 2>/dev/null </dev/null &"
        cluster.exec(f"customer-{node}", script)


def stop(cluster) -> dict[str, tuple[int, int]]:
    """How many were asked and how many were lost, by node."""
    found = {}
    for node in NODES:
        name = f"customer-{node}"
        cluster.exec(name, "touch /log/stop; sleep 4")
        said = cluster.exec(name, f"cat {LOG}").split()
        found[node] = (len(said), said.count("lost"))
    return found


def mode(cluster, node: str) -> str:
    return cluster.on(node, "headcnictl mode show").strip()


def test_a_tailscaled_of_ours_that_does_not_stay_up_is_quoted_and_the_node_put_back(cluster):
    """It tells systemd that it is ready, and only then sees that it cannot be."""
    drop_in = "/etc/systemd/system/headcni-tailscaled.service.d"
    cluster.write("node1", f"{drop_in}/null.conf", b"[Service]\nInaccessiblePaths=/dev/null\n")
    cluster.on("node1", "systemctl daemon-reload")
    try:
        refused = cluster.site()(playbook=SWITCH, headcni_mode="daemon", check=False)
    finally:
        cluster.on("node1", f"rm -r {drop_in}; systemctl daemon-reload")
    said = refused.failures("node1")
    assert refused.code != 0
    assert "headcni-tailscaled.service does not stay up" in said and "/dev/null" in said, said
    assert [mode(cluster, node) for node in NODES] == ["host"] * len(NODES)


@pytest.mark.parametrize("wanted", ["daemon", "host"])
def test_a_mode_is_switched_under_a_deployment_that_serves(cluster, shop, capsys, wanted):
    before = {one["metadata"]["name"]: one["status"]["podIP"] for one in cluster.pods("shop")}
    start(cluster, shop)
    cluster.site()(playbook=SWITCH, headcni_mode=wanted)
    counted = stop(cluster)
    with capsys.disabled():
        for node, (asked, lost) in counted.items():
            print(f"\n  to {wanted} mode, from {node}: {lost} of {asked} requests lost", end="")
    assert [mode(cluster, node) for node in NODES] == [wanted] * len(NODES)
    after = {one["metadata"]["name"]: one["status"]["podIP"] for one in cluster.pods("shop")}
    assert after == before
    for asked, lost in counted.values():
        assert asked > 50 and lost <= asked // 50, counted

    # In the new mode all is as it was in the other.
    for node in NODES:
        for name, address in before.items():
            until(lambda: cluster.http(f"customer-{node}", address) == name)  # noqa: B023
        asked = cluster.exec(
            f"customer-{node}", f"for i in $(seq {MANY}); do {get(shop, 80)}; done"
        )
        seen = [word for word in asked.split() if word.startswith("shop-")]
        assert len(seen) == MANY and set(seen) == set(before), (node, seen)
        for machine, address in (("control", f"{node}:{NODE_PORT}"), (node, shop)):
            fetch = f"for i in $(seq {MANY}); do curl -sS -m 5 http://{address}/; done"
            seen = cluster.on(machine, fetch).split()
            assert len(seen) == MANY and set(seen) == set(before), (machine, address, seen)
    cluster.site().verify()
    assert cluster.site()(headcni_mode=wanted).changed == set()
