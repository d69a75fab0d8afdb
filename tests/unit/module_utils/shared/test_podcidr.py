"""Where the node's pod CIDR comes from, on trees of files like those of real nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headcni.shared import podcidr
from headcni.shared.podcidr import (
    PodCidrError,
    Resolution,
    derive,
    parse_cidr,
    parse_sizes,
    resolve,
    scan,
)

KUBELET = "/var/lib/kubelet/config.yaml"
KUBEADM = "/etc/kubernetes/kubeadm-config.yaml"
CONTROLLER = "/etc/kubernetes/manifests/kube-controller-manager.yaml"
K3S_NODE = "/var/lib/rancher/k3s/agent/etc/node-worker-1.yaml"
K3S_CONFIG = "/etc/rancher/k3s/config.yaml"

KUBECONFIG = """\
apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCk1JSURCVENDQWUyZ0F3SUJBZ0k=
    server: https://10.0.0.1:6443
  name: kubernetes
"""

CONTROLLER_MANIFEST = """\
apiVersion: v1
kind: Pod
spec:
  containers:
  - command:
    - kube-controller-manager
    - --allocate-node-cidrs=true
    - --cluster-cidr=10.244.0.0/16
    - --node-cidr-mask-size=25
    - --service-cluster-ip-range=10.96.0.0/12
    image: example.org/kube-controller-manager:v1.31.0
"""


busy_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Node:
    """A root directory with some files in it, and one question to ask of it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def has(self, path: str, text: str) -> Node:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def resolves(self, env: Mapping[str, str] | None = None, **pod: Any) -> Resolution:
        config: dict[str, Any] = {"network": {"podCIDR": pod}} if pod else {}
        return resolve(config, env or {}, str(self.root), hostname="worker-1", node_name="worker-1")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def cidrs(resolution: Resolution) -> str:
    return podcidr.join(resolution.cidrs)


def verdict(resolution: Resolution, place: str) -> str:
    found = [c.verdict for c in resolution.considered if place in (c.path, c.source)]
    assert len(found) == 1, resolution.considered
    return found[0]


def test_the_sources_win_in_the_order_of_the_specification(node: Node) -> None:
    everything: dict[str, Any] = {
        "nodeLocal": "10.1.0.0/24",
        "base": "10.4.0.0/16",
        "perNode": "/24",
    }
    env = {"NODE_POD_CIDR": "10.2.0.0/24"}
    node.has(KUBELET, "podCIDR: 10.3.0.0/24\n")

    assert node.resolves(env, **everything).source == "config"
    assert cidrs(node.resolves(env, **everything)) == "10.1.0.0/24"
    del everything["nodeLocal"]
    assert node.resolves(env, **everything)[:2] == ((IPv4Network("10.2.0.0/24"),), "env")
    assert node.resolves(**everything)[:2] == ((IPv4Network("10.3.0.0/24"),), "file")
    (node.root / KUBELET.lstrip("/")).unlink()
    hashed = node.resolves(**everything)
    assert hashed.source == "hash"
    assert hashed.cidrs[0].subnet_of(IPv4Network("10.4.0.0/16"))  # type: ignore[arg-type]
    assert node.resolves()[:2] == ((IPv4Network("10.244.0.0/24"),), "default")


