"""Upstream's specs of the network at Kubernetes by kubeadm, on two nodes of the lab.

`make test-e2e` builds them first, so without that they are skipped. Which of them are not run is
said here, with the reason. Every other one has to pass. With HEADCNI_POLICIES=1 HeadCNI enforces
network policies, for all specs, and those of network policies are run as well.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from k8s_cluster import NODES, Cluster, made, until

from lab import e2e, image, tools
from lab.layout import Lab

LIMIT = 30 * 60  # seconds, of each part; some take 18 minutes where two cores have more to do
pytestmark = [
    pytest.mark.skipif(not tools.E2E.built, reason="run make test-e2e"),
    pytest.mark.timeout(LIMIT + 600),
]
POLICIES = os.environ.get("HEADCNI_POLICIES") == "1"
# What the names of specs that are not run have in common, and the reason.
NOT_RUN = {
    **({} if POLICIES else {r"Netpol": "network policies are off, as by default"}),
    r"\[Feature:LoadBalancer\]": "nothing here gives out load balancers",
    r"\[Feature:IPv6DualStack\]|\[Feature:Networking-IPv6\]": "the cluster has IPv4 alone",
    r"\[Feature:SCTPConnectivity\]": "it needs a kernel with SCTP",
    r"\[Feature:Networking-(DNS|IPv4)\]": "it asks servers on the Internet",
    r"\[Feature:Networking-Performance\]|\[Feature:PerformanceDNS\]": "it measures",
    r"\[Feature:KubeProxyNFAcct\]": "a metric of kube-proxy's own, not tried",
    r"TCP CLOSE_WAIT timeout": "the lab's kube-proxy leaves conntrack's timeouts alone",
    r"\[Disruptive\]": "it logs in to nodes, or restarts what all other specs need",
    r"DNS configMap": "it changes the settings of the CoreDNS that all other specs need",
}
# And those that begin, see that this cluster is not for them, and say so.
SKIP_THEMSELVES = {
    r"Topology Hints": "Requires more than one zone",
    r"Traffic Distribution": "Requires >= 3 zones",
    r"\[Provider:GCE\]": "Only supported for providers [gce]",
    r"HealthCheckNodePort correctly when": "Need at least 3 schedulable nodes",
}
SERVICES_RANGE = "10.96.0.0/12"
CONFORMANCE = r"\[Conformance\]"
GRANULAR, SERVICES = "Granular Checks: Services", r"\[sig-network\] Services"
NETPOL = r"\[sig-network\] Netpol"


@dataclass(frozen=True)
class Part:
    """As many as are run in one go: those of a name, without some."""

    focus: str
    skip: tuple[str, ...]
    count: int  # so that none goes unnoticed


PARTS = {
    "conformance": Part(rf"\[sig-network\].*{CONFORMANCE}", (), 47),
    "granular": Part(GRANULAR, (CONFORMANCE,), 17),
    "services": Part(SERVICES, (CONFORMANCE,), 34),
    "others": Part(r"\[sig-network\]", (CONFORMANCE, GRANULAR, SERVICES, NETPOL), 38),
    **({"policies": Part(NETPOL, (), 47)} if POLICIES else {}),
}


@dataclass(frozen=True)
class Suite:
    """The program that has the specs, and the cluster that it is pointed at."""

    cluster: Cluster
    registries: Path

    def __call__(self, *options: str, limit: float = 60) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(
            str(tools.E2E.bin / "e2e"),
            f"--kubeconfig={Lab.named(self.cluster.name).kubeconfig}",
            f"--kubectl-path={tools.KUBERNETES.bin / 'kubectl'}",
            "--provider=skeleton",
            *options,
            check=False,
            timeout=limit,
            KUBE_TEST_REPO_LIST=str(self.registries),
            HOME="/",
        )

    def specs(self, folder: Path, part: Part) -> list[dict[str, Any]]:
        """What came of each. All that was said meanwhile is in a file of the folder."""
        report = folder / "report.json"
        done = self(
            f"--ginkgo.focus={part.focus}",
            f"--ginkgo.skip={'|'.join((*NOT_RUN, *part.skip))}",
            f"--ginkgo.timeout={LIMIT}s",
            f"--ginkgo.json-report={report}",
            "--ginkgo.no-color",
            limit=LIMIT + 120,
        )
        (folder / "log").write_text(done.stdout + done.stderr)
        assert report.exists(), (done.stdout + done.stderr)[-4000:]
        (suite,) = json.loads(report.read_text())
        return suite["SpecReports"]


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """With the images on the nodes that the specs ask for."""
    with made("e2e", kind="kubeadm") as cluster:
        cluster.site(headcni_node_network_policy=POLICIES)()
        cluster.until_ready()
        lab = Lab.named(cluster.name)
        # Nobody answers for a service that is not served, whatever is outside of the lab.
        way_out = ["ip", "-n", lab.switch, "route", "add", "unreachable", SERVICES_RANGE]
        subprocess.run(way_out, check=True, timeout=10)
        image.build(lab, e2e.USERLAND)
        registries = tmp_path_factory.mktemp("e2e") / "registries.yaml"
        registries.write_text(e2e.REGISTRIES)
        suite = Suite(cluster, registries)
        wanted = suite("--list-images").stdout.split()
        for name, archive in e2e.archives(wanted, tools.E2E.home, tools.COREDNS.bin).items():
            for node in NODES:
                cluster.write(node, f"/root/{name}", archive)
                cluster.on(node, f"ctr -n k8s.io images import /root/{name} && rm /root/{name}")
        yield suite


def name_of(spec: dict[str, Any]) -> str:
    """What the suite does before and after its specs has none."""
    words = (*(spec["ContainerHierarchyTexts"] or ()), spec["LeafNodeText"])
    return " ".join(words).strip() or spec["LeafNodeType"]


def why(spec: dict[str, Any]) -> str:
    """What it says itself."""
    return spec.get("Failure", {}).get("Message", "")


def is_foreseen(spec: dict[str, Any]) -> bool:
    return any(
        re.search(pattern, name_of(spec)) and why(spec).startswith(reason)
        for pattern, reason in SKIP_THEMSELVES.items()
    )


@pytest.mark.parametrize("part", PARTS)
def test_upstreams_specs_of_the_network_pass(suite, part, tmp_path, capsys):
    # Of those that were not to run there is no more than a name.
    ran = [
        one for one in suite.specs(tmp_path, PARTS[part]) if one["State"] != "skipped" or why(one)
    ]
    specs = [one for one in ran if one["LeafNodeType"] == "It"]
    with capsys.disabled():
        states = Counter(one["State"] for one in specs)
        told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        seconds = sum(one["RunTime"] for one in specs) / 1e9
        print(f"\n  {part}: {told} in {seconds:.0f} s; see {tmp_path}", end="")
    bad = [
        f"{one['State']}: {name_of(one)}\n{why(one)}"
        for one in ran
        if one["State"] != "passed" and not (one["State"] == "skipped" and is_foreseen(one))
    ]
    assert not bad, "\n\n".join(bad)
    assert len(specs) == PARTS[part].count


def test_no_spec_is_left_out_without_a_reason(suite):
    """And no reason is there for nothing."""
    said = suite("--list-tests").stdout
    names = re.findall(r"\[sig-network\].*", said)
    for pattern in (*NOT_RUN, *SKIP_THEMSELVES):
        assert any(re.search(pattern, name) for name in names), pattern
    run = [name for name in names if not re.search("|".join(NOT_RUN), name)]
    assert len(run) == sum(part.count for part in PARTS.values())


def test_what_the_specs_pods_had_is_given_back(suite):
    """Their namespaces go on their own time; with the last of them addresses and interfaces."""
    cluster = suite.cluster

    def given_back() -> bool:
        known = {one["metadata"]["name"] for one in cluster.all("pods", "-A")}
        return all(set(cluster.attachments(node)) <= known for node in NODES)

    until(lambda: not cluster.all("ns", "-l", "e2e-framework"), 300, "specs' namespaces gone")
    until(given_back, what="what pods had given back")
