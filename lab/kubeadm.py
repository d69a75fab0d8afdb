"""Kubernetes on the lab's nodes, by kubeadm: node1 is the control plane, the others join it.

It is set up as kubeadm and the packages of Kubernetes do it: kubelet is a unit, the control plane
is static pods, kube-proxy and CoreDNS are pods, and all of it runs on Debian's containerd. No
network for pods is put on it: nodes are not Ready until somebody gives them one. What only a node
within a container needs is in a drop-in and in files named lab, and nowhere else.

`pack` runs once, after the build; `files` are what a node boots with.
"""

from __future__ import annotations

import platform
from pathlib import Path

from . import images, kubelet
from .layout import Plan

# One program goes by many names.
COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler")
ON_NODES = ("kubeadm", "kubectl", "kubelet")  # what its packages put in /usr/bin
POD_SUBNET, SERVICE_SUBNET = "10.56.0.0/16", "10.96.0.0/12"
POD_SUBNET6, SERVICE_SUBNET6 = "fd56::/56", "fd96::/112"
IMAGES = "etc/lab/images"

# Of its checks only the one that wants cgroup v2.
PASS_OVER = ("--ignore-preflight-errors=SystemVerification",)
INIT = ("kubeadm", "init", "--config=/etc/lab/kubeadm.yaml", *PASS_OVER)
# As it says itself when it is done, so that root's kubectl needs no options.
AFTER_INIT = "mkdir -p /root/.kube && ln -sf /etc/kubernetes/admin.conf /root/.kube/config"
HOW_TO_JOIN = ("kubeadm", "token", "create", "--print-join-command")

# These two as its packages have them.
UNIT = """\
[Unit]
Description=kubelet: The Kubernetes Node Agent
Wants=network-online.target
After=network-online.target

[Service]
ExecStart=/usr/bin/kubelet
Restart=always
StartLimitInterval=0
RestartSec=10

[Install]
WantedBy=multi-user.target
"""
DROP_IN = """\
[Service]
Environment="KUBELET_KUBECONFIG_ARGS=--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf \
--kubeconfig=/etc/kubernetes/kubelet.conf"
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
EnvironmentFile=-/etc/default/kubelet
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS \
$KUBELET_EXTRA_ARGS
"""
LAB_DROP_IN = f"""\
{kubelet.UNIT}Environment="KUBELET_EXTRA_ARGS=--config-dir=/etc/lab/kubelet.conf.d{{more}}"
"""
CONTAINERD = 'version = 2\nimports = ["/etc/lab/containerd.toml"]\n'
# Images are the lab's, pods may be on the control plane too, and kube-proxy leaves alone what is
# the whole machine's.
CONFIG = """\
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
localAPIEndpoint:
  advertiseAddress: {address}
nodeRegistration:
  imagePullPolicy: Never
  taints: []
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: {version}
imageRepository: lab.invalid
networking:
  podSubnet: {pods}
  serviceSubnet: {services}
dns:
  imageTag: "1"
etcd:
  local:
    imageTag: "1"
---
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
conntrack:
  maxPerCore: 0
  tcpEstablishedTimeout: 0s
  tcpCloseWaitTimeout: 0s
"""
FORWARDING = "net.ipv4.ip_forward = 1\n"
FORWARDING6 = "net.ipv6.conf.all.forwarding = 1\nnet.ipv6.conf.default.forwarding = 1\n"
IPTABLES = "usr/sbin/xtables-nft-multi"


def ranges(plan: Plan) -> tuple[list[str], list[str]]:
    """Of pods and of services."""
    if plan.dual_stack:
        return [POD_SUBNET, POD_SUBNET6], [SERVICE_SUBNET, SERVICE_SUBNET6]
    return [POD_SUBNET], [SERVICE_SUBNET]


def pack(home: Path) -> None:
    for name in (*COMPONENTS, "etcd", *ON_NODES):
        (home / "bin" / name).symlink_to("kubernetes")


def files(
    plan: Plan, machine: str, version: str, built: Path, coredns: Path, base: Path
) -> dict[str, bytes]:
    """What the node's own layer has of Kubernetes; `built` is where its program is."""
    units = "usr/lib/systemd/system/kubelet.service"
    more = ""
    if plan.dual_stack:
        more = f" --node-ip={plan.address(machine)},{plan.address6(machine)}"
    found = {
        "etc/sysctl.d/k8s.conf": FORWARDING + FORWARDING6 * plan.dual_stack,  # it asks for that
        units: UNIT,
        f"{units}.d/10-kubeadm.conf": DROP_IN,
        "etc/systemd/system/kubelet.service.d/lab.conf": LAB_DROP_IN.format(more=more),
        "etc/lab/kubelet-prepare": kubelet.PREPARE,
        "etc/lab/kubelet.conf.d/10-lab.conf": kubelet.CONFIG,
        "etc/containerd/config.toml": CONTAINERD,
        "etc/lab/containerd.toml": kubelet.CONTAINERD,
        "etc/systemd/system/containerd.service.d/lab.conf": kubelet.CONTAINERD_UNIT,
        "etc/crictl.yaml": "runtime-endpoint: unix:///run/containerd/containerd.sock\n",
    }
    if machine == plan.server:
        pods, services = map(",".join, ranges(plan))
        found["etc/lab/kubeadm.yaml"] = CONFIG.format(
            address=plan.address(machine), version=version, pods=pods, services=services
        )
    made = {path: text.encode() for path, text in found.items()}
    arch = platform.machine()
    for name, content in (
        ("busybox", images.image(images.BUSYBOX, (base / "bin/busybox").read_bytes(), arch)),
        ("coredns", images.coredns((coredns / "coredns").read_bytes(), arch)),
        ("kubernetes", _image((built / "kubernetes").read_bytes(), version, base, arch)),
    ):
        made[f"{IMAGES}/{name}.tar"] = content
    return made


def _image(program: bytes, version: str, base: Path, arch: str) -> bytes:
    """Of all components, and of Debian's iptables, which kube-proxy works with."""
    tags = [f"lab.invalid/{name}:{version}" for name in COMPONENTS]
    # And what iptables loads for its matches and targets.
    loaded = (str(path.relative_to(base)) for path in base.glob("usr/lib/*/xtables/*.so"))
    held = {"usr/local/bin/kubernetes": program, **images.taken(base, (IPTABLES, *loaded))}
    links = {f"usr/local/bin/{name}": "kubernetes" for name in (*COMPONENTS, "etcd")}
    for name in ("iptables", "ip6tables"):
        for what in ("", "-save", "-restore"):
            links[f"usr/sbin/{name}{what}"] = "xtables-nft-multi"
    return images.kubernetes([*tags, "lab.invalid/etcd:1"], held, links, arch)
