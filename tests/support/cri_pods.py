"""Pods on a lab node by its containerd, with crictl."""

from __future__ import annotations

import json
import platform
import re

from lab import kubelet
from lab.image import base_root
from lab.images import BUSYBOX, image

CRICTL = "/opt/lab/cri/crictl 2>/dev/null"
CONFIG = "/etc/containerd/config.toml"
SECTION = '[plugins."io.containerd.grpc.v1.cri"]\n'


def start_debians_containerd(lab, node: str = "node1") -> None:
    """As its package configures it: it looks for plugins in /usr/lib/cni."""
    packaged = lab.on(node, f"cat {CONFIG}")
    assert re.search(r'bin_dir = "/usr/lib/cni"', packaged), packaged
    # What a node that is a container needs, put into the package's section.
    for_the_lab = kubelet.CONTAINERD.partition("\n")[2]
    start_containerd(lab, packaged.replace(SECTION, for_the_lab, 1), node)


def start_containerd(lab, config: str, node: str = "node1") -> None:
    """Debian's, with this configuration, and an image for pods."""
    archive = image(BUSYBOX, (base_root() / "bin/busybox").read_bytes(), platform.machine())
    drop_in = "/etc/systemd/system/containerd.service.d/lab.conf"
    for path, data in {
        "/root/busybox.tar": archive,
        CONFIG: config.encode(),
        drop_in: kubelet.CONTAINERD_UNIT.encode(),
        "/etc/crictl.yaml": b"runtime-endpoint: unix:///run/containerd/containerd.sock\n",
    }.items():
        lab.write(node, path, data)
    lab.on(node, "systemctl daemon-reload && systemctl restart containerd")
    lab.wait(node, "ctr version >/dev/null 2>&1")
    lab.on(node, "ctr -n k8s.io images import /root/busybox.tar")


def run_pod(
    lab, name: str, command: str, ports=(), annotations=None, node: str = "node1"
) -> tuple[str, str, str]:
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
    lab.write(node, f"/root/{name}-pod.json", json.dumps(pod).encode())
    lab.write(node, f"/root/{name}.json", json.dumps(container).encode())
    pod_id = lab.on(node, f"{CRICTL} runp /root/{name}-pod.json").strip()
    container_id = lab.on(
        node, f"{CRICTL} create {pod_id} /root/{name}.json /root/{name}-pod.json"
    ).strip()
    lab.on(node, f"{CRICTL} start {container_id}")
    shown = json.loads(lab.on(node, f"{CRICTL} inspectp {pod_id}"))
    return pod_id, container_id, shown["status"]["network"]["ip"]
