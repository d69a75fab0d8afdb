"""Upstream's specs of the network at Kubernetes by kubeadm, on two nodes of the lab.

`make test-e2e` builds them first, so without that they are skipped. Specs that are not run are
listed here with the reason. Every other spec must pass. With HEADCNI_POLICIES=1 HeadCNI enforces
network policies during all specs, and the specs of network policies run as well.
HEADCNI_MODE=daemon runs all of them in daemon mode, HEADCNI_DUAL_STACK=1 on a cluster of both IP
families with the specs of that, and HEADCNI_SPECS='regular expression' runs
only the specs whose names match.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from k8s_cluster import NODES, Cluster, made, until

from lab import e2e, image, kubeadm, tools
from lab.layout import Lab

LIMIT = 60 * 60  # seconds, of each part; the longest takes half of it on two busy cores
AT_ONCE = 4  # processes: specs mostly wait
SERIAL = r"\[Serial\]"  # upstream's mark of specs that run alone
pytestmark = [
    pytest.mark.skipif(not tools.E2E.built, reason="run make test-e2e"),
    pytest.mark.timeout(LIMIT + 600),
]
POLICIES = os.environ.get("HEADCNI_POLICIES") == "1"
MODE = os.environ.get("HEADCNI_MODE", "host")
DUAL_STACK = os.environ.get("HEADCNI_DUAL_STACK") == "1"
ONLY = os.environ.get("HEADCNI_SPECS", "")
# What the names of specs that are not run have in common, and the reason.
NOT_RUN = {
    **({} if POLICIES else {r"Netpol": "network policies are off, as by default"}),
    r"\[Feature:LoadBalancer\]": "nothing here gives out load balancers",
    **({} if DUAL_STACK else {r"\[Feature:IPv6DualStack\]": "the cluster has IPv4 only"}),
    r"\[Feature:SCTPConnectivity\]": "it needs a kernel with SCTP",
    r"\[Feature:Networking-(DNS|IPv4|IPv6)\]": "it asks servers on the Internet",
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
CONFORMANCE = r"\[Conformance\]"
GRANULAR, SERVICES = "Granular Checks: Services", r"\[sig-network\] Services"
NETPOL, BOTH = r"\[sig-network\] Netpol", r"\[Feature:IPv6DualStack\]"


@dataclass(frozen=True)
class Part:
    """The specs of one test: those with a name, without some."""

    focus: str
    skip: tuple[str, ...]
    count: int  # so that none goes unnoticed

    def of(self, names: list[str]) -> list[str]:
        left_out = "|".join((*NOT_RUN, *self.skip))
        return [
            name for name in names if re.search(self.focus, name) and not re.search(left_out, name)
        ]


PARTS = {
    "conformance": Part(rf"\[sig-network\].*{CONFORMANCE}", (BOTH,), 47),
    "granular": Part(GRANULAR, (CONFORMANCE, BOTH), 17),
    "services": Part(SERVICES, (CONFORMANCE, BOTH), 34),
    "others": Part(r"\[sig-network\]", (CONFORMANCE, GRANULAR, SERVICES, NETPOL, BOTH), 38),
    **({"policies": Part(NETPOL, (), 47)} if POLICIES else {}),
    **({"dual_stack": Part(BOTH, (), 22)} if DUAL_STACK else {}),
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

    def names(self) -> list[str]:
        return re.findall(r"\[sig-network\].*", self("--list-tests").stdout)

    def specs(self, folder: Path, names: list[str]) -> list[dict[str, Any]]:
        """The report of each spec. The folder keeps the logs: some specs run at once, and those
        that upstream marks as serial run alone afterwards."""
        serial = [name for name in names if re.search(SERIAL, name)]
        others = [name for name in names if name not in serial]
        shares = [share for start in range(AT_ONCE) if (share := others[start::AT_ONCE])]
        folders = [folder / f"{number}" for number in range(1, len(shares) + 1)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            reports = list(pool.map(self._run, folders, shares))
        if serial:
            reports.append(self._run(folder / "serial", serial))
        return [spec for report in reports for spec in report]

    def _run(self, folder: Path, names: list[str]) -> list[dict[str, Any]]:
        """In one process, one after the other."""
        folder.mkdir()
        report = folder / "report.json"
        done = self(
            f"--ginkgo.focus=({'|'.join(map(re.escape, names))})$",
            f"--ginkgo.timeout={LIMIT}s",
            f"--ginkgo.json-report={report}",
            "--ginkgo.no-color",
            limit=LIMIT + 120,
        )
        (folder / "log").write_text(done.stdout + done.stderr)
        assert report.exists(), (done.stdout + done.stderr)[-4000:]
        (suite,) = json.loads(report.read_text())
        return suite["SpecReports"]


def prepared(cluster: Cluster, registries: Path) -> Suite:
    """With HeadCNI and with the images that the specs ask for on the nodes."""
    cluster.site(headcni_mode=MODE, headcni_node_network_policy=POLICIES)()
    cluster.until_ready()
    lab = Lab.named(cluster.name)
    # Nothing outside of the lab answers for a service that is not served.
    for services in (kubeadm.SERVICE_SUBNET, kubeadm.SERVICE_SUBNET6):
        way_out = ["ip", "-n", lab.switch, "route", "replace", "unreachable", services]
        subprocess.run(way_out, check=True, timeout=10)
    image.build(lab, e2e.USERLAND)
    registries.write_text(e2e.REGISTRIES)
    suite = Suite(cluster, registries)
    wanted = suite("--list-images").stdout.split()
    for name, archive in e2e.archives(wanted, tools.E2E.home, tools.COREDNS.bin).items():
        for node in NODES:
            cluster.write(node, f"/root/{name}", archive)
            cluster.on(node, f"ctr -n k8s.io images import /root/{name} && rm /root/{name}")
    return suite


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    options = ["--dual-stack"] if DUAL_STACK else []
    with made("e2e", *options, kind="kubeadm") as cluster:
        yield prepared(cluster, tmp_path_factory.mktemp("e2e") / "registries.yaml")


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
    wanted = PARTS[part].of(suite.names())
    assert len(wanted) == PARTS[part].count
    wanted = [name for name in wanted if re.search(ONLY, name)]
    if not wanted:
        pytest.skip(f"no name of these specs matches {ONLY}")
    began = time.monotonic()
    # The report has only the names of specs that were not to run.
    ran = [one for one in suite.specs(tmp_path, wanted) if one["State"] != "skipped" or why(one)]
    took = time.monotonic() - began
    specs = sorted((one for one in ran if one["LeafNodeType"] == "It"), key=name_of)
    lines = [f"{one['State']} {one['RunTime'] / 1e9:.0f} s: {name_of(one)}\n" for one in specs]
    (tmp_path / "specs").write_text("".join(lines))
    with capsys.disabled():
        states = Counter(one["State"] for one in specs)
        told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        print(f"\n  {part}, {MODE} mode: {told} in {took:.0f} s; see {tmp_path}/specs", end="")
    bad = [
        f"{one['State']}: {name_of(one)}\n{why(one)}"
        for one in ran
        if one["State"] != "passed" and not (one["State"] == "skipped" and is_foreseen(one))
    ]
    assert not bad, "\n\n".join(bad)
    assert [name_of(one) for one in specs] == sorted(wanted)


def test_no_spec_is_left_out_without_a_reason(suite):
    """And each reason applies to a spec."""
    names = suite.names()
    for pattern in (*NOT_RUN, *SKIP_THEMSELVES):
        assert any(re.search(pattern, name) for name in names), pattern
    run = [name for name in names if not re.search("|".join(NOT_RUN), name)]
    assert sorted(run) == sorted(name for part in PARTS.values() for name in part.of(names))


def test_what_the_specs_pods_had_is_given_back(suite):
    """Their namespaces go on their own time; with the last of them addresses and interfaces."""
    cluster = suite.cluster

    def given_back() -> bool:
        known = {one["metadata"]["name"] for one in cluster.all("pods", "-A")}
        return all(set(cluster.attachments(node)) <= known for node in NODES)

    until(lambda: not cluster.all("ns", "-l", "e2e-framework"), 300, "specs' namespaces gone")
    until(given_back, what="what pods had given back")
