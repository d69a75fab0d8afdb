"""Nodes with Docker, ufw, Debian's containerd and an advertised LAN."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import pytest
from advertised_lan import await_route, way
from cri_pods import CONFIG, CRICTL, run_pod
from lab_command import LabCommand
from site_run import Site
from testinfra.host import Host

SERVE = "echo {node} > /tmp/index.html; exec httpd -f -p 8000 -h /tmp"


@dataclass(frozen=True)
class CriPod:
    node: str
    container: str
    address: str


def asked(pod: CriPod, where: str, path: str) -> str:
    """With nc: the wget of Debian's static busybox crashes in a container without glibc's files."""
    said = f'(echo "GET {path} HTTP/1.0"; echo) | nc -w 10 {where}'
    return f"{CRICTL} exec {pod.container} sh -c '{said}'"


@pytest.fixture(scope="module")
def cri_pods(lab: LabCommand, nodes: dict[str, Host]) -> Iterator[list[CriPod]]:
    """A pod on each node, started with crictl, whose web server returns the node's name."""
    made = []
    for node in nodes:
        command = f"mkdir -p /tmp; {SERVE.format(node=node)}"
        _, container, address = run_pod(lab, f"on-{node}", command, node=node)
        made.append(CriPod(node, container, address))
    yield made
    for node in nodes:
        lab.on(node, f"{CRICTL} rmp -fa")


def test_docker_ufw_and_debians_containerd_run_and_block_by_default(host: Host) -> None:
    for service in ("docker", "containerd"):
        assert host.service(service).is_running
    assert "Status: active" in host.check_output("ufw status")
    assert 'bin_dir = "/usr/lib/cni"' in host.file(CONFIG).content_string
    assert "-P FORWARD DROP" in host.check_output("iptables -S FORWARD")


def test_the_lan_is_served_in_the_tailnet_and_reached_directly(
    lab: LabCommand, nodes: dict[str, Host]
) -> None:
    for node in nodes:
        await_route(Site(lab), node)
        assert way(Site(lab), node) == "eth0"


def test_pods_by_crictl_have_addresses_of_their_node(nodes, cri_pods: list[CriPod]) -> None:
    assert [pod.node for pod in cri_pods] == list(nodes)
    for pod in cri_pods:
        shown = json.loads(nodes[pod.node].check_output("headcnictl pods --json"))
        assert pod.address in json.dumps(shown)


def test_pods_by_crictl_ping_each_other_across_nodes(nodes, cri_pods: list[CriPod]) -> None:
    for source, target in permutations(cri_pods, 2):
        ping = f"ping -c 3 -W 5 {target.address}"
        seen = nodes[source.node].run(f"{CRICTL} exec {source.container} {ping}")
        assert " 0% packet loss" in seen.stdout, f"{source.node}→{target.node}: {seen}"


def test_pods_by_crictl_exchange_data_across_nodes(nodes, cri_pods: list[CriPod]) -> None:
    for source, target in permutations(cri_pods, 2):
        seen = nodes[source.node].run(asked(source, f"{target.address} 8000", "/"))
        assert seen.stdout.strip().endswith(target.node), f"{source.node}→{target.node}: {seen}"


def test_pods_by_crictl_reach_the_outside(lab: LabCommand, nodes, cri_pods: list[CriPod]) -> None:
    """Through ufw and Docker: the lab's mirror is outside of the mesh."""
    mirror = lab.inventory()["lab"]["vars"]["lab_mirror_url"]
    for pod in cri_pods:
        where = mirror.removeprefix("http://").replace(":", " ")
        seen = nodes[pod.node].run(asked(pod, where, "/stable/?mode=json"))
        assert "Tarballs" in seen.stdout, f"{pod.node}: {seen}"
