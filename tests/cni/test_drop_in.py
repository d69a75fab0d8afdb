"""headcni-ipam in the place of host-local: the same configuration, the same answer."""

from __future__ import annotations

import json
import subprocess

import pytest
from cni_node import EMPTY

from lab import tools

VERSIONS = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0"]
# As Go's structs are written, and what a newer host-local may know.
UNKNOWN = {"Name": "pods", "someday": True}


def ipam_conf(node, kind, version, **ipam):
    section = {
        "type": kind,
        "ranges": [[{"subnet": "10.66.1.0/24"}], [{"subnet": "fd66::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "fd99::/64", "gw": "fd66::9"}],
        "dataDir": str(node.tmp / "data"),
        **ipam,
    }
    return {"cniVersion": version, "name": "pods", "type": "bridge", "ipam": section}


def run(node, program, verb, conf, pod):
    done = subprocess.run(
        ["ip", "netns", "exec", node.netns.name, *program],
        input=json.dumps(conf),
        text=True,
        capture_output=True,
        env=node.environment(verb, pod),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else {}


@pytest.mark.parametrize("version", VERSIONS)
def test_it_answers_as_host_local_does_in_every_version(node, version):
    pod = node.pod()
    theirs = ipam_conf(node, "host-local", version, **UNKNOWN)
    ours = ipam_conf(node, "headcni-ipam", version, **UNKNOWN)
    expected = run(node, [str(tools.CNI.bin / "host-local")], "ADD", theirs, pod)
    answer = node.add(ours, pod, plugin="headcni-ipam")
    made = answer.ok
    assert {**made, "dns": made.get("dns", {})} == {**expected, "dns": expected.get("dns", {})}
    assert "ipam.someday is ignored" in answer.stderr
    assert "ipam.Name" not in answer.stderr
    node.delete(ours, pod, plugin="headcni-ipam").succeeds()
    assert node.leftovers()["allocation"] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_gos_bridge_works_with_it(node, version):
    pod = node.pod()
    conf = ipam_conf(node, "headcni-ipam", version, **UNKNOWN)
    bridge = [str(tools.CNI.bin / "bridge")]
    run(node, bridge, "ADD", conf, pod)
    assert "10.66.1.2/24" in pod.addresses("eth0")
    run(node, bridge, "DEL", conf, pod)
    assert node.leftovers()["allocation"] == []


def test_an_unknown_key_is_no_obstacle_to_type_headcni_either(node):
    ranges = [[{"subnet": "10.55.1.0/24", "colour": "red"}]]
    ipam = {"type": "headcni-ipam", "ranges": ranges, "Name": "pods", "someday": 1}
    pod, conf = node.pod(), node.conf(ipam=ipam)
    answer = node.add(conf, pod)
    result = answer.ok
    assert "ipam.someday is ignored" in answer.stderr
    assert "ipam.ranges[0][0].colour is ignored" in answer.stderr
    node.check(conf, pod, result).succeeds()
    node.delete(conf, pod).succeeds()
    assert node.leftovers() == EMPTY
