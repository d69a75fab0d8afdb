"""What kind of machine a node is. Machines that we do not have are made-up file systems."""

from __future__ import annotations

import ctypes.util
import os
import sys

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import node_platform
from fake_root import FakeRoot


@pytest.fixture
def root(tmp_path) -> FakeRoot:
    return FakeRoot(tmp_path)


@pytest.mark.parametrize(
    ("path", "text", "kind"),
    [
        ("/run/systemd/container", "lxc\n", "lxc"),
        ("/proc/1/environ", "TERM=linux\0container=lxc\0", "lxc"),
        ("/proc/1/environ", "TERM=linux\0", ""),
    ],
)
def test_a_container_is_known_by_what_systemd_or_its_first_process_says(root, path, text, kind):
    root.file(path, text)
    assert node_platform.container(str(root)) == kind


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        ("lxc", "lxc.cgroup2.devices.allow: c 10:200 rwm"),
        ("lxc", "lxc.mount.entry: /dev/net/tun dev/net/tun none bind,create=file"),
        ("systemd-nspawn", "--bind=/dev/net/tun"),
        ("docker", "docker run --device /dev/net/tun"),
        ("openvz", "give the openvz container /dev/net/tun"),
        ("", "modprobe tun"),
    ],
)
def test_a_node_without_tun_is_told_what_gives_it_one(kind, fix):
    assert fix in node_platform.tun_fix(kind)


def test_a_module_is_loaded_on_the_machine_and_not_in_its_container():
    assert "on the machine that runs this lxc container" in node_platform.module_fix("veth", "lxc")
    assert "modprobe veth" in node_platform.module_fix("veth", "")


@pytest.mark.skipif(not ctypes.util.find_library("nftables"), reason="no libnftables here")
def test_a_library_that_can_be_loaded_is_no_problem():
    assert node_platform.lacks_library(sys.executable) == []


def test_a_library_that_is_not_there_is_told_with_the_package():
    (problem,) = node_platform.lacks_library(sys.executable, "libnftables-of-nobody.so.1")
    assert "libnftables-of-nobody.so.1 cannot be loaded" in problem
    assert "No such file or directory" in problem
    assert problem.endswith("install the package nftables")


def test_a_library_that_is_not_one_is_told(tmp_path):
    (tmp_path / "libnftables.so.1").write_bytes(b"")
    (problem,) = node_platform.lacks_library(sys.executable, str(tmp_path / "libnftables.so.1"))
    assert "file too short" in problem


def test_an_interpreter_that_is_not_there_is_told_by_the_check_of_python():
    assert node_platform.lacks_library("/does/not/exist") == []


def test_daemon_mode_needs_what_leads_tailscaled_into_its_namespace(root):
    assert node_platform.lacks_programs("host", str(root)) == []
    (problem,) = node_platform.lacks_programs("daemon", str(root))
    assert "/usr/bin/nsenter, /usr/bin/setpriv not there" in problem and "util-linux" in problem
    for name in ("nsenter", "setpriv"):
        os.chmod(root.file(f"/usr/bin/{name}", ""), 0o755)
    assert node_platform.lacks_programs("daemon", str(root)) == []


def test_programs_that_only_operators_need_are_notes(tmp_path):
    ip, nft = node_platform.program_notes(str(tmp_path))
    assert "ip is not on this node" in ip and "iproute2" in ip
    assert "nft is not on this node" in nft and "install nftables" in nft


@pytest.mark.parametrize(("enforce", "count"), [("1", 1), ("0", 0), (None, 0)])
def test_selinux_is_a_note_only_while_it_enforces(root, enforce, count):
    if enforce:
        root.file("/sys/fs/selinux/enforce", enforce)
    notes = node_platform.selinux_notes(str(root))
    assert len(notes) == count and all("restorecon" in one for one in notes)


def test_cgroup_version_1_is_a_note_for_kubelet(root):
    assert node_platform.cgroup_notes(str(root)) == []
    root.file("/sys/fs/cgroup/memory/tasks", "")
    assert "kubelet 1.35" in node_platform.cgroup_notes(str(root))[0]
    root.file("/sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    assert node_platform.cgroup_notes(str(root)) == []


def test_a_clock_that_nobody_keeps_is_a_note():
    assert node_platform.clock_notes(0x2001) == []
    assert node_platform.clock_notes(None) == []
    assert "chrony" in node_platform.clock_notes(0x40)[0]


def test_the_kernel_tells_how_its_clock_is():
    assert isinstance(node_platform.clock_status(), int)
