"""Sixty pods of a Deployment on a real k3s: until all are Ready, and until all are gone.

Beside the same cluster with the Go plugins' conflist in the place of ours: bridge, host-local and
portmap. The daemon runs on, and so do kube-proxy and the rest: what differs is what containerd
finds in /etc/cni/net.d.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import partial

from k8s_cluster import NODES, Cluster, deployment, made, until

from .measure import Findings, Row, in_turns, median

PODS = 60
ROUNDS = 3
OURS, PEER = "headcni", "Go plugins"
NET_D = "/etc/cni/net.d"
ASIDE = "/run/bench"
CONFLISTS = {OURS: "10-headcni.conflist", PEER: "10-go.conflist"}
PROGRAMS = ("bridge", "host-local", "portmap")
CRICTL = "/opt/lab/k3s/bin/crictl -r unix:///run/k3s/containerd/containerd.sock"


def run(findings: Findings) -> None:
    with made("bench-k8s") as cluster:
        cluster.site()()
        cluster.until_ready()
        for node in NODES:
            _prepare(cluster, node)
        cluster.apply(deployment("many", 0))
        found = in_turns(
            ROUNDS, {name: partial(_round, cluster, name) for name in CONFLISTS}, warm_up=1
        )
        for node in NODES:
            _put_in_charge(cluster, node, OURS)
    findings.raw["k8s"] = found
    for step, what, bar in (
        ("ready", f"{PODS} pods Ready, k3s", 1.1),
        ("gone", f"{PODS} pods gone, k3s", None),
    ):
        ours, theirs = (median(found[name][step]) for name in (OURS, PEER))
        peer = "the same cluster on Go bridge + host-local + portmap"
        note = f"{len(NODES)} nodes, {ROUNDS} rounds each"
        findings.rows.append(Row("k8s", what, peer, ours, theirs, unit="s", bar=bar, note=note))


def _prepare(cluster: Cluster, node: str) -> None:
    """The peer's conflist, and its programs where containerd looks for them."""
    (four,) = cluster.get("node", node)["spec"]["podCIDRs"]
    (ours,) = json.loads(cluster.on(node, f"cat {NET_D}/{CONFLISTS[OURS]}"))["plugins"]
    bridge = {
        "type": "bridge",
        "bridge": "gobridge",
        "isDefaultGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "mtu": ours["mtu"],
        # The upper half of the node's range: what is ours of before stays out of its way.
        "ipam": {"type": "host-local", "subnet": four.replace(".0/24", ".128/25")},
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    conflist = {"cniVersion": "1.0.0", "name": "go", "plugins": [bridge, portmap]}
    cluster.write(node, f"{ASIDE}/{CONFLISTS[PEER]}", json.dumps(conflist).encode())
    cluster.on(node, "".join(f"ln -sf /opt/lab/cni/{name} /opt/cni/bin/;" for name in PROGRAMS))


def _put_in_charge(cluster: Cluster, node: str, name: str) -> None:
    (other,) = CONFLISTS.keys() - {name}
    cluster.on(
        node,
        f"mv {NET_D}/{CONFLISTS[other]} {ASIDE}/ 2>/dev/null;"
        f" mv {ASIDE}/{CONFLISTS[name]} {NET_D}/ 2>/dev/null; true",
    )
    network = json.loads(
        cluster.on(node, f"cat {NET_D}/{CONFLISTS[name]}")  # it is there, or this says so
    )["name"]
    cluster.wait(node, f'{CRICTL} info 2>/dev/null | grep -qi \'"name": "{network}"\'', 30)


def _round(cluster: Cluster, name: str) -> Mapping[str, float]:
    for node in NODES:
        _put_in_charge(cluster, node, name)
    began = time.monotonic()
    cluster.kubectl("scale", "deployment/many", f"--replicas={PODS}")
    pods = cluster.until_pods("many", PODS, 300)
    ready = time.monotonic() - began
    _check(name, {one["status"]["podIP"] for one in pods})
    began = time.monotonic()
    cluster.kubectl("scale", "deployment/many", "--replicas=0")
    until(lambda: not cluster.all("pods", "-l", "app=many"), 300, "pods to go")
    return {"ready": ready, "gone": time.monotonic() - began}


def _check(name: str, addresses: set[str]) -> None:
    """Every pod has an address of its own, by whom it should have it."""
    upper = sum(int(one.rpartition(".")[2]) >= 128 for one in addresses)
    wanted = PODS if name == PEER else 0
    if len(addresses) != PODS or upper != wanted:
        raise RuntimeError(f"{name}: {len(addresses)} addresses, {upper} of the peer's half")
