"""A k3s cluster on the lab: one server, one agent, and HeadCNI installed by hand on both."""

from __future__ import annotations

import json

import pytest
from k8s_cluster import NODES, Cluster, until
from lab_command import CHECKOUT
from leftovers import assert_nothing_left

from lab import tools


@pytest.fixture(scope="session")
def bare_cluster():
    """k3s as it is before anybody gave its pods a network."""
    if not tools.K3S.built:
        pytest.skip("k3s is not built: `python3 -m lab tools k3s`, some 11 minutes")
    command = Cluster("k8s")
    command("down")
    before = command.listing()
    command("up", "--nodes", str(len(NODES)), "--k3s")
    yield command
    command("down")
    assert_nothing_left(before, command.listing())


@pytest.fixture(scope="session")
def ready_before(bare_cluster):
    """How Ready each node was before it had a conflist."""
    found = {}
    for node in NODES:
        conditions = bare_cluster.get("node", node)["status"]["conditions"]
        (found[node],) = [one for one in conditions if one["type"] == "Ready"]
    return found


@pytest.fixture(scope="session")
def cluster(bare_cluster, ready_before, tmp_path_factory):
    """The same with the runtime on each node and a conflist, last, for the node's own range."""
    folder = tmp_path_factory.mktemp("dist")
    bare_cluster.run(".venv/bin/python", "plugins/cni/release.py", "--output", str(folder))
    tarball = next(folder.iterdir())
    name = tarball.name.removesuffix(".tar.gz")
    for node in NODES:
        bare_cluster.copy(tarball, node, "/root/runtime.tar.gz")
        for program in ("echo.py", "pod_watcher.py"):
            bare_cluster.copy(CHECKOUT / "tests/support" / program, node, f"/root/{program}")
        bare_cluster.on(
            node,
            "mkdir -p /opt/headcni/releases /opt/cni/bin /etc/cni/net.d"
            " && tar -xzf /root/runtime.tar.gz -C /opt/headcni/releases"
            f" && ln -sfn releases/{name} /opt/headcni/current"
            " && ln -sf /opt/headcni/current/bin/headcni* /opt/cni/bin/"
            " && ln -sf /opt/lab/cni/loopback /opt/cni/bin/",
        )
        cidr = until(lambda: bare_cluster.get("node", node)["spec"].get("podCIDR"))  # noqa: B023
        plugin = {
            "type": "headcni",
            "pod_cidr": cidr,
            "cluster_cidr": "10.42.0.0/16",
            "service_cidr": "10.43.0.0/16",
            "ipam": {"type": "headcni-ipam", "subnet": cidr},
            "capabilities": {"portMappings": True, "bandwidth": True},
        }
        conflist = {"cniVersion": "1.0.0", "name": "headcni", "plugins": [plugin]}
        text = json.dumps(conflist).encode()
        bare_cluster.write(node, "/etc/cni/net.d/10-headcni.conflist", text)
    for node in NODES:
        until(lambda: bare_cluster.is_ready(node), what=f"{node} Ready")  # noqa: B023
    return bare_cluster
