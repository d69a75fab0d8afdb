"""The calls of test_server.py once more, started as a container runtime starts the native shim."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import node_shim

from tests.daemon.conftest import ServedNode
from tests.daemon.test_server import TestWithoutIt as TestWithoutIt
from tests.daemon.test_server import held as held
from tests.daemon.test_server import (
    test_daemon_and_shim_give_the_same_bytes as test_daemon_and_shim_give_the_same_bytes,
)


@dataclass
class NativeNode(ServedNode):
    def command(self, plugin: str = "headcni") -> list[str]:
        return [*self._on_it, str(self.plugins / plugin)]


@pytest.fixture(scope="session")
def native_plugins(plugins, tmp_path_factory):
    """/opt/cni/bin of a node with the same release, on which the native shim is active."""
    home = (plugins / "headcni").resolve().parent.parent
    folder = tmp_path_factory.mktemp("native")
    subprocess.run(["cp", "-a", home, folder / "release"], check=True, timeout=60)
    shim = node_shim.choose(str(folder / "release"), wanted=True)
    assert shim.is_native, shim.label
    (folder / "bin").mkdir()
    for name, content in shim.programs.items():
        (folder / "release/bin" / name).write_bytes(content)
        (folder / "bin" / name).symlink_to(folder / "release/bin" / name)
    return folder / "bin"


@pytest.fixture
def node(tmp_path, native_plugins):
    made = NativeNode.create(tmp_path, native_plugins)
    yield made
    made.remove()


def test_a_pod_comes_is_checked_and_goes_by_all_three_programs(node, server):
    pod, conf = node.pod(), node.conf()
    result = node.add(conf, pod).ok
    node.check(conf, pod, result).succeeds()
    node.delete(conf, pod).succeeds()
    assert node.has_served(ADD=1, CHECK=1, DEL=1)
    lo = {"cniVersion": "1.0.0", "name": "lo", "type": "loopback"}
    node.call("ADD", lo, pod, plugin="loopback", ifname="lo").succeeds()
    asked = {**conf, "type": "bridge", "ipam": {**conf["ipam"], "dataDir": str(node.tmp / "data")}}
    node.call("ADD", asked, pod, plugin="headcni-ipam").succeeds()
    node.call("DEL", asked, pod, plugin="headcni-ipam").succeeds()
    assert node.is_empty()
    node.wait_for(lambda: node.served("LOOPBACK-ADD") == node.served("IPAM-DEL") == 1)


def test_no_interpreter_is_started_while_the_daemon_answers(node, server):
    home = (node.plugins / "headcni").resolve().parent.parent
    (home / "python").rename(home / "away")
    try:
        pod = node.pod()
        node.add(node.conf(), pod).succeeds()
        node.delete(node.conf(), pod).succeeds()
        node.call("STATUS", node.conf()).succeeds()
    finally:
        (home / "away").rename(home / "python")
    assert node.has_served(ADD=1, DEL=1, STATUS=1)
