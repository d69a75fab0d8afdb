"""Pods under a policy: what we say of it, beside what real nodes are told by a real Headscale."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_access import (
    ALLOWED,
    MISSING,
    Mesh,
    judge,
)
from headscale_server import HeadscaleServer, Tailscaled, until
from netmap import netmap, reaches
from pod_policies import PODS, POLICIES, RANGES, TAG, acl, policy

from tests.modules.conftest import At

MARK = "192.0.2.7/32"


class TwoNodes:
    """Two real nodes at a real Headscale, with approved routes to their pods."""

    def __init__(self, home: Path) -> None:
        self.server = HeadscaleServer(home)
        self.nodes: list[Tailscaled] = []

    def start(self) -> None:
        self.server.start()
        self.server.key = self.server.make_key()
        self.server.add_user("ann")
        key = At(self.server)("preauth_key", tags=[TAG], reusable=True)["key"]
        for number, pods in enumerate(PODS, 1):
            node = Tailscaled(self.server.home / f"node{number}")
            self.nodes.append(node)
            node.start()
            node.join(self.server.url, key, f"node{number}", *pods)
            self.server.approve(self.server.nodes[f"node{number}"], *pods)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()
        self.server.stop()

    def obey(self, text: str) -> None:
        """Returns once both nodes have heard of it."""
        self.server.ask("PUT", "policy", {"policy": policy([acl([MARK], [f"{TAG}:7"])])})
        until(lambda: all(self._marked(node) for node in self.nodes))
        self.server.ask("PUT", "policy", {"policy": text})
        until(lambda: not any(self._marked(node) for node in self.nodes))

    def _marked(self, node: Tailscaled) -> bool:
        return any(MARK in match["Srcs"] for match in netmap(node)["PacketFilter"] or ())

    def talk(self, family: int) -> bool:
        """Whether pods of each node reach those of the other, by all that the nodes were told."""
        at = 0 if family == 4 else 1
        return all(
            reaches(netmap(node), PODS[1 - number][at], PODS[number][at])
            for number, node in enumerate(self.nodes)
        )


@pytest.fixture(scope="module")
def mesh() -> Iterator[TwoNodes]:
    home = Path(tempfile.mkdtemp(prefix="hct-"))
    two = TwoNodes(home)
    try:
        two.start()
        yield two
    finally:
        two.stop()
        shutil.rmtree(home)


def of_family(family: int) -> Mesh:
    networks = [ip_network(cidr) for pair in PODS for cidr in pair]
    return Mesh(
        tuple(one for one in map(ip_network, RANGES) if one.version == family),
        (TAG,),
        pods=tuple(one for one in networks if one.version == family),
    )


def test_without_a_policy_pods_reach_each_other(mesh):
    until(lambda: mesh.talk(4) and mesh.talk(6))
    assert judge("", (0, 29), of_family(4)).status == ALLOWED


@pytest.mark.parametrize("text, families", [p[1:] for p in POLICIES], ids=[p[0] for p in POLICIES])
def test_our_verdict_is_what_real_nodes_are_told(mesh, text, families):
    mesh.obey(text)
    for family in (4, 6):
        talk = mesh.talk(family)
        assert talk == (family in families)
        assert judge(text, (0, 29), of_family(family)).status == (ALLOWED if talk else MISSING)
