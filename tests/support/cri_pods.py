"""Pods on a lab node by its containerd, with crictl."""

from __future__ import annotations

import json
import platform

from lab import kubelet
from lab.image import base_root
from lab.images import BUSYBOX, image

CRICTL = "/opt/lab/cri/crictl 2>/dev/null"


def start_containerd(lab, config: str) -> None:
    """Debian's, on node1, with this configuration, and an image for pods."""
    archive = image(BUSYBOX, (base_root() / "bin/busybox").read_bytes(), platform.machine())
    drop_in = "/etc/systemd/system/containerd.service.d/lab.conf"
    for path, data in {
        "/root/busybox.tar": archive,
        "/etc/containerd/config.toml": config.encode(),
        drop_in: kubelet.CONTAINERD_UNIT.encode(),
        "/etc/crictl.yaml": b"runtime-endpoint: unix:///run/containerd/containerd.sock\n",
    }.items():
        lab.write("node1", path, data)
    lab.on("node1", "systemctl daemon-reload && systemctl restart containerd")
    lab.wait("node1", "ctr version >/dev/null 2>&1")
    lab.on("node1", "ctr -n k8s.io images import /root/busybox.tar")


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
