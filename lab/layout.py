"""Where a lab keeps its things and what it calls them.

Every name carries the lab's id, which comes from the checkout's path. So two checkouts can run
labs side by side, and whatever a killed run left behind is found again by name alone. One checkout
can have further labs, told apart by HEADCNI_LAB: the tests use that, so they leave yours alone.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

CHECKOUT = Path(__file__).resolve().parent.parent
CONTROL = "control"
MOST_NODES, MOST_VMS = 200, 40  # an underlay has 254 addresses


class LabError(Exception):
    """One line that says what is wrong and what to do; the command line prints it and exits 1."""


def cache_dir() -> Path:
    """Outside the checkout, so that a fresh clone does not build everything again."""
    if chosen := os.environ.get("HEADCNI_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headcni"


@dataclass(frozen=True)
class Lab:
    """The names and places of one checkout's lab."""

    id: str
    dir: Path

    @classmethod
    def of_this_checkout(cls) -> Lab:
        return cls.named(os.environ.get("HEADCNI_LAB", ""))

    @classmethod
    def named(cls, name: str) -> Lab:
        digest = hashlib.sha256(f"{CHECKOUT} {name}".encode()).hexdigest()[:5]
        base = Path(os.environ.get("HEADCNI_LAB_DIR") or "/var/lib/headcni-lab")
        return cls(digest, base.absolute() / digest)

    @property
    def prefix(self) -> str:
        """Starts the name of each namespace, machine and cgroup of this lab."""
        return f"hclab-{self.id}"

    @property
    def host_link(self) -> str:
        """The one interface the lab adds to the host; 15 characters are all a link may have."""
        return f"hclab-{self.id}"

    def netns(self, node: str) -> str:
        return f"{self.prefix}-{node}"

    @property
    def switch(self) -> str:
        """The namespace with the bridge that all nodes hang on, and with the way out."""
        return f"{self.prefix}-switch"

    def node_dir(self, node: str) -> Path:
        return self.dir / "nodes" / node

    def root(self, node: str) -> Path:
        return self.node_dir(node) / "root"

    @property
    def ssh_key(self) -> Path:
        return self.dir / "ssh" / "id_ed25519"

    @property
    def ssh_config(self) -> Path:
        return self.dir / "ssh" / "config"

    @property
    def api_key(self) -> Path:
        return self.dir / "headscale-api-key"

    @property
    def k3s_token(self) -> Path:
        return self.dir / "k3s-token"

    @property
    def kubeconfig(self) -> Path:
        """The cluster's administrator, where the lab has a cluster."""
        return self.dir / "kubeconfig"

    @property
    def plan_file(self) -> Path:
        return self.dir / "plan.json"


@dataclass(frozen=True)
class Plan:
    """What this lab looks like once it is up. Written last, so it exists only for a whole lab."""

    underlay: ipaddress.IPv4Network
    underlay6: ipaddress.IPv6Network
    nodes: tuple[str, ...]
    tailscale_version: str
    cluster: str = ""  # what is on the nodes: k3s, kubeadm or nothing
    vms: tuple[str, ...] = ()
    accelerator: str = ""  # what runs the virtual machines: kvm or tcg
    suites: tuple[str, ...] = ()  # the nodes' Debian releases, in turn; Debian 12 if empty
    headscale: str = ""  # its release; if empty, the one that the lab pins
    dual_stack: bool = False  # whether nodes, pods and services of the cluster have IPv6, too

    @property
    def k3s(self) -> bool:
        return self.cluster == "k3s"

    @property
    def kubeadm(self) -> bool:
        return self.cluster == "kubeadm"

    @property
    def server(self) -> str:
        """The node that the cluster's control plane is on."""
        return self.nodes[0]

    @property
    def members(self) -> tuple[str, ...]:
        """What site.yml makes nodes of the mesh."""
        return (*self.nodes, *self.vms)

    @property
    def machines(self) -> tuple[str, ...]:
        return (CONTROL, *self.members)

    def number(self, machine: str) -> int:
        """The same whatever else the lab has: it grows without anybody moving."""
        if is_vm(machine):
            return MOST_NODES + 1 + self.vms.index(machine)
        return (CONTROL, *self.nodes).index(machine)

    def address(self, machine: str) -> ipaddress.IPv4Address:
        return self.underlay[10 + self.number(machine)]

    def address6(self, machine: str) -> ipaddress.IPv6Address:
        return self.underlay6[10 + self.number(machine)]

    @property
    def gateway(self) -> ipaddress.IPv4Address:
        return self.underlay[1]

    @property
    def gateway6(self) -> ipaddress.IPv6Address:
        return self.underlay6[1]

    @property
    def host(self) -> ipaddress.IPv4Address:
        return self.underlay[2]

    @property
    def host6(self) -> ipaddress.IPv6Address:
        return self.underlay6[2]

    @property
    def headscale_url(self) -> str:
        return f"http://{self.address(CONTROL)}:8080"

    @property
    def mirror_url(self) -> str:
        return f"http://{self.address(CONTROL)}:8081"

    def save(self, path: Path) -> None:
        text = json.dumps(
            {
                "underlay": str(self.underlay),
                "underlay6": str(self.underlay6),
                "nodes": list(self.nodes),
                "tailscale_version": self.tailscale_version,
                "cluster": self.cluster,
                "vms": list(self.vms),
                "accelerator": self.accelerator,
                "suites": list(self.suites),
                "headscale": self.headscale,
                "dual_stack": self.dual_stack,
            },
            indent=2,
        )
        temporary = path.with_suffix(".new")
        temporary.write_text(text + "\n")
        temporary.rename(path)

    @classmethod
    def load(cls, lab: Lab) -> Plan:
        try:
            known = json.loads(lab.plan_file.read_text())
        except FileNotFoundError:
            raise LabError("the lab is not up: run `make up` first") from None
        return cls(
            ipaddress.IPv4Network(known["underlay"]),
            ipaddress.IPv6Network(known["underlay6"]),
            tuple(known["nodes"]),
            known["tailscale_version"],
            known.get("cluster", ""),
            tuple(known.get("vms", ())),
            known.get("accelerator", ""),
            tuple(known.get("suites", ())),
            known.get("headscale", ""),
            known.get("dual_stack", False),
        )


def node_names(count: int) -> Iterator[str]:
    return (f"node{number}" for number in range(1, count + 1))


def vm_names(count: int) -> Iterator[str]:
    return (f"vm{number}" for number in range(1, count + 1))


def is_vm(machine: str) -> bool:
    return machine.startswith("vm")
