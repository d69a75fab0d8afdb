"""What crictl is handed, and what the runtimes' answers mean. crictl itself is a stub here; the lab
has the real one."""

from __future__ import annotations

import json

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import probe_cri
from ansible_collections.headcni.mesh.plugins.module_utils.shared import probe_pod
from ansible_collections.headcni.mesh.plugins.module_utils.shared.container_runtimes import Runtime
from fake_root import FakeRoot

CONTAINERD = Runtime("containerd", "", socket="/run/containerd/containerd.sock")
CRIO = Runtime("CRI-O", "", socket="/run/crio/crio.sock")
SHOWN = {
    "status": {"network": {"ip": "10.1.1.5", "additionalIps": [{"ip": "fd00::5"}]}},
    "info": {
        "pid": 7,
        "runtimeSpec": {
            "linux": {"namespaces": [{"type": "pid"}, {"type": "network", "path": "/run/netns/x"}]}
        },
        "cniResult": {"DNS": [{"nameservers": ["100.100.100.100"]}, {}]},
    },
}


def stub(folder, **answers):
    """A crictl that says these things; an answer that begins with ! is an error."""
    cases = []
    for verb, text in answers.items():
        (folder / verb).write_text(text.lstrip("!"))
        wrong = " >&2; exit 1" if text.startswith("!") else ""
        cases.append(f"{verb}) cat {folder / verb}{wrong};;")
    program = folder / "crictl"
    program.write_text(f"#!/bin/sh\ncase $1 in {' '.join(cases)} esac\n")
    program.chmod(0o755)
    return [str(program)]


def test_no_runtime_and_one_without_cri_are_told_with_the_fix(tmp_path):
    root = FakeRoot(tmp_path)
    with pytest.raises(probe_cri.NotCheckedError, match="no container runtime runs"):
        probe_cri.chosen(str(root))
    root.process("containerd")
    root.file("/etc/containerd/config.toml", 'disabled_plugins = ["cri"]\n')
    with pytest.raises(probe_cri.NotCheckedError, match="take cri out of disabled_plugins"):
        probe_cri.chosen(str(root))


def test_without_crictl_the_message_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(probe_cri, "_FOLDERS", (str(tmp_path),))
    with pytest.raises(probe_cri.NotCheckedError, match=r"install crictl .*verify_crictl"):
        probe_cri.command(CONTAINERD)
    with pytest.raises(probe_cri.NotCheckedError, match="/nowhere/crictl is not there"):
        probe_cri.command(CONTAINERD, "/nowhere/crictl")


def test_crictl_is_found_beside_the_runtimes_program_as_k3s_has_it(monkeypatch, tmp_path):
    monkeypatch.setattr(probe_cri, "_FOLDERS", ())
    stub(tmp_path)
    found = probe_cri.command(CONTAINERD._replace(program=str(tmp_path / "containerd")))
    assert found[0] == str(tmp_path / "crictl")
    assert "unix:///run/containerd/containerd.sock" in found


def test_a_pod_is_started_and_its_namespace_and_addresses_are_found(tmp_path):
    info = json.dumps({"config": {"sandboxImage": "pause:3"}})
    crictl = stub(tmp_path, info=info, inspecti="{}", runp="abc\n", inspectp=json.dumps(SHOWN))
    found = probe_cri.start(CONTAINERD, crictl, 18473, str(tmp_path))
    assert found == ("/run/netns/x", ("10.1.1.5", "fd00::5"), ("100.100.100.100",))
    asked = json.loads((tmp_path / "sandbox.json").read_text())
    assert asked["labels"] == {"headcni.probe": "true"}
    assert asked["port_mappings"][0]["host_port"] == 18473


def test_a_pod_without_an_address_is_a_failure():
    with pytest.raises(probe_pod.ProbeError, match="no address"):
        probe_cri.sandbox({"status": {"network": {"ip": ""}}})
    by_process = {**SHOWN, "info": {"pid": 7}}
    assert probe_cri.sandbox(by_process).netns == "/proc/7/ns/net"


def test_a_missing_image_is_seen_before_anything_is_fetched(tmp_path):
    crictl = stub(tmp_path, info="{}", inspecti="!no such image", runp="!it must not be asked")
    runtime = CONTAINERD._replace(sandbox_image="registry.example/pause:3.9")
    with pytest.raises(probe_cri.NotCheckedError, match=r"crictl pull registry.example/pause:3.9"):
        probe_cri.start(runtime, crictl, 0, str(tmp_path))


@pytest.mark.parametrize(
    "said",
    [
        'failed to get sandbox image "registry.k8s.io/pause:3.8": failed to pull image: dial tcp',
        "failed to pull and unpack image: failed to resolve reference",
        "pulling image: initializing source docker://registry.k8s.io/pause:3.9: pinging container",
    ],
)
def test_an_image_that_cannot_be_had_leaves_the_runtime_unchecked(said):
    assert isinstance(probe_cri.explained(CONTAINERD, said), probe_cri.NotCheckedError)


@pytest.mark.parametrize(
    "said",
    [
        'failed to setup network for sandbox "ab": plugin type="headcni" failed (add): pull image',
        'failed to create pod network sandbox k8s_x: error adding pod to CNI network "headcni": no',
        "cni plugin not initialized",
        'failed to find plugin "headcni" in path [/usr/lib/cni]',
        "runc create failed: unable to start container process",
        "no answer to crictl runp in 90 s",
    ],
)
def test_anything_else_fails_in_the_runtimes_words(said):
    for runtime in (CONTAINERD, CRIO):
        problem = probe_cri.explained(runtime, said)
        assert isinstance(problem, probe_pod.ProbeError)
        assert said in str(problem) and "journalctl -u" in str(problem)


def test_crictls_own_decoration_is_left_out():
    shown = (
        'time="2026-11-18T08:00:00Z" level=warning msg="old"\n'
        'time="2026-11-18T08:00:00Z" level=fatal msg="run pod sandbox: rpc error: code = Unknown '
        'desc = failed to setup network for sandbox \\"ab\\": no room"\n'
    )
    wanted = 'failed to setup network for sandbox "ab": no room'
    assert probe_pod.runtimes_words(shown) == wanted


@pytest.mark.parametrize(("runtime", "parent"), [(CONTAINERD, "system.slice"), (CRIO, None)])
def test_with_systemds_cgroups_the_pod_gets_a_slice(runtime, parent):
    info = {"config": {"containerd": {"runtimes": {"runc": {"options": {"SystemdCgroup": True}}}}}}
    made = probe_cri.sandbox_config(runtime, info, 0, "/run/x")
    assert made["linux"].get("cgroup_parent") == parent
    assert probe_cri.sandbox_config(runtime, {}, 0, "/run/x")["linux"] == {}
    assert made["port_mappings"] == []