def test_only_the_hash_and_the_default_are_guesses(node: Node) -> None:
    assert not node.resolves(nodeLocal="10.1.0.0/24").guessed
    assert not node.resolves({"NODE_POD_CIDR": "10.1.0.0/24"}).guessed
    assert node.resolves(base="10.1.0.0/16").guessed
    assert node.resolves().guessed
    assert "nodeLocal to be sure" in node.resolves().explain()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('podCIDR: "10.244.1.0/24"', "10.244.1.0/24"),
        ("podCIDR: '10.244.1.0/24'  # this node's", "10.244.1.0/24"),
        ("pod-cidr: 10.244.1.0/24", "10.244.1.0/24"),
        ("  podCIDR:   10.244.1.0/24  ", "10.244.1.0/24"),
        ("spec:\n  podCIDR: 10.244.1.0/24\n  podCIDRs:\n  - 10.244.1.0/24\n", "10.244.1.0/24"),
        (
            "spec:\n  podCIDRs:\n  - 10.244.1.0/24\n  - fd00:1::/64\n  taints:\n  - x\n",
            "10.244.1.0/24,fd00:1::/64",
        ),
        ('"podCIDRs":\n- "10.244.1.0/24"\n- "fd00:1::/64"\n', "10.244.1.0/24,fd00:1::/64"),
        ("podCIDRs: [10.244.1.0/24, 'fd00:1::/64']", "10.244.1.0/24,fd00:1::/64"),
        ("spec: {podCIDR: 10.244.1.0/24, providerID: k3s://x}", "10.244.1.0/24"),
        ('{"spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"]}}', "10.244.1.0/24"),
        ('KUBELET_EXTRA_ARGS="--pod-cidr=10.244.1.0/24 --v=2"', "10.244.1.0/24"),
        ("ExecStart=/usr/bin/kubelet --pod-cidr 10.244.1.0/24 --v 2", "10.244.1.0/24"),
        ('kubelet-arg:\n- "pod-cidr=10.244.1.0/24"\n', "10.244.1.0/24"),
    ],
)
def test_a_file_of_the_node_tells_its_own_cidr(node: Node, text: str, expected: str) -> None:
    resolution = node.has(KUBELET, text).resolves()
    assert (cidrs(resolution), resolution.source) == (expected, "file")


@pytest.mark.parametrize(
    "text",
    [
        "--cluster-cidr=10.244.0.0/16",
        "--cluster-cidr 10.244.0.0/16",
        '    - "--cluster-cidr=10.244.0.0/16"',
        "    - '--cluster-cidr=10.244.0.0/16'",
        "    - --cluster-cidr='10.244.0.0/16'",
        "    - --cluster-cidr\n    - 10.244.0.0/16\n    - --v=2",
        '    - "--cluster-cidr"\n    # the pods\n    - "10.244.0.0/16"',
        "command: [kube-controller-manager, --cluster-cidr, 10.244.0.0/16, --v=2]",
        'args: ["--v=2","--cluster-cidr","10.244.0.0/16"]',
        'args: ["--cluster-cidr=10.244.0.0/16","--v=2"]',
        "args: [--cluster-cidr=10.244.0.0/16,--v=2]",
        "cluster-cidr: 10.244.0.0/16",
        "clusterCIDR: 10.244.0.0/16",
        "networking:\n  podSubnet: 10.244.0.0/16\n  serviceSubnet: 10.96.0.0/12",
        "extraArgs:\n- name: cluster-cidr\n  value: 10.244.0.0/16",
        'extraArgs:\n  cluster-cidr: "10.244.0.0/16"',
        'kube-controller-manager-arg:\n  - "cluster-cidr=10.244.0.0/16"',
        '{"args": ["--cluster-cidr", "10.244.0.0/16"]}',
        "kubectl-annotation: |\n  networking:\n    podSubnet: 10.244.0.0/16",
    ],
)
def test_a_cluster_wide_cidr_is_found_however_it_is_written(text: str) -> None:
    assert scan(text) == podcidr.Scan([], ["10.244.0.0/16"], {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        KUBECONFIG,
        "# podCIDR: 10.244.1.0/24",
        "foo: bar  # --cluster-cidr=10.244.0.0/16",
        'podCIDR: ""',
        "podCIDR: null",
        "podCIDR: ~",
        "podCIDR:",
        'items:\n- podCIDR: ""\n- name: x',
        "items:\n- podCIDR:\n- name: x",
        "- --service-cluster-cidr=10.0.0.0/8",
        "- --cluster-cidr-of-others=10.0.0.0/8",
        "- --cluster-cidr\n- --v=2",
        "mypodCIDR: 10.0.0.0/8",
        "podCIDR:10.244.1.0/24",
        "--service-cluster-ip-range=10.96.0.0/12",
        '{"podCIDRs": [{"not": "a string"}, true, null]}',
    ],
)
def test_what_is_not_a_cidr_of_pods_is_not_taken_for_one(text: str) -> None:
    assert scan(text) == podcidr.Scan([], [], {})


def test_a_cluster_wide_cidr_in_a_file_is_only_a_base_for_the_hash(node: Node) -> None:
    resolution = node.has(CONTROLLER, "- --cluster-cidr=10.50.0.0/16").resolves()
    assert resolution.source == "hash"
    assert resolution.cidrs == (derive(IPv4Network("10.50.0.0/16"), 24, "worker-1"),)
    assert resolution.cidrs == node.resolves(base="10.50.0.0/16", perNode="/24").cidrs


