"""A k3s that runs on its own flannel, with a Deployment that serves, is moved to HeadCNI.

Node by node, as docs/k3s.md has it. Somebody outside of the cluster asks all the time, at the node
port of either node, and counts.
"""

from __future__ import annotations

import json

import pytest
from k8s_cluster import NODES, PORT, deployment, is_ready, made, service, serving, until
from lab_command import CHECKOUT

from lab import tools

pytestmark = pytest.mark.timeout(1800)
NODE_PORT = 30083
UNITS = dict(zip(NODES, ("k3s", "k3s-agent")))
CONFIG = "/etc/rancher/k3s/config.yaml"
# Where a release of k3s has them; the lab's has none of its own.
PLUGINS = "/var/lib/rancher/k3s/data/cni"
ASK = CHECKOUT / "tests/support/ask_on.py"


@pytest.fixture(scope="module")
def cluster():
    if tools.missing([tools.FLANNEL]):
        pytest.skip("flannel's plugin is not built: `python3 -m lab tools flannel`")
    with made("k8s5", "--k3s-idle") as found:
        for node, unit in UNITS.items():
            found.copy(tools.FLANNEL.bin / "flannel", node, f"{PLUGINS}/flannel")
            found.on(node, f"chmod 755 {PLUGINS}/flannel; ln -s /opt/lab/cni/* {PLUGINS}/")
            drop_in = f"/etc/systemd/system/{unit}.service.d/flannel.conf"
            path = f"[Service]\nEnvironment=PATH={PLUGINS}:/opt/lab/k3s/bin:/usr/sbin:/usr/bin\n"
            found.write(node, drop_in, path.encode())
            found.on(node, "systemctl daemon-reload")
        found.on("node1", f"sed -i 's/^flannel-backend: .*/flannel-backend: vxlan/' {CONFIG}")
        found("k3s-start")
        found.until_ready()
        yield found


@pytest.fixture(scope="module")
def web(cluster):
    """Two servers, one on each node; both on one node while the other has to be left alone."""
    # A pod that goes is asked for another moment: whoever was sent to it still gets an answer.
    lasting = serving(lifecycle={"preStop": {"exec": {"command": ["sleep", "5"]}}})
    made_of = deployment("web", 2, container=lasting)
    spec = made_of["spec"]["template"]["spec"]
    spec["terminationGracePeriodSeconds"] = 15
    (spread,) = spec["topologySpreadConstraints"]
    spread |= {"whenUnsatisfiable": "ScheduleAnyway", "matchLabelKeys": ["pod-template-hash"]}
    port = {"port": 80, "targetPort": PORT, "nodePort": NODE_PORT}
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}},
    }
    cluster.apply(made_of, service("web", type="NodePort", ports=[port]), budget)
    pods = cluster.until_pods("web", 2)
    assert {one["spec"]["nodeName"] for one in pods} == set(NODES)
    return cluster


@pytest.fixture(scope="module")
def moved(web):
    """What was seen on the way, and what it cost who asked."""
    cluster, seen = web, {}
    seen["flannel"] = talk(cluster)
    seen["links before"] = {node: links(cluster, node) for node in NODES}
    cluster.copy(ASK, "control", "/root/ask_on.py")
    urls = " ".join(f"http://{node}:{NODE_PORT}/" for node in NODES)
    ask = f"python3 /root/ask_on.py {urls}"
    cluster.on(
        "control",
        f"systemd-run --quiet --unit=ask --property=StandardOutput=truncate:/run/asked {ask}",
    )
    seen["refused"] = cluster.site()("--limit", "node2", check=False)
    cluster.on("node1", f"sed -i 's/^flannel-backend: .*/flannel-backend: none/' {CONFIG}")
    for node in NODES:
        drain = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data")
        cluster.kubectl(*drain, "--timeout=100s")
        cluster.on(node, f"systemctl stop {UNITS[node]}; ip link del cni0")
        cluster.on(node, f"systemctl start {UNITS[node]}")
        until(lambda: cluster.kubectl("get", "nodes", check=False), 60, "the API server")
        cluster.site()("--limit", node)
        until(lambda: cluster.is_ready(node), 60, f"{node} Ready")  # noqa: B023
        cluster.kubectl("uncordon", node)
        # For those that stay, as a user would: spread them over the nodes again.
        cluster.kubectl("rollout", "restart", "deployment/web")
        until(lambda: spread_over_both(cluster), 120, "a server on each node")
        seen[f"{node} moved"] = talk(cluster)
    for node in NODES:
        cluster.on(node, LEFT_OVERS)
    cluster.kubectl("annotate", "node", *NODES, *(f"{one}-" for one in annotations(cluster)))
    cluster.on("control", "sleep 5; systemctl stop ask")
    seen["asked"] = json.loads(cluster.on("control", "cat /run/asked"))
    return seen


