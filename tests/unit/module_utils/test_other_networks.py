"""Whose an interface is, and which other CNI is at work, on made-up file systems."""

from __future__ import annotations

import json

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import other_networks
from ansible_collections.headcni.mesh.plugins.module_utils.shared import conflist
from fake_root import FakeRoot


@pytest.fixture
def root(tmp_path) -> FakeRoot:
    return FakeRoot(tmp_path)


@pytest.mark.parametrize(
    ("interface", "name", "change"),
    [
        ("docker0", "Docker's", "bip in /etc/docker/daemon.json"),
        ("br-0123456789ab", "Docker's", "docker network ls"),
        ("podman0", "podman's", "default_subnet"),
        ("cni-podman0", "podman's", "default_subnet"),
        ("virbr0", "libvirt's", "virsh net-edit"),
        ("lxdbr0", "LXD's", "lxc network set"),
        ("flannel.1", "flannel's", "docs/k3s.md#from-flannel"),
        ("cilium_host", "Cilium's", "remove Cilium"),
    ],
)
def test_known_interfaces_have_an_owner_and_a_way_to_change_them(root, interface, name, change):
    owner = other_networks.owner_of(interface, str(root))
    assert owner.name == name
    assert change in owner.change


@pytest.mark.parametrize("interface", ["eth0", "br-lan", "br0", "tun0", "docker00", "wg0"])
def test_of_other_interfaces_nothing_is_claimed(root, interface):
    assert other_networks.owner_of(interface, str(root)) is None


def test_cni0_is_flannels_only_if_flannel_has_been_here(root):
    assert other_networks.owner_of("cni0", str(root)).name == "of pods of another CNI"
    root.file("/run/flannel/subnet.env", "FLANNEL_SUBNET=10.42.1.1/24\n")
    owner = other_networks.owner_of("cni0", str(root))
    assert owner.name == "flannel's" and "ip link del cni0" in owner.change


def test_cni0_beside_flannels_link_is_flannels(root):
    root.file("/sys/class/net/flannel.1/mtu", "1450\n")
    assert other_networks.owner_of("cni0", str(root)).name == "flannel's"


def test_interfaces_of_other_cnis_are_a_note_each(root):
    root.file("/run/flannel/subnet.env", "")
    links = ["eth0", "docker0", "flannel.1", "cni0", "cali123", "vxlan.calico"]
    flannel, calico = other_networks.interface_notes(links, str(root))
    assert flannel.startswith("other networks: cni0, flannel.1, flannel's")
    assert calico.startswith("other networks: vxlan.calico, Calico's")


def survey(**files: object) -> conflist.Survey:
    content = {name.replace("_", "."): json.dumps(conf).encode() for name, conf in files.items()}
    return conflist.Survey("/etc/cni/net.d", content, {})


CALICO = {"name": "k8s-pod-network", "plugins": [{"type": "calico"}, {"type": "portmap"}]}


def test_a_cni_that_runs_and_keeps_its_conflist_stops(root):
    root.process("calico-node", namespace="2")  # in a pod
    (problem,) = other_networks.rivals(survey(a_conflist=CALICO), str(root))
    assert "Calico runs on this node and keeps a.conflist in /etc/cni/net.d" in problem
    assert "remove Calico from the cluster first" in problem


def test_flannels_daemon_stops_with_the_migration_guide(root):
    root.process("flanneld", namespace="2")
    flannel = {"name": "cbr0", "plugins": [{"type": "flannel"}]}
    (problem,) = other_networks.rivals(survey(a_conflist=flannel), str(root))
    assert "docs/k3s.md#from-flannel" in problem


def test_a_conflist_that_nobody_keeps_in_place_can_step_aside(root):
    assert other_networks.rivals(survey(a_conflist=CALICO), str(root)) == []


def test_calico_for_policies_alone_may_run_beside_us(root):
    root.process("calico-node", namespace="2")
    ours = {"name": "headcni", "plugins": [{"type": "headcni"}]}
    seen = survey(a_conflist=ours, b_conf=["no", "object"], c_conf={"plugins": "no list"})
    aside = conflist.Survey("", {"a.conflist.headcni-backup": json.dumps(CALICO).encode()}, {})
    assert other_networks.rivals(seen, str(root)) == []
    assert other_networks.rivals(aside, str(root)) == []
