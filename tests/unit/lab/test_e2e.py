"""The images that upstream's specs find on the lab's nodes."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO

import pytest

from lab import e2e, images, tools

WANTED = [
    *(f"{e2e.REGISTRY}/{name}:1" for name in (*e2e.AGNHOST, e2e.REGRESSION, "perl", "volume/nfs")),
    f"{e2e.REGISTRY}/agnhost:2",
]


@pytest.fixture
def archives(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADCNI_CACHE", str(tmp_path / "cache"))
    base = e2e.USERLAND.root
    for path in ("bin/busybox", "lib64/loader", *(f"usr/bin/{name}" for name in e2e.PROGRAMS)):
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_text(path)
    (tmp_path / "bin").mkdir()
    for name in (*e2e.SERVED, "coredns", "bin/agnhost", f"bin/{e2e.REGRESSION}"):
        (tmp_path / name).write_text(name)

    def said(text: str):
        return lambda *_argv: type("Done", (), {"stdout": text})

    monkeypatch.setattr(images, "run", said("\t/lib64/loader (0x7f)\n"))
    monkeypatch.setattr(e2e, "run", said("busybox\nnc\nseq\nsh\nwget\n"))
    return e2e.archives(WANTED, tmp_path, tmp_path)


def opened(archive: bytes) -> tuple[set[str], dict, tarfile.TarFile]:
    with tarfile.open(fileobj=BytesIO(archive)) as found:
        (manifest,) = json.load(found.extractfile("manifest.json"))
        config = json.load(found.extractfile(manifest["Config"]))
        layer = found.extractfile(manifest["Layers"][0]).read()
    return set(manifest["RepoTags"]), config["config"], tarfile.open(fileobj=BytesIO(layer))


def test_agnhost_goes_by_every_name_and_tag_that_the_specs_ask_for(archives):
    tags, config, inside = opened(archives["agnhost.tar"])
    assert tags == {f"{e2e.REGISTRY}/agnhost:2", *(f"{e2e.REGISTRY}/{n}:1" for n in e2e.AGNHOST)}
    assert (config["Entrypoint"], config["Cmd"]) == (["/agnhost"], ["pause"])
    assert inside.extractfile("agnhost").read() == b"bin/agnhost"
    for name in ("localhost.key", "coredns"):
        assert inside.extractfile(name).read().decode() == name


def test_debians_own_programs_come_before_busybox_applets(archives):
    _tags, config, inside = opened(archives["agnhost.tar"])
    assert inside.getmember("bin/sh").linkname == "/usr/bin/dash"
    assert inside.getmember("bin/seq").linkname == "busybox"
    for name in ("nc", "wget"):
        assert f"bin/{name}" not in inside.getnames()
        assert inside.extractfile(f"usr/bin/{name}").read().decode() == f"usr/bin/{name}"
    assert "lib64/loader" in inside.getnames()
    assert "/usr/bin" in config["Env"][0]


def test_the_server_of_the_conntrack_spec_is_an_image_of_its_own(archives):
    tags, config, inside = opened(archives["regression.tar"])
    assert tags == {f"{e2e.REGISTRY}/{e2e.REGRESSION}:1"}
    assert (config["Entrypoint"], inside.getnames()) == ([f"/{e2e.REGRESSION}"], [e2e.REGRESSION])


def test_the_specs_are_those_of_the_kubernetes_that_they_are_run_at():
    module = "k8s.io/kubernetes"
    assert tools.E2E in tools.ON_DEMAND
    assert tools.E2E.pinned(module) == tools.KUBERNETES.pinned(module)
    for staged in ("api", "client-go", "kubelet"):
        assert tools.E2E.replaced(f"k8s.io/{staged}") == tools.KUBERNETES.replaced(
            f"k8s.io/{staged}"
        )
