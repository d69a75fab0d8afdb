"""The Go tools are built once, by one builder at a time, and never used half-built."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

import pytest
from lab_command import CHECKOUT, LabCommand

from lab import tools
from lab.layout import Lab, LabError

TOOLS = LabCommand("tools")


@pytest.fixture
def cache(tmp_path):
    """An empty cache; Go's own compile cache is the machine's, so builds are short."""
    return {"HEADCNI_CACHE": str(tmp_path)}


def start(cache: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["python3", "-m", "lab", "tools", "cni"],
        cwd=CHECKOUT,
        text=True,
        env={**TOOLS.env, **cache},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def built(cache: dict[str, str]) -> list[str]:
    folder = os.path.join(cache["HEADCNI_CACHE"], "tools")
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def test_a_build_that_was_killed_is_not_taken_for_a_build_and_the_next_one_clears_it_away(cache):
    worker = start(cache)
    deadline = time.monotonic() + 30
    while not built(cache) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(worker.pid, signal.SIGKILL)
    worker.communicate(timeout=10)
    assert [name.startswith(".unfinished-") for name in built(cache)] == [True]

    where = TOOLS.run("python3", "-m", "lab", "tools", "cni", **cache).stdout.strip()
    assert built(cache) == [f"cni-{tools.CNI.key}"]
    assert "cnitool" in os.listdir(where)


def test_two_builders_at_once_build_once(cache):
    workers = [start(cache) for _ in range(2)]
    said = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert sum("✓ building cni" in errors for _, errors in said) == 1
    assert said[0][0].splitlines()[-1] == said[1][0].splitlines()[-1]
    assert built(cache) == [f"cni-{tools.CNI.key}"]


def test_the_tools_are_static_and_say_the_version_that_the_lock_pins(lab):
    assert (
        f"{tools.tailscale_version()}\n"
        in lab.run(str(tools.TAILSCALE.bin / "tailscale"), "version").stdout
    )
    pinned = tools.headscale_version()
    assert f"v{pinned}" in lab.run(str(tools.HEADSCALE.bin / "headscale"), "version").stdout
    for tool in tools.ALL:
        for program in tool.bin.iterdir():
            assert "not a dynamic executable" in lab.run("ldd", str(program), check=False).stderr


def test_a_changed_lock_is_another_key(monkeypatch, tmp_path):
    for name in ("go.mod", "go.sum"):
        (tmp_path / "cni").mkdir(exist_ok=True)
        (tmp_path / "cni" / name).write_bytes((tools.SOURCES / "cni" / name).read_bytes())
    before = tools.CNI.key
    monkeypatch.setattr(tools, "SOURCES", tmp_path)
    assert tools.CNI.key == before
    with (tmp_path / "cni" / "go.sum").open("a") as lock:
        lock.write("one more line\n")
    assert tools.CNI.key != before


def test_a_release_of_headscale_with_another_content_than_pinned_is_not_built(
    monkeypatch, tmp_path, capfd
):
    shutil.copytree(tools.SOURCES, tmp_path, dirs_exist_ok=True)
    hashes = tmp_path / "headscale" / "releases.sum"
    release = tools.HEADSCALE.releases()[-1]
    text = hashes.read_text()
    line = next(one for one in text.splitlines() if f" v{release} h1:" in one)
    hashes.write_text(text.replace(line, line[:-6] + "AAAAA="))
    monkeypatch.setattr(tools, "SOURCES", tmp_path)
    monkeypatch.setenv("HEADCNI_CACHE", str(tmp_path / "cache"))
    tool = tools.headscale(release)
    with pytest.raises(LabError, match=f"go build` of headscale-{release} failed"):
        tools.build(Lab.named(TOOLS.name), [tool])
    assert "checksum mismatch" in capfd.readouterr().err
    assert not tool.built


def test_an_unknown_release_of_headscale_is_refused_before_anything_is_made(cache):
    done = TOOLS("up", "--headscale", "0.99", check=False)
    known = ", ".join(tools.HEADSCALE.releases())
    assert (done.returncode, done.stderr) == (1, f"lab: Headscale 0.99: choose from {known}\n")


def test_a_machine_without_go_gets_it_from_pypi(cache):
    """A mount namespace hides this machine's Go, wherever it is."""
    script = (
        "for go in $(type -ap go) /usr/local/go/bin/go; do"
        " [ ! -e $go ] || mount --bind /dev/null $(readlink -f $go); done;"
        "exec python3 -c 'from lab import tools; print(tools.find_go())'"
    )
    found = TOOLS.run(
        "unshare", "--mount", "--propagation", "private", "bash", "-c", script, **cache
    )
    go = found.stdout.strip()
    assert go.startswith(cache["HEADCNI_CACHE"])
    assert TOOLS.run(go, "version").stdout.startswith(f"go version go{tools.GO_WHEEL} ")
