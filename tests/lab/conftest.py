"""Nodes that have joined a tailnet, with the runtime installed on them."""

from __future__ import annotations

import json
import urllib.request

import pytest
from cri_pods import CRICTL, start_containerd
from lab_command import CHECKOUT, LabCommand

from lab import kubelet


@pytest.fixture(scope="session")
def bare():
    """Nodes that nobody has touched, whatever other tests have made of the shared lab's."""
    command = LabCommand("bare")
    command("up", "--nodes", "2")
    yield command
    command("down")


@pytest.fixture(scope="session")
def joined(lab):
    lab.run(".venv/bin/ansible-playbook", "-i", "inventories/lab", "tests/support/joined.yml")
    return lab


@pytest.fixture(scope="session")
def runtime(joined, tmp_path_factory):
    """The release, unpacked and linked on each node: the whole installation."""
    folder = tmp_path_factory.mktemp("dist")
    joined.run(".venv/bin/python", "plugins/cni/release.py", "--output", str(folder))
    tarball = next(folder.iterdir())
    name = tarball.name.removesuffix(".tar.gz")
    for node in ("node1", "node2"):
        joined.copy(tarball, node, "/root/runtime.tar.gz")
        joined.copy(CHECKOUT / "tests/support/echo.py", node, "/root/echo.py")
        joined.on(
            node,
            "mkdir -p /opt/headcni/releases /opt/cni/bin /etc/cni/net.d"
            " && tar -xzf /root/runtime.tar.gz -C /opt/headcni/releases"
            f" && ln -sfn releases/{name} /opt/headcni/current"
            " && ln -sf /opt/lab/cni/* /opt/cni/bin/"
            " && cd /opt/headcni/current/bin && ln -sf $PWD/headcni* $PWD/loopback /opt/cni/bin/",
        )
    return joined


@pytest.fixture(scope="session")
def approved(runtime):
    """Each node advertises its pods' ranges, and Headscale approves them."""
    for number in (1, 2):
        runtime.on(
            f"node{number}",
            f"tailscale set --advertise-routes=10.55.{number}.0/24,fd55:0:0:{number}::/64",
        )
    known = runtime.inventory()["lab"]["vars"]
    with open(f"{known['lab_dir']}/headscale-api-key") as file:
        key = file.read().strip()

    def api(path: str, body: dict | None = None) -> dict:
        request = urllib.request.Request(
            f"{known['lab_headscale_url']}/api/v1/{path}",
            data=json.dumps(body).encode() if body else None,
            headers={"Authorization": f"Bearer {key}"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    for node in api("node")["nodes"]:
        if number := node["name"].removeprefix("node"):
            routes = [f"10.55.{number}.0/24", f"fd55:0:0:{number}::/64"]
            api(f"node/{node['id']}/approve_routes", {"routes": routes})
    for number in (1, 2):
        runtime.wait(
            f"node{number}",
            f"ip route show table 52 | grep -q 10.55.{3 - number}.0/24"
            f" && ip -6 route show table 52 | grep -q fd55:0:0:{3 - number}::/64",
        )
    return runtime


@pytest.fixture(scope="session")
def containerd(runtime):
    """Debian's containerd on node1. What the lab's sandbox needs is set here, and only here."""
    start_containerd(runtime, kubelet.CONTAINERD)
    yield runtime
    runtime.on("node1", "/opt/lab/cri/crictl rmp -fa; systemctl stop containerd", check=False)


@pytest.fixture(scope="module")
def cri(containerd):
    """containerd with our conflist, and no pods on it."""
    plugin = {
        "type": "headcni",
        "pod_cidr": "10.55.1.0/24",
        "cluster_cidr": "10.55.0.0/16",
        "bridge": "headcni0",
        "ipam": {"type": "headcni-ipam", "subnet": "10.55.1.0/24"},
        "capabilities": {"portMappings": True, "bandwidth": True, "mac": True},
    }
    conflist = {"cniVersion": "1.0.0", "name": "cri", "plugins": [plugin]}
    containerd.write("node1", "/etc/cni/net.d/10-headcni.conflist", json.dumps(conflist).encode())
    containerd.wait("node1", f'{CRICTL} info | grep -q \'"lastCNILoadStatus": "OK"\'')
    yield containerd
    containerd.on(
        "node1",
        f"{CRICTL} rmp -fa; rm -f /etc/cni/net.d/10-headcni.conflist; ip link del headcni0",
        check=False,
    )
