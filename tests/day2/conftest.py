"""Nodes that site.yml has made, with pods that talk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from headscale_server import HeadscaleServer
from lab_command import CHECKOUT, LabCommand
from leftovers import assert_nothing_left
from mesh_state import at_headscale
from patience import until
from runtime_variant import built, variant
from site_run import Run, Site
from tailscale_site import NEWER, OLDER, contents, pack, tarball_name
from traffic import Traffic

from lab.layout import Lab, Plan

NODES = ("node1", "node2")
# What is left of a machine whose disk is a new one.
WIPE = """
systemctl disable --now headcni-daemon tailscaled
ip netns del pod; ip link del headcni0; nft flush ruleset
rm -rf /opt/headcni /opt/cni /etc/headcni /etc/cni /var/lib/headcni /var/lib/cni /var/lib/tailscale
rm -f /usr/local/bin/headcnictl /etc/systemd/system/headcni-* /etc/systemd/system/tailscaled*
rm -f /usr/sbin/tailscaled /usr/bin/tailscale /etc/default/tailscaled /run/headcni/*
systemctl daemon-reload
"""


@dataclass(frozen=True)
class Cluster:
    lab: LabCommand
    site: Site
    traffic: Traffic

    def run(self, playbook: str, *words: str, check: bool = True, **given: Any) -> Run:
        return self.site(*words, playbook=f"playbooks/{playbook}.yml", check=check, **given)

    def faulty(
        self,
        playbook: str,
        *words: str,
        task: str,
        how: str,
        host: str = "node1",
        number: int = 1,
        **given: Any,
    ) -> Run:
        """A run with one fault in it: a host's n-th `task` fails, or the controller is killed in
        its midst."""
        done = self.lab.run(
            # In a process group of its own, which is what is killed.
            "setsid",
            "--wait",
            *self.site.command(f"playbooks/{playbook}.yml", words, given),
            check=False,
            ANSIBLE_STRATEGY_PLUGINS=str(CHECKOUT / "tests/support/strategy_plugins"),
            ANSIBLE_STRATEGY="faulty",
            FAULT_HOST=host,
            FAULT_TASK=task,
            FAULT_NUMBER=str(number),
            FAULT_HOW=how.partition(" ")[0],
            FAULT_AFTER=how.partition(" ")[2] or "0",
        )
        return Run(done.returncode, done.stdout + done.stderr)

    def mode(self, node: str) -> str:
        return self.lab.on(node, "headcnictl mode show").strip()

    def at_headscale(self) -> list[dict[str, Any]]:
        return at_headscale(self.lab)

    def wipe(self, node: str, known_as: str = "") -> None:
        """As if it were a new machine; Headscale has seen the former go."""
        was = {one["id"] for one in self.at_headscale() if one["givenName"] == (known_as or node)}
        self.lab.on(node, WIPE, check=False)
        until(
            lambda: not [o for o in self.at_headscale() if o["id"] in was and o.get("online")], 90
        )

    def told(self, capsys: Any, what: str) -> None:
        with capsys.disabled():
            for pair, cost in self.traffic.costs.items():
                print(f"\n  {what}: {pair}: {cost}", end="")
            for node in self.traffic.nodes:
                ours = [cost for pair, cost in self.traffic.costs.items() if node in pair]
                lost, gap = sum(one.lost for one in ours), max(one.gap for one in ours)
                print(f"\n  {what}: {node}: {lost} lost, longest gap {gap:.2f} s", end="")


@pytest.fixture(scope="module")
def cluster(request):
    """Of the nodes that a file of tests names, or of two."""
    nodes = getattr(request.module, "NODES", NODES)
    lab = LabCommand("d2t")
    lab("down")
    before = lab.listing()
    lab("up", "--nodes", str(len(nodes)))
    site = Site(lab)
    site()
    traffic = Traffic(lab, nodes)
    traffic.pods()
    traffic.reached()
    yield Cluster(lab, site, traffic)
    lab("down")
    assert_nothing_left(before, lab.listing())


@pytest.fixture(scope="session")
def releases(tmp_path_factory):
    source = built(tmp_path_factory.mktemp("releases"))
    return {
        "first": source,
        "0.2.0": variant(source, "0.2.0"),
        "0.3.0": variant(source, "0.3.0", broken=True),
    }


@pytest.fixture(scope="session")
def tarballs(tmp_path_factory):
    """Of two versions of Tailscale."""
    folder = tmp_path_factory.mktemp("tarballs")
    for version in (OLDER, NEWER):
        (folder / tarball_name(version)).write_bytes(pack(contents(version), version))
    return folder


@pytest.fixture
def elsewhere(cluster, tmp_path):
    """Another Headscale, where nodes reach it."""

    class Elsewhere(HeadscaleServer):
        @property
        def url(self) -> str:
            return f"http://{address}:{self.port}"

        def config(self) -> str:
            return super().config().replace("127.0.0.1", address)

    address = str(Plan.load(Lab.named(cluster.lab.name)).host)
    server = Elsewhere(tmp_path)
    server.start()
    try:
        yield server
    finally:
        server.stop()
