"""What a node of the lab gets of a Kubernetes that kubeadm sets up."""

from __future__ import annotations

import ipaddress
import json
import os
import tarfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from lab import images, inventory, kubeadm, tools
from lab.layout import Lab, Plan

PLAN = Plan(
    ipaddress.IPv4Network("10.9.8.0/24"),
    ipaddress.IPv6Network("fd09::/64"),
    ("node1", "node2"),
    "1.0",
    cluster="kubeadm",
)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Of a machine."""
    base = tmp_path / "base"
    for path in ("bin/busybox", kubeadm.IPTABLES, "usr/lib/arch/libmnl.so", "usr/lib/loader"):
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_text(path)
    (base / "lib64").mkdir()
    (base / "lib64" / "loader").symlink_to("/usr/lib/loader")
    (base / "usr/lib/arch/xtables").mkdir()
    (base / "usr/lib/arch/xtables/libxt_mark.so").write_text("mark")
    for name in ("kubernetes", "coredns"):
        (tmp_path / name).write_text(name)
    linked = "\tlibmnl.so => /usr/lib/arch/libmnl.so (0x7f)\n\t/lib64/loader (0x7f)\n"
    monkeypatch.setattr(images, "run", lambda *_argv: type("Done", (), {"stdout": linked}))
    return lambda machine, plan=PLAN: kubeadm.files(
        plan, machine, "v1.2.3", tmp_path, tmp_path, base
    )


def test_the_first_node_is_the_control_plane_and_the_others_know_nothing_of_it(files):
    config = files("node1")["etc/lab/kubeadm.yaml"].decode()
    assert "advertiseAddress: 10.9.8.11" in config and "kubernetesVersion: v1.2.3" in config
    assert not [path for path in files("node2") if path.endswith("kubeadm.yaml")]


def test_a_dual_stack_cluster_gives_nodes_pods_and_services_both_families(files):
    both = replace(PLAN, dual_stack=True)
    config = files("node1", both)["etc/lab/kubeadm.yaml"].decode()
    assert "podSubnet: 10.56.0.0/16,fd56::/56\n" in config
    assert "serviceSubnet: 10.96.0.0/12,fd96::/112\n" in config
    for node, address in (("node1", "10.9.8.11,fd09::b"), ("node2", "10.9.8.12,fd09::c")):
        drop_in = files(node, both)["etc/systemd/system/kubelet.service.d/lab.conf"].decode()
        assert f'--node-ip={address}"' in drop_in
        alone = files(node)["etc/systemd/system/kubelet.service.d/lab.conf"].decode()
        assert "--node-ip" not in alone
    known = inventory.data(Lab("abcde", Path("/nowhere")), both)["lab"]["vars"]
    assert known["lab_pod_ranges"] == ["10.56.0.0/16", "fd56::/56"]
    assert known["lab_service_ranges"] == ["10.96.0.0/12", "fd96::/112"]


def test_what_is_only_the_labs_is_called_so(files):
    """A user's node has neither these files nor what is in them."""
    quirks = (b"restrict_oom_score_adj", b"failCgroupV1", b"/proc/sys/", b"maxPerCore", b"OOMScore")
    for path, content in files("node1").items():
        if any(quirk in content for quirk in quirks):
            assert "lab" in path, path


def test_one_image_goes_by_the_names_that_kubeadm_asks_for_and_has_what_iptables_needs(files):
    with tarfile.open(fileobj=BytesIO(files("node2")[f"{kubeadm.IMAGES}/kubernetes.tar"])) as found:
        (manifest,) = json.load(found.extractfile("manifest.json"))
        layer = found.extractfile(manifest["Layers"][0]).read()
    assert set(manifest["RepoTags"]) == {
        *(f"lab.invalid/{name}:v1.2.3" for name in kubeadm.COMPONENTS),
        "lab.invalid/etcd:1",
    }
    with tarfile.open(fileobj=BytesIO(layer)) as inside:

        def read(path: str) -> str:
            return inside.extractfile(path).read().decode()

        for name in (*kubeadm.COMPONENTS, "etcd"):
            assert read(f"usr/local/bin/{name}") == "kubernetes"
        assert read("usr/sbin/ip6tables-restore") == kubeadm.IPTABLES
        assert read("usr/lib/arch/xtables/libxt_mark.so") == "mark"
        assert read("lib64/loader") == "usr/lib/loader"


def test_the_program_goes_by_all_its_names(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubernetes").touch()
    kubeadm.pack(tmp_path)
    names = set(os.listdir(tmp_path / "bin")) - {"kubernetes"}
    assert names == {*kubeadm.COMPONENTS, "etcd", "kubeadm", "kubectl", "kubelet"}
    assert all((tmp_path / "bin" / name).exists() for name in names)


def test_its_nodes_are_in_groups_of_their_own(tmp_path):
    known = inventory.data(Lab("abcde", tmp_path), PLAN)
    assert known["headcni"]["children"] == ["kubeadm"]
    assert known["kubeadm_control_plane"] == {"hosts": ["node1"]}
    assert known["kubeadm_worker"] == {"hosts": ["node2"]}


def test_it_is_a_version_that_debians_containerd_still_works_with():
    assert tools.KUBERNETES in tools.ON_DEMAND
    assert tools.kubernetes_version().startswith("v1.36.")
    assert tools.KUBERNETES.pinned("go.etcd.io/etcd/server/v3").startswith("3.6.")
    for staged in ("api", "client-go", "kubelet", "kubectl"):
        wanted = tools.kubernetes_version().replace("v1.", "v0.")
        assert tools.KUBERNETES.replaced(f"k8s.io/{staged}") == wanted
