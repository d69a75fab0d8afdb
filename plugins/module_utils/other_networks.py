# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Networks of other programs on this node: whose an interface is, how its range can be changed, and
which other CNI is at work."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .shared import conflist, container_runtimes

GUIDE = container_runtimes.MIGRATION
_SUBNET_ENV = "run/flannel/subnet.env"


class Owner(NamedTuple):
    """Whose an interface is."""

    name: str
    change: str  # how to give it another range, or to remove it


_DOCKER_BRIDGE = Owner(
    "Docker's", "remove that network (docker network ls), or make it anew with another --subnet"
)
_OWNERS = (
    (r"docker0", Owner("Docker's", "give Docker another one by bip in /etc/docker/daemon.json")),
    (r"docker_gwbridge", _DOCKER_BRIDGE),
    (r"br-[0-9a-f]{12}", _DOCKER_BRIDGE),
    (
        r"(?:cni-)?podman\d*",
        Owner(
            "podman's",
            "give podman another one by default_subnet in /etc/containers/containers.conf "
            "(a network of your own: podman network rm)",
        ),
    ),
    (r"virbr\d+", Owner("libvirt's", "give it another one by virsh net-edit default")),
    (r"lxcbr\d+", Owner("LXC's", "give it another one by LXC_ADDR in /etc/default/lxc-net")),
    (r"lxdbr\d+", Owner("LXD's", "give it another one by lxc network set NAME ipv4.address")),
    (r"incusbr\d+", Owner("Incus'", "give it another one by incus network set NAME ipv4.address")),
    (r"cilium_\w+", Owner("Cilium's", "remove Cilium from the cluster")),
    (r"vxlan\.calico|tunl0|cali\w+", Owner("Calico's", "remove Calico from the cluster")),
    (r"weave", Owner("Weave Net's", "remove Weave Net from the cluster")),
    (r"kube-bridge", Owner("kube-router's", "let kube-router give pods no network")),
    (r"antrea-gw0", Owner("Antrea's", "remove Antrea from the cluster")),
)
_FLANNEL = Owner(
    "flannel's",
    f"move this node's pods as {GUIDE} says: drain it, turn flannel off, then ip link del {{}}",
)
_BRIDGE = Owner("of pods of another CNI", "drain this node, then ip link del {}")


class Agent(NamedTuple):
    """The process of a CNI that keeps its conflist in place."""

    name: str
    plugin: str  # the type of its plugin in a conflist


AGENTS = {
    "flanneld": Agent("flannel", "flannel"),
    "cilium-agent": Agent("Cilium", "cilium-cni"),
    "calico-node": Agent("Calico", "calico"),
    "weaver": Agent("Weave Net", "weave-net"),
    "antrea-agent": Agent("Antrea", "antrea"),
    "kube-ovn-daemon": Agent("Kube-OVN", "kube-ovn"),
    "aws-k8s-agent": Agent("the AWS VPC CNI", "aws-cni"),
}


def owner_of(interface: str, root: str = "/") -> Owner | None:
    """None if nothing is known of it: a card, or a tunnel of the operator's."""
    if interface == "cni0" or interface.startswith("flannel"):
        is_flannel = interface != "cni0" or has_flannel(root)
        found = _FLANNEL if is_flannel else _BRIDGE
        return found._replace(change=found.change.format(interface))
    return next((owner for name, owner in _OWNERS if re.fullmatch(name, interface)), None)


def has_flannel(root: str = "/") -> bool:
    """Whether flannel runs here, or has run since the boot."""
    links = os.path.join(root, "sys/class/net")
    known = os.listdir(links) if os.path.isdir(links) else []
    return os.path.exists(os.path.join(root, _SUBNET_ENV)) or any(
        name.startswith("flannel") for name in known
    )


def interface_notes(interfaces: Sequence[str], root: str = "/") -> list[str]:
    """Which other CNI has left interfaces, or still uses them."""
    found: dict[str, list[str]] = {}
    for name in sorted(interfaces):
        owner = owner_of(name, root) if _is_of_a_cni(name) else None
        if owner:
            found.setdefault(owner.name, []).append(name)
    return [
        f"other networks: {', '.join(names[:3])}, {whose}: pods that it has networked keep it, and "
        "HeadCNI networks new ones"
        for whose, names in found.items()
    ]


def _is_of_a_cni(name: str) -> bool:
    """One interface of each is enough to know it by: Calico has one more for each pod."""
    return bool(
        re.fullmatch(r"cni0|flannel.*|cilium_host|vxlan\.calico|weave|kube-bridge|antrea-gw0", name)
    )


def rivals(seen: conflist.Survey, root: str = "/") -> list[str]:
    """Other CNIs that run here and keep their own conflist where ours is to be: pods would use
    theirs, or now theirs and now ours."""
    at_work = container_runtimes.in_containers_too(tuple(AGENTS), root)
    wrong = []
    for process in sorted(at_work):
        agent = AGENTS[process]
        files = [name for name, types in _plugins(seen) if agent.plugin in types]
        if files:
            guide = f" ({GUIDE} shows how, node by node)" if agent.name == "flannel" else ""
            wrong.append(
                f"other networks: {agent.name} runs on this node and keeps {', '.join(files)} in "
                f"{seen.directory}, so pods would not use HeadCNI reliably: remove {agent.name} "
                f"from the cluster first{guide}"
            )
    return wrong


def _plugins(seen: conflist.Survey) -> Iterator[tuple[str, set[str]]]:
    for name, content in sorted(seen.files.items()):
        if name.endswith(conflist.SUFFIX):
            continue
        try:
            conf = json.loads(content)
        except (ValueError, RecursionError):
            continue
        listed = conf.get("plugins", [conf]) if isinstance(conf, dict) else []
        if isinstance(listed, list):
            yield name, {str(one.get("type")) for one in listed if isinstance(one, dict)}