def test_the_controllers_own_mask_size_is_the_size_of_a_nodes_share(node: Node) -> None:
    node.has(CONTROLLER, CONTROLLER_MANIFEST)
    assert node.resolves().cidrs[0].prefixlen == 25
    assert node.resolves(perNode=26).cidrs[0].prefixlen == 26


def test_a_given_base_comes_before_the_cluster_cidr_of_a_file_and_both_are_shown(
    node: Node,
) -> None:
    resolution = node.has(CONTROLLER, CONTROLLER_MANIFEST).resolves(base="10.9.0.0/16")
    assert str(resolution.cidrs[0]).startswith("10.9.")
    assert "is not in it" in verdict(resolution, CONTROLLER)


def test_the_nodes_own_cidr_in_one_file_beats_the_clusters_in_an_earlier_one(node: Node) -> None:
    node.has(K3S_CONFIG, "cluster-cidr: 10.42.0.0/16").has(KUBELET, "podCIDR: 10.42.7.0/24")
    assert cidrs(node.resolves()) == "10.42.7.0/24"


def test_a_podcidr_in_a_file_that_all_nodes_share_is_the_clusters(node: Node) -> None:
    resolution = node.has(KUBEADM, "podCIDR: 10.60.0.0/20").resolves()
    assert resolution.source == "hash"
    assert resolution.cidrs[0].subnet_of(IPv4Network("10.60.0.0/20"))  # type: ignore[arg-type]


def test_a_podcidr_as_wide_as_a_cluster_is_the_clusters(node: Node) -> None:
    resolution = node.has(KUBELET, "podCIDR: 10.244.0.0/16").resolves()
    assert resolution.source == "hash"
    assert resolution.cidrs[0].prefixlen == 24


def test_k3s_without_a_cluster_cidr_uses_its_default(node: Node) -> None:
    resolution = node.has("/etc/rancher/k3s/k3s.yaml", KUBECONFIG).resolves()
    assert resolution.source == "hash"
    assert resolution.cidrs == (derive(IPv4Network("10.42.0.0/16"), 24, "worker-1"),)
    assert verdict(resolution, "/etc/rancher/k3s/k3s.yaml") == "holds no CIDR"


def test_k3s_configuration_is_read_with_its_dropins_the_last_one_first(node: Node) -> None:
    node.has(K3S_CONFIG, "cluster-cidr: 10.1.0.0/16")
    node.has(K3S_CONFIG + ".d/10-a.yaml", "cluster-cidr: 10.2.0.0/16")
    node.has(K3S_CONFIG + ".d/20-b.yaml", "cluster-cidr: 10.3.0.0/16,fd00:3::/56")
    node.has(K3S_CONFIG + ".d/notes.txt", "cluster-cidr: 10.9.0.0/16")
    resolution = node.resolves()
    assert [str(c).split(".")[:2] for c in resolution.cidrs[:1]] == [["10", "3"]]
    assert resolution.cidrs[1].version == 6


def test_the_k3s_file_of_this_node_is_the_one_with_its_name(node: Node) -> None:
    node.has(K3S_NODE, "podCIDR: 10.42.3.0/24")
    node.has(K3S_NODE.replace("worker-1", "worker-2"), "podCIDR: 10.42.4.0/24")
    assert cidrs(node.resolves()) == "10.42.3.0/24"


def test_a_node_name_with_a_slash_opens_no_other_file(tmp_path: Path) -> None:
    Node(tmp_path).has("/var/lib/rancher/k3s/agent/etc/node-x.yaml", "podCIDR: 10.42.3.0/24")
    found = resolve({}, {}, str(tmp_path), hostname="a", node_name="y/../node-x")
    assert not any("node-" in candidate.path for candidate in found.considered)


def test_both_families_are_taken_from_one_source(node: Node) -> None:
    both = node.resolves(nodeLocal=["10.1.0.0/24", "fd00:1::/64"])
    assert both.cidrs == (IPv4Network("10.1.0.0/24"), IPv6Network("fd00:1::/64"))
    assert both.cidrs == node.resolves({"NODE_POD_CIDR": "10.1.0.0/24, fd00:1::/64"}).cidrs
    hashed = node.resolves(base="10.244.0.0/16,fd00:244::/48", perNode="/24,/64")
    assert [(c.version, c.prefixlen) for c in hashed.cidrs] == [(4, 24), (6, 64)]


