"""Directories that cannot be written to, tried on real mounts and flags where this machine can."""

from __future__ import annotations

import errno
import os
import subprocess

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import node_places

MIB = 1


def problems(path, **variables: str) -> list[str]:
    return node_places.problems({str(path): MIB}, {str(path): one for one in variables.values()})


@pytest.fixture
def mounted(tmp_path):
    """A tmpfs with the options of a test."""
    point = tmp_path / "mounted"
    point.mkdir()

    def mount(options: str) -> str:
        command = ["mount", "-t", "tmpfs", "-o", f"size=4m,{options}", "tmpfs", str(point)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode != 0:
            pytest.skip(f"no mounts here: {done.stderr.strip()}")
        return str(point)

    yield mount
    subprocess.run(["umount", str(point)], capture_output=True, timeout=30, check=False)


def test_a_directory_that_is_yet_to_be_made_is_tried_where_it_will_be(tmp_path):
    before = os.stat(tmp_path).st_mtime_ns
    assert problems(tmp_path / "a" / "b") == []
    assert os.stat(tmp_path).st_mtime_ns == before and os.listdir(tmp_path) == []


def test_a_read_only_file_system_stops_with_the_variable_that_moves_us(mounted):
    path = f"{mounted('ro')}/bin"
    (problem,) = problems(path, variable="headcni_node_bin_dir")
    assert "is mounted read-only: mount it writable" in problem
    assert "choose another directory by headcni_node_bin_dir" in problem


def test_a_full_file_system_stops(mounted):
    (problem,) = node_places.problems({mounted("rw"): 100}, {})
    assert problem.endswith("100 are needed: make room")


def test_an_immutable_directory_stops_with_chattr(tmp_path):
    folder = tmp_path / "opt"
    folder.mkdir()
    done = subprocess.run(["chattr", "+i", folder], capture_output=True, timeout=30, check=False)
    if done.returncode != 0:
        pytest.skip("no immutable directories here")
    try:
        (problem,) = problems(folder / "headcni")
    finally:
        subprocess.run(["chattr", "-i", folder], timeout=30, check=True)
    assert "which is immutable" in problem and f"chattr -i {folder}" in problem


def test_any_other_refusal_is_told_as_the_kernel_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(node_places, "cannot_write", lambda _: errno.EDQUOT)
    assert "Disk quota exceeded" in problems(tmp_path)[0]


def test_a_file_system_without_nameless_files_is_asked_for_its_flags(tmp_path, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "open", refuse)
    assert node_places.cannot_write(str(tmp_path)) == 0
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert node_places.cannot_write(str(tmp_path)) == errno.EPERM


def test_a_link_to_nowhere_stops(tmp_path):
    """As /opt of an ostree system whose /var/opt is missing."""
    (tmp_path / "opt").symlink_to("var/opt")
    assert "is a link to nowhere" in problems(tmp_path / "opt" / "headcni")[0]


def test_a_file_system_that_runs_no_programs_stops(mounted):
    assert "mounted noexec" in node_places.noexec(f"{mounted('noexec')}/headcni")[0]


def test_an_ordinary_file_system_runs_programs(mounted):
    assert node_places.noexec(f"{mounted('exec')}/headcni") == []


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("", "headcni is another program: move it away"),
        ("mine", "headcni is another program of the package mine: remove that"),
    ],
)
def test_a_program_in_the_way_is_told_with_its_package(tmp_path, package, said):
    (tmp_path / "headcni").write_text("another program")
    (tmp_path / "headcni-ipam").symlink_to("/opt/headcni/current/bin/headcni-ipam")
    (problem,) = node_places.in_the_way([str(tmp_path)], lambda _: package)
    assert said in problem


def test_tailscaled_that_cannot_be_installed_stops_unless_it_is_there(mounted, tmp_path):
    there = tmp_path / "tailscaled"
    missing = f"{mounted('ro')}/tailscaled"
    assert "rpm-ostree install tailscale" in node_places.tailscale(False, missing)[0]
    assert node_places.tailscale(True, missing) == []
    assert node_places.tailscale(False, str(there)) == []
