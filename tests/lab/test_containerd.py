"""Pods by Debian's containerd, driven with crictl."""

from __future__ import annotations

import json

import pytest

CRICTL = "/opt/lab/cri/crictl 2>/dev/null"


@pytest.fixture(scope="module")
def cri(containerd):
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


def run_pod(lab, name: str, command: str, ports=(), annotations=None) -> tuple[str, str, str]:
    """A pod with one container: their ids, and the pod's address."""
    pod = {
        "metadata": {"name": name, "namespace": "default", "uid": name, "attempt": 1},
        "log_directory": "/tmp",
        "annotations": annotations or {},
        "port_mappings": [{"container_port": c, "host_port": h, "protocol": 0} for h, c in ports],
        "linux": {},
    }
    container = {
        "metadata": {"name": name},
        "image": {"image": "lab.invalid/busybox:1"},
        "command": ["/bin/sh", "-c", command],
        "log_path": f"{name}.log",
        "linux": {},
    }
    lab.write("node1", f"/root/{name}-pod.json", json.dumps(pod).encode())
    lab.write("node1", f"/root/{name}.json", json.dumps(container).encode())
    pod_id = lab.on("node1", f"{CRICTL} runp /root/{name}-pod.json").strip()
    container_id = lab.on(
        "node1", f"{CRICTL} create {pod_id} /root/{name}.json /root/{name}-pod.json"
    ).strip()
    lab.on("node1", f"{CRICTL} start {container_id}")
    shown = json.loads(lab.on("node1", f"{CRICTL} inspectp {pod_id}"))
    return pod_id, container_id, shown["status"]["network"]["ip"]


def test_pods_start_talk_answer_on_a_host_port_and_stop_without_a_trace(cri):
    serve = "mkdir -p /www; echo hello > /www/index.html; httpd -f -p 80 -h /www"
    web, _, address = run_pod(cri, "web", serve, ports=[(8080, 80)])
    client, shell, own = run_pod(cri, "client", "sleep 1000")
    assert address.startswith("10.55.1.") and own.startswith("10.55.1.") and own != address

    get = f"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 3 {address} 80"
    cri.wait("node1", f'{CRICTL} exec {shell} sh -c "{get}" | grep -q hello')
    fetch = "import urllib.request as u; print(u.urlopen('http://{}:8080', timeout=5).read())"
    node = cri.inventory()["_meta"]["hostvars"]["node1"]["ansible_host"]
    assert "hello" in cri.on("node1", f'python3 -c "{fetch.format("127.0.0.1")}"')
    assert "hello" in cri.on("node2", f'python3 -c "{fetch.format(node)}"')

    for pod in (web, client):
        cri.on("node1", f"{CRICTL} stopp {pod} && {CRICTL} rmp {pod}")
    cri.wait("node1", "! ls /sys/class/net | grep ^hc")
    assert ": 10.55." not in cri.on("node1", "nft list table inet headcni")


def test_a_container_sees_its_address_its_mtu_and_its_limit(cri):
    limit = {"kubernetes.io/ingress-bandwidth": "8M", "kubernetes.io/egress-bandwidth": "8M"}
    pod, container, address = run_pod(cri, "limited", "sleep 1000", annotations=limit)
    shown = cri.on("node1", f"{CRICTL} exec {container} ip addr show eth0")
    assert address in shown and "mtu 1280" in shown
    assert "rate 8Mbit" in cri.on("node1", "tc qdisc show")
    cri.on("node1", f"{CRICTL} rmp -f {pod}")


def test_port_forward_reaches_a_pod(cri):
    serve = "mkdir -p /www; echo forwarded > /www/index.html; httpd -f -p 80 -h /www"
    pod, _, _ = run_pod(cri, "forwarded", serve)
    cri.on("node1", f"timeout 20 {CRICTL} port-forward {pod} 9090:80 >/dev/null 2>&1 & sleep 1")
    fetch = (
        "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9090', timeout=5).read())"
    )
    cri.wait("node1", f'python3 -c "{fetch}" | grep -q forwarded')
    cri.on("node1", f"{CRICTL} rmp -f {pod}")


def test_a_failing_add_is_told_to_the_operator_in_our_words(cri):
    serve = "sleep 1000"
    run_pod(cri, "first", serve, ports=[(8081, 80)])
    broken = {
        "metadata": {"name": "second", "namespace": "default", "uid": "2", "attempt": 1},
        "port_mappings": [{"container_port": 80, "host_port": 8081, "protocol": 0}],
        "linux": {},
    }
    cri.write("node1", "/root/second.json", json.dumps(broken).encode())
    said = cri.on("node1", "/opt/lab/cri/crictl runp /root/second.json 2>&1", check=False)
    assert "host port 8081/tcp leads to another pod already" in said
    assert "default/first" in said
    cri.on("node1", f"{CRICTL} rmp -fa")
    cri.wait("node1", "! ls /sys/class/net | grep ^hc")