@pytest.mark.parametrize(
    ("value", "because"),
    [
        ("10.244.1.5/24", "the network is 10.244.1.0/24"),
        ("fd00:1::5/64", "the network is fd00:1::/64"),
        ("10.244.1.0", "not a CIDR"),
        ("10.244.1.0/255.255.255.0", "not a CIDR"),
        ("10.244.1.0/33", "not a CIDR"),
        ("ten", "not a CIDR"),
        ("10.244.1.0/31", "too small"),
        ("fd00::/127", "too small"),
        ("0.0.0.0/0", "unicast"),
        ("224.1.0.0/24", "unicast"),
        ("127.0.0.0/24", "unicast"),
        ("169.254.1.0/24", "unicast"),
        ("fe80::/64", "unicast"),
        ("100.64.3.0/24", "Tailscale"),
        ("100.0.0.0/8", "Tailscale"),
        ("fd7a:115c:a1e0:1::/64", "Tailscale"),
        ("10.1.0.0/24,10.2.0.0/24", "both IPv4"),
        ({"cidr": "10.1.0.0/24"}, "string"),
        (True, "string"),
    ],
)
def test_a_broken_explicit_value_is_an_error_that_says_why(
    node: Node, value: Any, because: str
) -> None:
    with pytest.raises(PodCidrError, match=f"nodeLocal.*{because}"):
        node.resolves(nodeLocal=value)
    if isinstance(value, str):
        with pytest.raises(PodCidrError, match=f"NODE_POD_CIDR.*{because}"):
            node.resolves({"NODE_POD_CIDR": value})


def test_a_broken_explicit_value_that_is_not_needed_is_only_mentioned(node: Node) -> None:
    resolution = node.resolves({"NODE_POD_CIDR": "junk"}, nodeLocal="10.1.0.0/24", base="junk")
    assert cidrs(resolution) == "10.1.0.0/24"
    assert "wrong" in verdict(resolution, "env")
    assert "wrong" in verdict(resolution, "base")


@pytest.mark.parametrize(
    "text",
    [
        "podCIDR: 10.244.1.5/24",
        "podCIDR: not-a-cidr",
        "podCIDR: 100.64.0.0/24",
        "podCIDRs: [10.1.0.0/24, 10.2.0.0/24]",
        "podCIDR: 10.1.0.0/24\n---\npodCIDR: 10.2.0.0/24",
    ],
)
def test_a_broken_file_is_passed_over_with_the_reason(node: Node, text: str) -> None:
    resolution = node.has(KUBELET, text).resolves()
    assert resolution.source == "default"
    assert verdict(resolution, KUBELET).startswith("passed over: ")


def test_a_file_that_cannot_be_read_is_passed_over(node: Node) -> None:
    (node.root / KUBELET.lstrip("/")).mkdir(parents=True)
    assert "cannot be read" in verdict(node.resolves(), KUBELET)


@pytest.mark.parametrize("base", ["10.1.2.3/16", "junk", "10.0.0.0/28", "100.64.0.0/10"])
def test_a_base_that_cannot_be_used_is_an_error(node: Node, base: str) -> None:
    with pytest.raises(PodCidrError, match="base"):
        node.resolves(base=base)


def test_a_cluster_cidr_in_a_file_that_is_too_small_is_passed_over(node: Node) -> None:
    resolution = node.has(CONTROLLER, "--cluster-cidr=10.0.0.0/28").resolves()
    assert resolution.source == "default"
    assert "smaller than the /24" in verdict(resolution, CONTROLLER)


@pytest.mark.parametrize(
    ("value", "sizes"),
    [
        ("/24", {4: 24}),
        ("24", {4: 24}),
        (24, {4: 24}),
        ("/24,/64", {4: 24, 6: 64}),
        ([26, "/72"], {4: 26, 6: 72}),
        ("/64", {6: 64}),
        (None, {}),
        ("", {}),
    ],
)
def test_the_share_of_a_node_may_be_written_in_several_ways(value: Any, sizes: Any) -> None:
    assert parse_sizes(value) == sizes


@pytest.mark.parametrize("value", ["/x", "0", "-1", "/31", "/24,/25", 200, True, "//24", "٢٤"])
def test_a_share_that_makes_no_sense_is_refused(node: Node, value: Any) -> None:
    with pytest.raises(PodCidrError):
        node.resolves(base="10.0.0.0/8", perNode=value)


