"""A bare node for daemon mode's namespace: a network namespace with an underlay."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cni_node import Namespace, sh
from lab_command import CHECKOUT

from headcni.datapath import netns
from headcni.mesh.namespace.mesh_namespace import MeshNamespace
from headcni.mesh.namespace.settings import MeshConfig

CNI = CHECKOUT / "plugins/cni"


@dataclass
class BareNode:
    """Its mesh has names of the test's own."""

    netns: Namespace
    outside: Namespace
    tmp: Path
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.netns.name}-mesh"

    @property
    def inside(self) -> Namespace:
        return Namespace(self.name)

    def run(self, verb: str) -> subprocess.CompletedProcess[str]:
        """As the unit runs it."""
        config = self.tmp / "mesh.json"
        config.write_text(json.dumps(self.values))
        # Not `ip netns exec`: in a mount namespace of its own the new namespace would not be seen.
        entered = ["nsenter", f"--net={self.netns.path}", sys.executable]
        return sh(
            *(*entered, "-m", "headcni.mesh.namespace", verb, "--mesh", config),
            env={**os.environ, "PYTHONPATH": str(CNI)},
            check=False,
        )

    @property
    def values(self) -> dict[str, Any]:
        return {"namespace": self.name, "run_dir": str(self.tmp / "run"), **self.changes}

    @contextmanager
    def mesh(self) -> Iterator[MeshNamespace]:
        """As the daemon has it: in its own process."""
        with netns.opened(self.netns.path) as fd, netns.entered(fd):
            yield MeshNamespace(MeshConfig.of(self.values))

    def ensure(self) -> list[str]:
        with self.mesh() as mesh:
            return mesh.ensure()

    def check(self) -> list[str]:
        with self.mesh() as mesh:
            return mesh.differences()

    def listing(self) -> dict[str, Any]:
        """What `remove` must leave as it was."""
        return {
            "links": self.netns.links(),
            "rules": {self.netns.ip("rule"), self.netns.ip("-6 rule")},
            "routes": {
                re.sub(r" (expires|pref|metric) \S+", "", line).strip()
                for family in ("-4", "-6")
                for line in self.netns.ip(f"{family} route show table all").splitlines()
                # anycast: the router's own address, as forwarding stays on
                if not re.search("fe80|ff00|^anycast", line)
            },
            "nft": self.netns.run("nft", "-s", "list", "ruleset").stdout,
            "namespaces": {name for name in os.listdir("/run/netns") if name == self.name},
            "files": sorted(map(str, self.tmp.rglob("run/*"))),
            "resolv.conf": os.path.exists(f"/etc/netns/{self.name}"),
        }


@contextmanager
def bare_node(tmp: Path) -> Iterator[BareNode]:
    node = BareNode(Namespace.create("node"), Namespace.create("outside"), tmp)
    node.netns.ip(f"link add eth0 type veth peer name eth0 netns {node.outside.name}")
    node.netns.ip("link set eth0 mtu 1400")
    for side, host in ((node.netns, 1), (node.outside, 2)):
        side.ip(f"addr add 192.0.2.{host}/24 dev eth0")
        side.ip(f"addr add 2001:db8::{host}/64 dev eth0 nodad")
        side.ip("link set eth0 up")
    node.netns.ip("route add default via 192.0.2.2")
    node.netns.ip("-6 route add default via 2001:db8::2")
    try:
        yield node
    finally:
        node.changes = {}  # a test's wrong ones would keep it from being removed
        node.run("remove")
        for one in (node.inside, node.netns, node.outside):
            one.remove()
