"""k3s on the lab's nodes: a real API server, kubelets and containerds. node1 is the server.

It is set up as its own installer does it, with --flannel-backend=none: the nodes have no network
for pods and are not Ready until somebody gives them one. What only a node within a container needs
is in a drop-in and in files named lab, and nowhere else.

`pack` runs once, after the build; `files` are what a node boots with.
"""

from __future__ import annotations

import platform
import re
import secrets
import shutil
from pathlib import Path

from . import images, kubelet
from .layout import Lab, Plan

# One program goes by many names, as in k3s' own releases.
NAMES = ("containerd", "ctr", "crictl", "kubectl")
# What a release has inside; built without its bundle it needs them from outside.
MANIFESTS = ("rolebindings.yaml", "ccm.yaml", "coredns.yaml")
HOME = "/opt/lab/k3s"  # where a node sees what was built
# What k3s puts in the place of its own names before it stages coredns.yaml.
DNS = {
    "%{CLUSTER_DOMAIN}%": "cluster.local",
    "%{CLUSTER_DNS}%": "10.43.0.10",
    "%{CLUSTER_DNS_LIST}%": "[10.43.0.10]",
    "%{CLUSTER_DNS_IPFAMILYPOLICY}%": "SingleStack",
}

UNIT = """\
[Unit]
Description=Lightweight Kubernetes
After=network-online.target
Wants=network-online.target

[Service]
Type=notify
Environment=PATH={home}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ExecStart={home}/bin/k3s {role}
KillMode=process
Delegate=yes
TasksMax=infinity
TimeoutStartSec=0
Restart=always
RestartSec=5s

[Install]
WantedBy=multi-user.target
"""

# Without INVOCATION_ID k3s does not ask the node's systemd for cgroups: in a container that has
# none of the controllers.
DROP_IN = f"""\
{kubelet.UNIT}ExecStart=
ExecStart=/usr/bin/env -u INVOCATION_ID {HOME}/bin/k3s {{role}}
"""
CONTAINERD = 'imports = ["/etc/lab/containerd.toml"]\n{{ template "base" . }}\n'
CONTAINERD_LAB = """\
version = 3
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  disable_apparmor = true
"""


def pack(module: Path, home: Path) -> None:
    """Lay out home/bin as k3s wants to find it on its PATH, and home/manifests."""
    (home / "bin" / "server").rename(home / "bin" / "k3s")
    for name in NAMES:
        (home / "bin" / name).symlink_to("k3s")
    (home / "manifests").mkdir()
    for name in MANIFESTS:
        shutil.copyfile(module / "manifests" / name, home / "manifests" / name)


def unit(plan: Plan, machine: str) -> str:
    return "k3s" if machine == plan.server else "k3s-agent"


def make_token(lab: Lab) -> None:
    """What agents join the server with, made anew with each lab."""
    lab.k3s_token.touch(mode=0o600)
    lab.k3s_token.write_text(secrets.token_hex(16))


def files(
    lab: Lab, plan: Plan, machine: str, home: Path, coredns: Path, base: Path
) -> dict[str, bytes]:
    """What the node's own layer has of k3s; `home` is what was built, `base` the base image."""
    role = "server" if machine == plan.server else "agent"
    units = f"etc/systemd/system/{unit(plan, machine)}.service"
    state = "var/lib/rancher/k3s"
    found = {
        "etc/rancher/k3s/config.yaml": _config(lab, plan, machine),
        units: UNIT.format(home=HOME, role=role),
        f"{units}.d/lab.conf": DROP_IN.format(role=role),
        "etc/lab/kubelet-prepare": kubelet.PREPARE,
        "etc/lab/containerd.toml": CONTAINERD_LAB,
        "etc/profile.d/k3s.sh": f"PATH=$PATH:{HOME}/bin\n",
        f"{state}/agent/etc/containerd/config-v3.toml.tmpl": CONTAINERD,
        f"{state}/agent/etc/kubelet.conf.d/10-lab.conf": kubelet.CONFIG,
    }
    made = {path: text.encode() for path, text in found.items()}
    arch = platform.machine()
    for name, content in (
        ("busybox", images.image(images.BUSYBOX, (base / "bin/busybox").read_bytes(), arch)),
        ("coredns", images.coredns((coredns / "coredns").read_bytes(), arch)),
    ):
        made[f"{state}/agent/images/{name}.tar"] = content
    if role == "server":
        for name in MANIFESTS:
            text = (home / "manifests" / name).read_text()
            made[f"{state}/server/manifests/{name}"] = _filled_in(text).encode()
    return made


def _filled_in(manifest: str) -> str:
    for name, value in DNS.items():
        manifest = manifest.replace(name, value)
    return re.sub(r'image: ".*coredns.*"', f"image: {images.COREDNS}", manifest)


def _config(lab: Lab, plan: Plan, machine: str) -> str:
    """As a user would have it in /etc/rancher/k3s/config.yaml; the last two lines are the lab's:
    its nodes' disks are overlays already, and nothing is fetched."""
    address = plan.address(machine)
    lines = [
        f"token: {lab.k3s_token.read_text().strip()}",
        f"node-ip: {address}",
    ]
    if machine == plan.server:
        lines += [
            "flannel-backend: none",
            "disable-network-policy: true",
            "disable-helm-controller: true",
            "disable: [servicelb, traefik, local-storage, metrics-server]",
        ]
    else:
        lines.append(f"server: https://{plan.address(plan.server)}:6443")
    lines += ["snapshotter: native", f"pause-image: {images.BUSYBOX}"]
    return "\n".join(lines) + "\n"
