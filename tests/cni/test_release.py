"""The release: the same bytes each time, complete, and good on every Python that nodes have."""

from __future__ import annotations

import hashlib
import tarfile

from cni_node import EMPTY, sh
from lab_command import CHECKOUT


def test_building_it_again_gives_the_same_bytes(release, tmp_path):
    sh(CHECKOUT / ".venv/bin/python", CHECKOUT / "plugins/cni/release.py", "--output", tmp_path)
    again = next(tmp_path.iterdir())
    assert hashlib.sha256(again.read_bytes()).digest() == (
        hashlib.sha256(release.read_bytes()).digest()
    )


def test_it_stands_alone(release):
    with tarfile.open(release) as archive:
        members = archive.getmembers()
    assert all(member.isfile() for member in members)
    assert {(m.uid, m.gid, m.mtime) for m in members} == {(0, 0, 315532800)}
    names = {member.name.partition("/")[2] for member in members}
    assert {
        "bin/headcni",
        "bin/headcni-ipam",
        "VERSION",
        "headcni/mesh/namespace/__main__.py",
        "headcni/settings/config.schema.json",
        "headcni/shared/podcidr.py",
        "headcni/shared/conflist.py",
        "vendor/pyroute2/__init__.py",
    } <= names
    assert [name for name in names if name.endswith((".so", ".pyc"))] == []


def test_a_pod_comes_is_checked_and_goes_on_every_python(node, python, datapath):
    node.python = python
    ports = [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]
    conf = node.dual(
        datapath=datapath,
        capabilities={"portMappings": True},
        runtimeConfig={"portMappings": ports},
    )
    pod = node.pod()
    result = node.add(conf, pod).ok
    node.check(conf, pod, result).succeeds()
    assert node.call("STATUS", node.dual()).code == 0
    assert (
        node.call(
            "GC",
            {**conf, "cni.dev/valid-attachments": [{"containerID": pod.name, "ifname": "eth0"}]},
        ).code
        == 0
    )
    node.delete(conf, pod).succeeds()
    assert node.leftovers() == EMPTY
