"""What a node of the lab gets of k3s: all of it, or nothing."""

from __future__ import annotations

import ipaddress
import json
import os
import tarfile
from dataclasses import replace
from io import BytesIO

import pytest

from lab import cluster, inventory, k3s, preflight, tools
from lab.images import BUSYBOX, COREDNS, image, web_server
from lab.layout import Lab, Plan

PLAN = Plan(
    ipaddress.IPv4Network("10.9.8.0/24"),
    ipaddress.IPv6Network("fd09::/64"),
    ("node1", "node2"),
    "1.0",
    cluster="k3s",
)


@pytest.fixture
def files(tmp_path):
    """Of a machine."""
    lab = Lab("abcde", tmp_path / "lab")
    lab.dir.mkdir()
    k3s.make_token(lab)
    home, base = tmp_path / "built", tmp_path / "base"
    (home / "manifests").mkdir(parents=True)
    for name in k3s.MANIFESTS:
        (home / "manifests" / name).write_text(name)
    (home / "manifests" / "coredns.yaml").write_text(
        'image: "%{SYSTEM_DEFAULT_REGISTRY}%rancher/mirrored-coredns-coredns:1"\n'
        "clusterIP: %{CLUSTER_DNS}%\n"
    )
    (home / "coredns").write_bytes(b"coredns")
    (base / "bin").mkdir(parents=True)
    (base / "bin" / "busybox").write_bytes(b"busybox")
    return lambda machine: k3s.files(lab, PLAN, machine, home, home, base)


def config(found: dict[str, bytes]) -> dict[str, str]:
    lines = found["etc/rancher/k3s/config.yaml"].decode().splitlines()
    return dict(line.split(": ", 1) for line in lines)


def test_the_first_node_is_the_server_and_has_no_network_of_its_own(files):
    found = config(files("node1"))
    assert found["flannel-backend"] == "none" and found["disable-network-policy"] == "true"
    assert found["node-ip"] == "10.9.8.11" and "server" not in found
    manifests = [path for path in files("node1") if "/server/manifests/" in path]
    assert len(manifests) == len(k3s.MANIFESTS)
    dns = files("node1")["var/lib/rancher/k3s/server/manifests/coredns.yaml"].decode()
    assert dns.splitlines() == [f"image: {COREDNS}", "clusterIP: 10.43.0.10"]


def test_the_others_join_it_with_its_token(files):
    first, other = config(files("node1")), config(files("node2"))
    assert other["server"] == "https://10.9.8.11:6443" and other["node-ip"] == "10.9.8.12"
    assert other["token"] == first["token"] and len(other["token"]) == 32
    assert "flannel-backend" not in other
    assert not [path for path in files("node2") if "/server/" in path]
    assert b"k3s agent" in files("node2")["etc/systemd/system/k3s-agent.service"]


def test_what_is_only_the_labs_is_called_so(files):
    """A user's node has neither these files nor what is in them."""
    quirks = (b"restrict_oom_score_adj", b"failCgroupV1", b"/proc/sys/", b"INVOCATION_ID")
    for path, content in files("node1").items():
        if any(quirk in content for quirk in quirks):
            assert "lab" in path, path


def test_without_a_cluster_there_is_nothing(tmp_path):
    lab = Lab("abcde", tmp_path)
    assert cluster.files(lab, replace(PLAN, cluster=""), "node1") == {}
    assert cluster.files(lab, PLAN, "control") == {}
    assert "k3s" not in inventory.data(lab, replace(PLAN, cluster=""))
    known = inventory.data(lab, PLAN)
    assert known["k3s_server"] == {"hosts": ["node1"]}
    assert known["k3s_agent"] == {"hosts": ["node2"]}


def test_the_token_is_roots_alone(tmp_path):
    lab = Lab("abcde", tmp_path)
    k3s.make_token(lab)
    assert os.stat(lab.k3s_token).st_mode & 0o777 == 0o600


def test_a_plan_remembers_its_cluster_and_an_older_one_has_none(tmp_path):
    lab = Lab("abcde", tmp_path)
    PLAN.save(lab.plan_file)
    assert Plan.load(lab) == PLAN
    known = json.loads(lab.plan_file.read_text())
    del known["cluster"]
    lab.plan_file.write_text(json.dumps(known))
    assert Plan.load(lab) == replace(PLAN, cluster="")


def unpacked(archive: bytes):
    """A docker archive's manifest, its configuration, and what the image has in it."""
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        (manifest,) = json.load(files.extractfile("manifest.json"))
        shown = json.load(files.extractfile(manifest["Config"]))
        layer = files.extractfile(manifest["Layers"][0]).read()
    return manifest, shown, tarfile.open(fileobj=BytesIO(layer))


def test_an_image_is_a_docker_archive_whose_parts_fit_together():
    manifest, shown, inside = unpacked(image(BUSYBOX, b"program", "x86_64"))
    assert manifest["RepoTags"] == [BUSYBOX] and shown["architecture"] == "amd64"
    assert inside.extractfile("bin/sh").read() == b"program"


def test_a_web_servers_image_has_its_server_and_a_page():
    manifest, shown, inside = unpacked(web_server("lab.invalid/web:1", b"program", "x86_64"))
    assert manifest["RepoTags"] == ["lab.invalid/web:1"]
    program, *_ = shown["config"]["Entrypoint"]
    assert inside.extractfile(program.lstrip("/")).read() == b"program"
    assert inside.extractfile("www/index.html").read()


def test_k3s_is_not_among_the_tools_that_every_lab_needs():
    assert tools.K3S not in tools.ALL and tools.K3S in tools.ON_DEMAND
    assert tools.k3s_version() == "v1.35.0+k3s3"
    assert tools.K3S.pinned("github.com/k3s-io/k3s").startswith("1.35.")
    assert tools.K3S.stamps()["k8s.io/component-base/version.gitVersion"] == tools.k3s_version()


def test_the_way_of_building_is_part_of_the_key():
    assert replace(tools.K3S, tags="other").key != tools.K3S.key
    assert replace(tools.K3S, cgo=False).key != tools.K3S.key


@pytest.mark.parametrize(("used", "missing"), [(10, False), (100, True)])
def test_a_machine_without_inotify_instances_to_spare_is_told_before_anything_is_made(
    monkeypatch, tmp_path, used, missing
):
    with open("/proc/sys/fs/inotify/max_user_instances") as file:
        in_use = int(file.read()) - 128 + used
    monkeypatch.setattr(preflight, "_inotify_instances", lambda: in_use)
    problem = preflight._inotify(Lab("abcde", tmp_path), 3, "k3s")
    assert bool(problem) == missing
    assert not missing or "fs.inotify.max_user_instances=" in problem
    assert preflight._inotify(Lab("abcde", tmp_path), 3, "") is None
