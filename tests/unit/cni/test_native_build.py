"""The native shim's binaries: those of the sources, the same bytes each time, hardened, and running
on every architecture."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from shims import NATIVE, PROGRAMS, Behaviour, Release, answering

from headcni.daemon.cni import protocol
from headcni.shim import LIMIT


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_native_shim", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


build = script(NATIVE / "build.py")

ALL = os.environ.get("HEADCNI_SHIM_ARCHITECTURES") == "all"
QEMU = {"x86": "i386"}  # what QEMU calls it, if that is something else
# By name: what readelf says of the machine.
MACHINES = {
    "aarch64": "AArch64",
    "arm": "ARM",
    "ppc64le": "PowerPC64",
    "riscv64": "RISC-V",
    "s390x": "IBM S/390",
    "x86": "Intel 80386",
    "x86_64": "Advanced Micro Devices X86-64",
}
ADD = {b"CNI_COMMAND": b"ADD", b"CNI_CONTAINERID": b"one", b"CNI_NETNS": b"/proc/self/ns/net"}


def test_the_binaries_are_those_of_the_sources():
    assert build.is_current(), "run: make native-shim"
    assert sorted(MACHINES) == sorted(build.TARGETS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(build.TARGETS) if ALL else ["x86_64"])
def test_building_it_again_gives_the_same_bytes(name, tmp_path):
    """From nothing if all are built; else with the compiler's cache, as that takes a minute."""
    work = tmp_path / "work" if ALL else build.work_dir()
    made = build.build(name, tmp_path, work)
    assert made.read_bytes() == (NATIVE / name).read_bytes()


@pytest.mark.parametrize("name", sorted(build.TARGETS))
def test_it_is_static_position_independent_and_read_only_after_its_start(name):
    shown = subprocess.run(
        ["readelf", "--wide", "--file-header", "--program-headers", "--dynamic", NATIVE / name],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    assert MACHINES[name] in shown
    assert re.search(r"Type:\s+DYN", shown)
    assert "INTERP" not in shown and "(NEEDED)" not in shown
    assert "GNU_RELRO" in shown and re.search(r"FLAGS.*\bNOW\b", shown) and "PIE" in shown
    assert re.search(r"GNU_STACK.* RW\s+0", shown)
    assert " RWE " not in shown
    assert 4_000 < (NATIVE / name).stat().st_size < 64_000


@pytest.fixture
def foreign(request):
    made = Release(NATIVE / request.param)
    yield request.param, made
    made.remove()


@pytest.mark.parametrize("foreign", sorted(build.TARGETS), indirect=True)
def test_it_runs_on_every_architecture(foreign):
    name, release = foreign
    prefix = []
    if name != platform.machine():
        qemu = shutil.which(f"qemu-{QEMU.get(name, name)}")
        if qemu is None:
            pytest.skip(f"there is no qemu-{QEMU.get(name, name)}: install qemu-user")
        prefix = [qemu]
    cases = [
        (b"{}", answering(0, b"x" * (LIMIT - 1))),
        (b"x" * 500_000, answering(1, b'{"code": 7}')),
        (b"{}", Behaviour((protocol.answer(2, b""),), stays=True)),
        (b"{}", Behaviour()),
        (b"x" * LIMIT, answering()),
        (b"{}", None),
    ]
    for program in PROGRAMS:
        for stdin, behaviour in cases:
            found = release.run("native", ADD, stdin, behaviour, program, prefix)
            assert found.same == release.run("python", ADD, stdin, behaviour, program).same
            assert found.used_python is (bool(found.ran))


def test_the_analyzer_of_gcc_has_nothing_to_say(tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    command = ["gcc", "-O2", *build.WARNINGS, "-fanalyzer", "-c", NATIVE / "shim.c"]
    done = subprocess.run(
        [*command, "-o", tmp_path / "shim.o"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_binary_that_was_changed_is_not_put_into_a_release(tmp_path):
    native_shims = script(NATIVE.parent / "release.py").native_shims
    shutil.copytree(NATIVE, tmp_path / "native")
    assert len(list(native_shims(tmp_path / "native"))) == len(MACHINES) + 1
    with (tmp_path / "native/x86_64").open("ab") as file:
        file.write(b"x")
    with pytest.raises(SystemExit, match="x86_64 is not what SHA256SUMS says"):
        list(native_shims(tmp_path / "native"))
    (tmp_path / "native/SHA256SUMS").unlink()
    assert list(native_shims(tmp_path / "native")) == []
