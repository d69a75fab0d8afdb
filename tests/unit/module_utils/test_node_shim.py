"""A node gets the native shim of its architecture, if that is whole, runs, and is wanted."""

from __future__ import annotations

import hashlib
import os
import platform
import stat

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import node_release, node_shim
from ansible_collections.headcni.mesh.plugins.module_utils.node_release import (
    Release,
    ReleaseError,
    Steps,
    Wanted,
)
from shims import NATIVE

NAME = node_shim.BINARIES.get(platform.machine(), "")
RUNS = '#!/bin/sh\necho "native shim: it is not in the bin directory of a release"\nexit 1\n'
BROKEN = "#!/bin/sh\nexit 127\n"


@pytest.fixture
def wanted(tmp_path):
    return Wanted([str(tmp_path / "cni")], str(tmp_path / "bin"), str(tmp_path / "units"), [])


@pytest.fixture
def release(tmp_path):
    """One that was just unpacked."""
    return made(tmp_path, RUNS)


def made(tmp_path, binary: str | None, *, python: bool = True) -> Release:
    path = tmp_path / "opt/releases/1.0.0"
    for folder in ("bin", "native", "python", "units"):
        (path / folder).mkdir(parents=True)
    (path / "VERSION").write_text("1.0.0\n")
    for program in node_shim.PROGRAMS:
        for folder in ("bin", "python") if python else ("bin",):
            (path / folder / program).write_text(f"python {program}")
    if binary is not None:
        (path / "native" / NAME).write_text(binary)
        (path / "native" / NAME).chmod(0o755)
        digest = hashlib.sha256(binary.encode()).hexdigest()
        (path / "native/SHA256SUMS").write_text(f"{digest}  {NAME}\n")
    return Release("1.0.0", "1.0.0", "d", str(path))


def arranged(release, wanted, tmp_path, *, dry=False) -> str:
    steps = Steps()
    node_release.arrange(release, wanted, steps, root=str(tmp_path / "opt"), dry=dry)
    return "".join(line for line in steps.diff()["after"].splitlines() if line.startswith("shim:"))


def programs(release) -> set[str]:
    found = set()
    for name in node_shim.PROGRAMS:
        with open(f"{release.path}/bin/{name}") as file:
            found.add(file.read())
    return found


def off(wanted) -> Wanted:
    return Wanted(wanted.bin_dirs, wanted.command_dir, wanted.unit_dir, [], native_shim=False)


def test_every_architecture_of_the_release_has_its_name():
    listed = {line.split()[1] for line in (NATIVE / "SHA256SUMS").read_text().splitlines()}
    assert listed == set(node_shim.BINARIES.values())


def test_the_native_shim_is_put_in_place_once(release, wanted, tmp_path):
    assert arranged(release, wanted, tmp_path, dry=True) == f"shim: native ({NAME})"
    assert programs(release) == {f"python {name}" for name in node_shim.PROGRAMS}
    assert arranged(release, wanted, tmp_path) == f"shim: native ({NAME})"
    assert programs(release) == {RUNS}
    assert stat.S_IMODE(os.stat(f"{release.path}/bin/loopback").st_mode) == 0o755
    assert arranged(release, wanted, tmp_path) == ""


def test_it_is_switched_off_and_on_again(release, wanted, tmp_path):
    arranged(release, wanted, tmp_path)
    said = "shim: Python (the native shim is switched off)"
    assert arranged(release, off(wanted), tmp_path) == said
    assert programs(release) == {f"python {name}" for name in node_shim.PROGRAMS}
    assert arranged(release, off(wanted), tmp_path) == ""
    assert arranged(release, wanted, tmp_path) == f"shim: native ({NAME})"


def test_check_mode_foretells_it_for_a_release_that_is_still_to_come(wanted, tmp_path):
    coming = node_release.foretold("1.0.0", "d", str(tmp_path / "opt"))
    assert arranged(coming, wanted, tmp_path, dry=True) == f"shim: native ({NAME})"
    assert arranged(coming, off(wanted), tmp_path, dry=True) == ""


def test_a_machine_for_which_there_is_none_uses_python(release):
    shim = node_shim.choose(release.path, wanted=True, machine="mips64")
    assert shim.label == "Python (the release has no native shim for mips64)"
    assert shim.programs["headcni-ipam"] == b"python headcni-ipam" and not shim.problem


def test_a_release_of_before_is_left_alone(wanted, tmp_path):
    older = made(tmp_path, None, python=False)
    assert arranged(older, wanted, tmp_path) == arranged(older, off(wanted), tmp_path) == ""
    assert programs(older) == {f"python {name}" for name in node_shim.PROGRAMS}


def test_one_that_does_not_run_here_is_not_used_and_told(wanted, tmp_path):
    broken = made(tmp_path, BROKEN)
    assert arranged(broken, wanted, tmp_path) == ""
    shim = node_release.shim_of(broken, wanted)
    assert "does not run on this node" in shim.problem and "exit code 127" in shim.problem
    assert programs(broken) == {f"python {name}" for name in node_shim.PROGRAMS}


def test_one_that_the_node_no_longer_runs_is_replaced(release, wanted, tmp_path):
    arranged(release, wanted, tmp_path)
    os.chmod(f"{release.path}/native/{NAME}", 0o644)  # as when an allow-list is switched on
    assert "does not run" in node_release.shim_of(release, wanted).problem
    arranged(release, wanted, tmp_path)
    assert programs(release) == {f"python {name}" for name in node_shim.PROGRAMS}


def test_one_that_was_changed_on_the_node_is_refused(release, wanted, tmp_path):
    with open(f"{release.path}/native/{NAME}", "a") as file:
        file.write("evil")
    with pytest.raises(ReleaseError, match=r"its SHA-256 [0-9a-f]{64} is not in .*SHA256SUMS"):
        arranged(release, wanted, tmp_path)
    assert programs(release) == {f"python {name}" for name in node_shim.PROGRAMS}
    assert arranged(release, off(wanted), tmp_path) == ""
