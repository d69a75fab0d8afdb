"""Pods by Debian's containerd, driven with crictl."""

from __future__ import annotations

import json

from cri_pods import CRICTL, run_pod


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