# As in docs/k3s.md.
LEFT_OVERS = """
ip link del flannel.1
rm -rf /var/lib/rancher/k3s/agent/etc/cni /run/flannel /var/lib/cni/{flannel,networks/cbr0}
for tables in iptables ip6tables; do
    $tables-save | grep -v -i -e flannel -e CNI- | $tables-restore
done
"""


def spread_over_both(cluster) -> bool:
    pods = cluster.pods("web")
    ready = len(pods) == 2 and all(map(is_ready, pods))
    gone = len(cluster.all("pods", "-l", "app=web")) == 2
    return ready and gone and {one["spec"]["nodeName"] for one in pods} == set(NODES)


def talk(cluster) -> set[tuple[str, str]]:
    """Which nodes' pods reach which nodes' pods."""
    pods = {one["metadata"]["name"]: one for one in cluster.pods("web")}
    node = {name: pod["spec"]["nodeName"] for name, pod in pods.items()}
    return {
        (node[source], node[target])
        for source in pods
        for target, pod in pods.items()
        if cluster.http(source, pod["status"]["podIP"]) == target
    }


def links(cluster, node: str) -> set[str]:
    return set(cluster.on(node, "ls /sys/class/net").split())


def annotations(cluster) -> set[str]:
    found = set()
    for node in NODES:
        found |= set(cluster.get("node", node)["metadata"]["annotations"])
    return {name for name in found if name.startswith("flannel.alpha.coreos.com/")}


EVERY_WAY = {(source, target) for source in NODES for target in NODES}


def test_the_cluster_ran_on_flannel(moved):
    for found in moved["links before"].values():
        assert {"cni0", "flannel.1"} <= found and "headcni0" not in found
    assert moved["flannel"] == EVERY_WAY


def test_site_yml_refuses_a_node_whose_pods_are_flannels(moved):
    assert moved["refused"].code != 0
    said = moved["refused"].failures("node2")
    assert "which this node reaches by cni0, which is flannel's" in said
    assert "k3s runs its own flannel" in said and "--flannel-backend=none" in said
    assert "docs/k3s.md#from-flannel" in said


def test_pods_of_a_moved_node_and_of_one_that_is_not_talk(moved):
    assert moved["node1 moved"] == EVERY_WAY


def test_pods_are_on_headcni_in_the_end_and_talk(web, moved):
    assert moved["node2 moved"] == EVERY_WAY
    assert talk(web) == EVERY_WAY  # with flannel.1 gone too
    for node in NODES:
        on_it = [
            one["metadata"]["name"]
            for one in web.all("pods", "-A", "--field-selector", f"spec.nodeName={node}")
            if not one["spec"].get("hostNetwork")
        ]
        assert on_it and set(web.attachments(node)) == set(on_it)
    web.site().verify()
    assert web.site()().changed == set()


def test_nothing_of_flannel_is_in_the_way(web, moved):
    for node in NODES:
        found = links(web, node)
        assert not {"cni0", "flannel.1"} & found and "headcni0" in found
        assert "flannel" not in web.on(node, "ip route show table all; ip rule").lower()
        assert "flannel" not in web.on(node, "nft list ruleset 2>/dev/null").lower()
        assert web.on(node, "ls /etc/cni/net.d").split() == ["10-headcni.conflist"]
        left = "ls -d /var/lib/rancher/k3s/agent/etc/cni /run/flannel /var/lib/cni/networks/cbr0"
        assert not web.on(node, f"{left} 2>/dev/null", check=False).strip()
        said = web.on(node, "cat /var/lib/rancher/k3s/agent/etc/containerd/config.toml")
        assert "bin_dir" not in said and "conf_dir" not in said
    assert not annotations(web)


def test_who_asked_meanwhile_lost_next_to_nothing(moved, capsys):
    for url, counted in moved["asked"].items():
        with capsys.disabled():
            print(
                f"\n  {url}: {counted['lost']} of {counted['asked']} requests lost,"
                f" longest without an answer {counted['gap']:.1f} s",
                end="",
            )
        assert counted["asked"] > 300 and counted["lost"] <= counted["asked"] // 50
