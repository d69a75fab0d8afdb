"""Where the container runtimes of a node look for plugins and networks, on made-up file systems."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.shared import (
    container_runtimes as runtimes,
)
from ansible_collections.headcni.mesh.plugins.module_utils.shared.container_runtimes import Runtime
from fake_root import BOOTED, FakeRoot

CONFIG = "/etc/containerd/config.toml"
DEBIAN = """\
version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "/var/lib/containerd"
"""
K3S = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"
K3S_FLANNEL = """\
version = 3
imports = ["/var/lib/rancher/k3s/agent/etc/containerd/config-v3.toml.d/*.toml"]
[grpc]
  address = "/run/k3s/containerd/containerd.sock"
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ["/var/lib/rancher/k3s/data/cni"]
  conf_dir = "/var/lib/rancher/k3s/agent/etc/cni/net.d"
"""


@pytest.fixture
def root(tmp_path) -> FakeRoot:
    return FakeRoot(tmp_path)


def compared(root, bin_dirs=("/opt/cni/bin",), conf_dir="/etc/cni/net.d", network="headcni"):
    found = runtimes.running(str(root))
    return runtimes.compare(
        found, runtimes.of_kubelet(found, str(root)), bin_dirs, conf_dir, network
    )


def only(root) -> Runtime:
    (found,) = runtimes.running(str(root))
    return found


def test_a_file_of_a_runtime_that_does_not_run_says_nothing(root):
    root.file(CONFIG, DEBIAN)
    assert runtimes.running(str(root)) == []


def test_debians_containerd_stops_with_the_line_to_add(root):
    root.process("containerd")
    root.file(CONFIG, DEBIAN)
    problems, notes = compared(root)
    assert notes == []
    assert problems == [
        "container runtime: containerd looks for plugins in /usr/lib/cni "
        "(/etc/containerd/config.toml) and HeadCNI's are put into /opt/cni/bin, so no pod could "
        "start: set headcni_node_cni_bin_dirs: [/opt/cni/bin, /usr/lib/cni]"
    ]
    assert compared(root, ["/opt/cni/bin", "/usr/lib/cni"]) == ([], [])
    assert compared(root, ["/usr/lib/cni/"]) == ([], [])


def test_a_containerd_without_a_file_looks_where_we_write(root):
    root.process("containerd")
    assert only(root) == Runtime("containerd", "", socket="/run/containerd/containerd.sock")
    assert compared(root) == ([], [])


@pytest.mark.parametrize(
    "text",
    [
        '[plugins.cri.cni]\nbin_dir = "/x"\nconf_dir = "/y"\n',
        'version = 1\n[plugins.cri.cni]\nbin_dir = "/x"\nconf_dir = "/y"\n',
        'version = 2\nplugins."io.containerd.grpc.v1.cri".cni = {bin_dir="/x", conf_dir="/y"}\n',
        'version = 3\n[plugins."io.containerd.cri.v1.runtime".cni]\n'
        'bin_dirs = [\n  "/x", # first\n]\nconf_dir = "/y"\n',
    ],
)
def test_every_version_of_containerds_configuration_is_understood(root, text):
    root.process("containerd", "--log-level", "info", "--config", "/etc/mine.toml")
    root.file("/etc/mine.toml", text)
    found = only(root)
    assert (found.bin_dirs, found.conf_dir, found.source) == (("/x",), "/y", "/etc/mine.toml")


def test_imported_files_are_followed_and_the_last_wins(root):
    root.process("containerd")
    root.file(CONFIG, 'version = 3\nimports = ["conf.d/*.toml", "/etc/more.toml"]\n')
    cni = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\n"
    root.file("/etc/containerd/conf.d/20-b.toml", f'{cni}bin_dirs = ["/b"]\n')
    root.file("/etc/containerd/conf.d/10-a.toml", f'{cni}bin_dirs = ["/a"]\nconf_dir = "/c"\n')
    root.file("/etc/more.toml", 'imports = ["/etc/containerd/config.toml"]\n')  # in a circle
    found = only(root)
    assert (found.bin_dirs, found.conf_dir, found.certain) == (("/b",), "/c", True)


def test_an_imported_section_that_some_versions_merge_and_others_replace_does_not_stop(root):
    root.process("containerd")
    root.file(CONFIG, f'imports = ["/etc/nvidia.toml"]\n{DEBIAN}')
    root.file(
        "/etc/nvidia.toml",
        'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n',
    )
    problems, notes = compared(root)
    assert problems == [] and "headcni_node_cni_bin_dirs" in notes[0]


def test_what_cannot_be_read_is_a_note_that_names_the_line(root):
    root.process("containerd")
    root.file(CONFIG, "version = 2\nroot = /var/lib\n")
    problems, notes = compared(root)
    assert problems == []
    assert "/etc/containerd/config.toml cannot be read (line 2: expected a value)" in notes[0]
    root.file(CONFIG, "#" * (1 << 20))
    assert "has 1048576 bytes" in compared(root)[1][0]


def test_more_imported_files_than_anybody_has_are_not_all_read(root):
    root.process("containerd")
    root.file(CONFIG, 'imports = ["/etc/many/*.toml"]\n')
    for number in range(200):
        root.file(f"/etc/many/{number}.toml", "")
    assert "imports more than 64 files" in compared(root)[1][0]


def test_a_configuration_that_was_changed_after_the_start_is_a_note(root):
    root.process("containerd", age=60)
    root.file(CONFIG, "version = 2\n", changed=BOOTED + 59)
    assert compared(root) == ([], [])
    root.file(CONFIG, "version = 2\n", changed=BOOTED + 3600)
    assert "was changed after containerd was started" in compared(root)[1][0]


@pytest.mark.parametrize("disabled", ["cri", "io.containerd.grpc.v1.cri"])
def test_a_containerd_without_cri_as_dockers_package_has_it_is_a_note(root, disabled):
    root.process("containerd")
    root.file(CONFIG, f'disabled_plugins = ["{disabled}"]\n{DEBIAN}')
    problems, notes = compared(root)
    assert problems == [] and len(notes) == 1 and "CRI plugin turned off" in notes[0]


def test_dockers_private_containerd_is_nobodys(root):
    root.process("containerd", "--config", "/var/run/docker/containerd/containerd.toml")
    assert runtimes.running(str(root)) == []


def test_a_containerd_inside_a_container_is_nobodys(root):
    root.process("containerd", namespace="2")
    root.file(CONFIG, DEBIAN)
    assert runtimes.running(str(root)) == []


def test_k3s_flannel_stops_with_the_flag_and_the_migration_guide(root):
    server = root.process("k3s-server")
    root.process("containerd", parent=server)  # k3s hides its arguments
    root.file(K3S, K3S_FLANNEL)
    (problem,), notes = compared(root)
    assert notes == []
    assert "k3s runs its own flannel" in problem
    assert "--flannel-backend=none" in problem and "docs/k3s.md#from-flannel" in problem
    # To write into its directories does not help: k3s puts its own conflist back.
    at_k3s = compared(
        root, ["/var/lib/rancher/k3s/data/cni"], "/var/lib/rancher/k3s/agent/etc/cni/net.d"
    )
    assert at_k3s == ([problem], [])


def test_k3s_with_flannel_off_looks_where_we_write(root):
    root.process("containerd", "-c", K3S, "-a", "/run/k3s/containerd/containerd.sock")
    root.file(K3S, "version = 3\n")
    found = only(root)
    assert (found.name, found.socket) == ("k3s", "/run/k3s/containerd/containerd.sock")
    assert compared(root) == ([], [])


def test_beside_k3s_another_containerd_is_only_worth_a_note(root):
    """Debian's docker.io brings one."""
    root.process("containerd", "-c", K3S)
    root.file(K3S, "version = 3\n")
    root.process("containerd")
    root.file(CONFIG, DEBIAN)
    problems, notes = compared(root)
    assert problems == [] and "/usr/lib/cni" in notes[0]