def test_the_section_must_be_a_mapping(tmp_path: Path) -> None:
    with pytest.raises(PodCidrError, match=r"network\.podCIDR must be a mapping"):
        resolve({"network": {"podCIDR": "10.1.0.0/24"}}, {}, str(tmp_path))


# These are promises to running clusters: a change here moves the pods of every node.
@pytest.mark.parametrize(
    ("host", "share"),
    [
        ("worker-1", "10.244.21.0/24"),
        ("worker-2", "10.244.44.0/24"),
        ("node-a.example.org", "10.244.248.0/24"),
    ],
)
def test_the_hash_of_a_name_never_changes(host: str, share: str) -> None:
    assert str(derive(IPv4Network("10.244.0.0/16"), 24, host)) == share
    assert str(derive(IPv4Network("10.244.0.0/16"), 24, host.upper() + ".")) == share


def test_the_hash_does_not_depend_on_the_interpreters_hash_seed() -> None:
    code = (
        "from headcni.shared.podcidr import derive; from ipaddress import ip_network as n;"
        "print(derive(n('10.0.0.0/8'), 24, 'x'), derive(n('fd00::/48'), 64, 'x'))"
    )
    path = str(Path(podcidr.__file__).parents[2])
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1


@busy_machine
@given(
    host=st.text(min_size=1, max_size=40),
    base=st.integers(8, 30),
    more=st.integers(0, 22),
    address=st.integers(0, 2**32 - 1),
)
def test_a_share_lies_in_its_base_and_is_not_the_first(
    host: str, base: int, more: int, address: int
) -> None:
    network = IPv4Network((address, base), strict=False)
    length = min(30, base + more)
    share = derive(network, length, host)
    assert share.prefixlen == length
    assert share.subnet_of(network)  # type: ignore[arg-type]
    assert share.network_address != network.network_address or length == base


@busy_machine
@given(st.text(max_size=400))
def test_no_file_can_make_the_scanner_fail(text: str) -> None:
    scan(text)
    scan("podCIDR: " + text)
    scan('{"podCIDR": ' + text)


@busy_machine
@given(st.integers(0, 2**32 - 1), st.integers(0, 32))
def test_a_cidr_with_host_bits_is_answered_with_the_right_one(address: int, length: int) -> None:
    network = ip_network((address, length), strict=False)
    text = f"{ip_network(address).network_address}/{length}"
    if int(network.network_address) == address:
        assert parse_cidr(text) == network
    else:
        with pytest.raises(PodCidrError, match=f"the network is {network}"):
            parse_cidr(text)


def test_the_explanation_names_the_winner_and_every_loser(node: Node) -> None:
    node.has(KUBELET, "podCIDR: 10.3.0.0/24").has(CONTROLLER, CONTROLLER_MANIFEST)
    node.has("/etc/kubernetes/admin.conf", KUBECONFIG)
    text = node.resolves({"NODE_POD_CIDR": "10.2.0.0/24"}).explain()
    assert text.splitlines() == [
        "pod CIDR 10.2.0.0/24, from env",
        "  NODE_POD_CIDR = 10.2.0.0/24: chosen",
        "  /var/lib/kubelet/config.yaml = 10.3.0.0/24: overruled",
        "  /etc/kubernetes/admin.conf: holds no CIDR",
        f"  {CONTROLLER} = 10.244.0.0/16: the cluster's CIDR; 10.2.0.0/24 is not in it",
        "  default = 10.244.0.0/24: overruled",
        (
            "  not there: network.podCIDR.nodeLocal, "
            "/var/lib/rancher/k3s/agent/etc/node-worker-1.yaml, /etc/rancher/k3s/config.yaml, "
            "/etc/rancher/k3s/k3s.yaml, /var/lib/rancher/k3s/agent/etc/kubelet.config, "
            "/etc/kubernetes/kubeadm-config.yaml, /etc/kubernetes/manifests/kube-apiserver.yaml"
        ),
    ]


def test_the_result_is_plain_data_for_an_ansible_module(node: Node) -> None:
    import json

    data = node.resolves(nodeLocal="10.1.0.0/24").as_dict()
    assert json.loads(json.dumps(data))["cidrs"] == ["10.1.0.0/24"]
    assert data["considered"][0] == {
        "source": "config",
        "path": "",
        "value": "10.1.0.0/24",
        "verdict": "chosen",
    }
