"""The specs of critest that a network can break, at Debian's containerd; and Debian's podman, whose
CNI back end is on our conflist.

`make test-runtimes` builds critest first, and podman comes from the nodes' Debian mirror.
"""

from __future__ import annotations

import json
import platform

import pytest
from cri_pods import CRICTL, run_pod

from lab import tools
from lab.image import base_root
from lab.images import BUSYBOX, web_server

pytestmark = pytest.mark.timeout(600)
WEB_SERVER = "lab.invalid/web-server:1"
FOCUS = (
    r"Networking",
    r"basic operations on PodSandbox",
    r"HostNetwork is",
    r"support portforward \[Conformance\]",
)
SPECS = {
    "runtime should support running PodSandbox [Conformance]",
    "runtime should support stopping PodSandbox [Conformance]",
    "runtime should support removing PodSandbox [Conformance]",
    "runtime should support preserving PodSandbox attributes [Conformance]",
    "runtime should support DNS config [Conformance]",
    "runtime should support set hostname [Conformance]",
    "runtime should support port mapping with only container port [Conformance]",
    "runtime should support port mapping with host port and container port [Conformance]",
    "runtime should support HostNetwork is true",
    "runtime should support HostNetwork is false",
    "runtime should support portforward [Conformance]",
}
# The node is a container, without a systemd that would give out cgroups.
CONTAINERS = """\
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "cni"
cni_plugin_dirs = ["/opt/cni/bin"]
network_config_dir = "/etc/cni/net.d"
"""
STORAGE = (
    '[storage]\ndriver = "vfs"\nrunroot = "/run/containers"\ngraphroot = "/var/lib/containers"\n'
)


def test_the_specs_of_critest_that_a_network_can_break_pass(cri, capsys):
    assert tools.CRITEST.built, "run `make test-runtimes`, which builds critest"
    archive = web_server(WEB_SERVER, (base_root() / "bin/busybox").read_bytes(), platform.machine())
    cri.write("node1", "/root/web-server.tar", archive)
    cri.on("node1", "ctr -n k8s.io images import /root/web-server.tar")
    images = {"defaultTestContainerImage": BUSYBOX, "webServerTestImage": WEB_SERVER}
    cri.write("node1", "/root/images.yaml", json.dumps(images).encode())
    cri.copy(tools.CRITEST.bin / "critest", "node1", "/root/critest")
    said = cri.on(
        "node1",
        "chmod +x /root/critest && /root/critest --test-images-file=/root/images.yaml"
        f" --ginkgo.focus='{'|'.join(FOCUS)}' --ginkgo.json-report=/root/critest.json"
        " --ginkgo.no-color --ginkgo.succinct 2>&1",
        check=False,
    )
    (report,) = json.loads(cri.on("node1", "cat /root/critest.json"))
    found = {
        one["LeafNodeText"]: one["State"]
        for one in report["SpecReports"]
        if one["LeafNodeType"] == "It" and one["State"] != "skipped"
    }
    with capsys.disabled():
        print(f"\n  critest: {len(found)} specs in {report['RunTime'] / 1e9:.0f} s", end="")
    assert found == dict.fromkeys(SPECS, "passed"), said[-6000:]
    cri.wait("node1", "! ls /sys/class/net | grep ^hc")


@pytest.fixture(scope="module")
def podman(cri):
    install = "apt-get install -qq -y --no-install-recommends podman"
    quiet = "DEBIAN_FRONTEND=noninteractive"
    said = cri.on(
        "node1",
        f"(apt-get update -qq && {quiet} {install}) >/run/apt.log 2>&1 || tail -3 /run/apt.log",
    )
    if said.strip():
        pytest.skip(f"podman could not be installed: {said.strip()}")
    cri.write("node1", "/etc/containers/containers.conf", CONTAINERS.encode())
    cri.write("node1", "/etc/containers/storage.conf", STORAGE.encode())
    cri.on("node1", "podman load -q -i /root/busybox.tar")
    yield cri
    cri.on("node1", "podman rm -fa", check=False)


def test_podmans_cni_back_end_networks_a_container_as_a_pod(podman):
    assert podman.on("node1", "podman info -f '{{.Host.NetworkBackend}}'").strip() == "cni"
    serve = "mkdir -p /www; echo from {} > /www/index.html; exec httpd -f -p 80 -h /www"
    pod, shell, pods_address = run_pod(podman, "beside", serve.format("pod"))
    run = f"podman run -d --name guest --network cri -p 8099:80 --entrypoint /bin/sh {BUSYBOX}"
    podman.on("node1", f"{run} -c '{serve.format('guest')}'")
    (guest,) = json.loads(podman.on("node1", "podman inspect guest"))
    address = guest["NetworkSettings"]["Networks"]["cri"]["IPAddress"]
    assert address.startswith("10.55.1.") and address != pods_address
    assert address in podman.on("node1", "podman exec guest ip addr show eth0")

    get = "printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 3 {} 80"
    inside = podman.on("node1", f'podman exec guest sh -c "{get.format(pods_address)}"')
    assert "from pod" in inside
    podman.wait("node1", f'{CRICTL} exec {shell} sh -c "{get.format(address)}" | grep -q guest')
    node = podman.inventory()["_meta"]["hostvars"]["node1"]["ansible_host"]
    assert "from guest" in podman.on("node2", f"curl -sS -m 5 http://{node}:8099/")

    podman.on("node1", f"podman rm -f guest && {CRICTL} stopp {pod} && {CRICTL} rmp {pod}")
    podman.wait("node1", "! ls /sys/class/net | grep ^hc")
    assert "10.55.1" not in podman.on(
        "node1", "nft list table inet headcni | grep -e dnat -e :8099", False
    )
    assert not podman.on("node1", f"podman ps -aq; {CRICTL} pods -q").strip()
