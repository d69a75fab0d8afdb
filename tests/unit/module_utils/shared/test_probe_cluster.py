"""Who resolves names in a cluster, as a node's kubelet tells pods."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.shared import probe_cluster
from fake_root import FakeRoot

KUBEADM = """\
apiVersion: kubelet.config.k8s.io/v1beta1
clusterDNS:
- 10.96.0.10
- fd00::a
clusterDomain: example.internal
containerRuntimeEndpoint: ""
"""


@pytest.fixture
def root(tmp_path) -> FakeRoot:
    return FakeRoot(tmp_path)


def names(root, *ranges):
    return probe_cluster.names(ranges, str(root))


def test_without_a_kubelet_there_is_no_cluster(root):
    root.file("/var/lib/kubelet/config.yaml", KUBEADM)
    assert names(root, "10.96.0.0/12") is None


def test_kubelets_configuration_says_who(root):
    root.process("kubelet")
    root.file("/var/lib/kubelet/config.yaml", KUBEADM)
    assert names(root) == (("10.96.0.10", "fd00::a"), "example.internal")


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "KubeletConfiguration",\n "clusterDNS": ["10.96.0.10"], "clusterDomain": "a.b"}',
        '{\n"clusterDNS":\n[\n"10.96.0.10"\n],\n"clusterDomain": "a.b"\n}',
        'clusterDomain: "a.b"\nclusterDNS: [10.96.0.10]\n',
        "clusterDNS:\n  - 10.96.0.10\nother:\n  - 10.0.0.1\nclusterDomain: a.b\n",
    ],
)
def test_it_may_be_yaml_of_any_style_or_json(root, text):
    root.process("kubelet", "--config=/etc/kubelet.conf")
    root.file("/etc/kubelet.conf", text)
    assert names(root).servers == ("10.96.0.10",)


def test_arguments_and_drop_in_files_count_too(root):
    root.process("kubelet", "--cluster-dns=10.1.0.10", "--config-dir", "/etc/kubelet.conf.d")
    assert names(root) == (("10.1.0.10",), "cluster.local")
    root.file("/etc/kubelet.conf.d/10-dns.conf", "clusterDNS: [10.2.0.10]\n")
    assert names(root).servers == ("10.2.0.10",)


def test_k3s_tells_its_own_kubelet_by_a_file(root):
    root.process("k3s-agent")
    root.file(
        "/var/lib/rancher/k3s/agent/etc/kubelet.conf.d/00-k3s-defaults.conf",
        "clusterDNS:\n- 10.43.0.10\nclusterDomain: cluster.local\n",
    )
    assert names(root) == (("10.43.0.10",), "cluster.local")


def test_otherwise_the_service_range_says_by_custom(root):
    root.process("kubelet")
    assert names(root, "10.96.0.0/12").servers == ("10.96.0.10",)
    assert names(root).servers == ()
    assert names(root, "nonsense").servers == ()


def test_the_api_servers_service_is_the_first_of_the_range():
    assert probe_cluster.kubernetes_service(["10.96.0.0/12"]) == ["10.96.0.1"]
    assert probe_cluster.kubernetes_service([]) == []
