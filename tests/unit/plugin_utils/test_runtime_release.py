"""The tarball on the controller: built once, from the collection or from what it is given."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest
from ansible_collections.headcni.mesh.plugins.plugin_utils import runtime_release
from ansible_collections.headcni.mesh.plugins.plugin_utils.runtime_release import ReleaseError

from headcni import __version__


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADCNI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheels(tmp_path):
    """One wheel, pure Python, in place of the real ones: nothing is fetched here."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "some-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some.py", "")
    return str(folder)


@pytest.fixture
def sources(tmp_path, wheels):
    """A copy, links followed, as an installed collection may be. Its lock file names the wheel."""
    target = tmp_path / "cni"
    shutil.copytree(runtime_release.SOURCES, target)
    digest = hashlib.sha256(Path(wheels, "some-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    (target / "requirements.lock").write_text(f"some==1.0 \\\n    --hash=sha256:{digest}\n")
    return target


def test_the_collection_builds_its_own_release(cache, wheels, sources):
    made = runtime_release.ensure(wheels=wheels, sources=sources)
    assert made.version == __version__
    with tarfile.open(made.path) as archive:
        names = archive.getnames()
    top = f"headcni-runtime-{__version__}"
    assert f"{top}/bin/headcni" in names and f"{top}/vendor/some.py" in names
    assert cache in made.path.parents


def test_it_is_built_once(cache, wheels, sources):
    said = []
    first = runtime_release.ensure(wheels=wheels, say=said.append, sources=sources)
    again = runtime_release.ensure(wheels="/nowhere", say=said.append, sources=sources)
    assert again == first
    assert len(said) == 1


def test_many_nodes_at_once_build_it_once(cache, wheels, sources):
    said = []

    def build() -> None:
        runtime_release.ensure(wheels=wheels, say=said.append, sources=sources)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(said) == 1


def test_other_sources_give_another_release(cache, wheels, sources):
    first = runtime_release.ensure(wheels=wheels, sources=sources)
    (sources / "bin" / "headcni").write_text("other")
    second = runtime_release.ensure(wheels=wheels, sources=sources)
    assert first.digest != second.digest
    assert first.path.exists()


def test_compiled_files_beside_the_sources_change_nothing(cache, wheels, sources):
    first = runtime_release.ensure(wheels=wheels, sources=sources)
    (sources / "headcni" / "__pycache__").mkdir(exist_ok=True)
    (sources / "headcni" / "__pycache__" / "x.cpython-311.pyc").write_bytes(b"x")
    assert runtime_release.ensure(wheels=wheels, sources=sources) == first


def test_a_build_that_fails_leaves_nothing_and_says_why(cache, tmp_path):
    bad = tmp_path / "bad"
    bad.mkdir()
    with zipfile.ZipFile(bad / "some-1.0-cp311-cp311-linux_x86_64.whl", "w"):
        pass
    with pytest.raises(ReleaseError, match="is not pure Python"):
        runtime_release.ensure(wheels=str(bad))
    assert list((cache / "releases").iterdir()) == []


def wheel(folder: str, name: str, text: str) -> None:
    with zipfile.ZipFile(Path(folder, name), "w") as made:
        made.writestr("some.py", text)


def test_a_rogue_wheel_does_not_get_into_a_release(cache, wheels, sources):
    wheel(wheels, "some-1.0-py3-none-any.whl", "import os  # evil")
    with pytest.raises(ReleaseError, match=r"requirements.lock expects another: remove it"):
        runtime_release.ensure(wheels=wheels, sources=sources)
    assert list((cache / "releases").iterdir()) == []


@pytest.mark.parametrize("name", ["other-1.0-py3-none-any.whl", "some-1.1-py3-none-any.whl"])
def test_nor_does_a_wheel_beside_those_of_the_lock_file(cache, wheels, sources, name):
    wheel(wheels, name, "import os  # evil")
    with pytest.raises(ReleaseError, match=r"is not in requirements.lock, or is there twice"):
        runtime_release.ensure(wheels=wheels, sources=sources)
    assert list((cache / "releases").iterdir()) == []


def test_a_wheel_that_is_missing_is_told(cache, wheels, sources):
    with (sources / "requirements.lock").open("a") as lock:
        lock.write(f"more==2.0 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(ReleaseError, match=r"has no wheel of more, which requirements.lock names"):
        runtime_release.ensure(wheels=wheels, sources=sources)


def test_a_folder_without_wheels_is_told(cache, tmp_path):
    with pytest.raises(ReleaseError, match=r"wheels: .* has no wheels"):
        runtime_release.ensure(wheels=str(tmp_path / "nothing"))


def test_a_controller_without_pip_is_told_what_to_do(cache, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(runtime_release.sys, "executable", str(python))
    with pytest.raises(ReleaseError, match=r"has no pip .* headcni_node_release_src"):
        runtime_release.ensure()


def test_a_cache_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADCNI_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ReleaseError, match="set XDG_CACHE_HOME"):
        runtime_release.ensure()


def test_a_given_tarball_is_read_for_its_version(cache, wheels, sources, tmp_path):
    made = runtime_release.ensure(wheels=wheels, sources=sources)
    copy = tmp_path / "copy.tar.gz"
    shutil.copy(made.path, copy)
    assert runtime_release.ensure(str(copy)).digest == made.digest


@pytest.mark.parametrize("content", [None, b"not a tarball"])
def test_a_given_file_that_is_no_release_is_told(cache, tmp_path, content):
    path = tmp_path / "given.tar.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ReleaseError, match=r"src: .*given"):
        runtime_release.ensure(str(path))


def test_a_tarball_of_something_else_is_told(cache, tmp_path):
    path = tmp_path / "other.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(__file__, "other/file")
    with pytest.raises(ReleaseError, match="it holds 'other'"):
        runtime_release.ensure(str(path))


def test_a_tarball_that_is_not_what_was_asked_for_is_told():
    tarball = runtime_release.Tarball(Path("/x.tar.gz"), "1.1.0", "d" * 64)
    assert tarball.differences({}) == []
    assert tarball.differences({"version": "1.1.0", "checksum": "d" * 64}) == []
    assert tarball.differences({"version": "1.2.0"}) == [
        "version: /x.tar.gz has 1.1.0, expected 1.2.0"
    ]