@pytest.mark.parametrize("how", ["argument", "file"])
def test_the_runtime_that_kubelet_uses_decides(root, how):
    root.process("containerd")
    root.file(CONFIG, DEBIAN)
    root.process("crio")
    if how == "argument":
        root.process("kubelet", "--container-runtime-endpoint=unix:///var/run/crio/crio.sock")
    else:
        root.process("kubelet", "--config", "/etc/kubelet.yaml")
        root.file(
            "/etc/kubelet.yaml", 'a: b\ncontainerRuntimeEndpoint: "unix:///run/crio/crio.sock"\n'
        )
    problems, notes = compared(root)
    assert problems == [] and len(notes) == 1


def test_cri_o_is_read_with_its_drop_in_files(root):
    root.process("crio")
    root.file("/etc/crio/crio.conf", '[crio.network]\nplugin_dirs = ["/usr/libexec/cni/"]\n')
    root.file("/etc/crio/crio.conf.d/10-crio.conf", '[crio.network]\nnetwork_dir = "/etc/cri/"\n')
    problems, _ = compared(root)
    assert "headcni_node_cni_bin_dirs: [/opt/cni/bin, /usr/libexec/cni]" in problems[0]
    assert "headcni_node_cni_conf_dir: /etc/cri/" in problems[1]
    assert "/etc/crio/crio.conf.d/10-crio.conf" in problems[1]
    root.file(
        "/etc/crio/crio.conf.d/20-mine.conf", "[crio.network]\nplugin_dirs = [\n'/opt/cni/bin/']\n"
    )
    assert len(compared(root, conf_dir="/etc/cri")[0]) == 0


def test_a_cri_o_that_uses_one_network_only_stops_unless_it_is_ours(root):
    root.process("crio")
    root.file("/etc/crio/crio.conf", '[crio.network]\ncni_default_network = "crio"\n')
    (problem,), _ = compared(root)
    assert "headcni_node_conflist_name: crio" in problem
    assert compared(root, network="crio") == ([], [])


@pytest.mark.parametrize(
    ("process", "path", "text"),
    [
        (
            "containerd",
            CONFIG,
            'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\n  sandbox_image = "x/pause:3"\n',
        ),
        (
            "containerd",
            CONFIG,
            "version = 3\n[plugins.'io.containerd.cri.v1.images'.pinned_images]\n"
            "  sandbox = 'x/pause:3'\n",
        ),
        ("crio", "/etc/crio/crio.conf", '[crio.image]\npause_image = "x/pause:3"\n'),
    ],
)
def test_the_image_that_every_pod_starts_from_is_known(root, process, path, text):
    root.process(process)
    root.file(path, text)
    assert only(root).sandbox_image == "x/pause:3"


def test_the_file_that_runs_is_known(root):
    pid = root.process("containerd")
    root.link(f"/proc/{pid}/exe", "/opt/x/containerd")
    assert only(root).program == "/opt/x/containerd"
