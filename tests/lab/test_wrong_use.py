"""Wrong use gets one line that says what to do, before anything was changed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from lab_command import CHECKOUT, LabCommand
from leftovers import assert_nothing_left

REFUSED = LabCommand("refused")


def refuse(*argv: str, **env: str) -> str:
    """Run a command that must fail; it changes nothing and says one line, which is returned."""
    before = REFUSED.listing()
    done = REFUSED.run(*argv, check=False, **env)
    assert done.returncode != 0
    assert_nothing_left(before, REFUSED.listing())
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def refuse_where(prepare: str, **env: str) -> str:
    """The same on a machine that lacks something: a mount namespace of its own makes it so."""
    command = f"{prepare} && exec make up"
    return refuse("unshare", "--mount", "--propagation", "private", "sh", "-c", command, **env)


def test_a_user_who_is_not_root_is_told_to_use_sudo():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        copy = Path(folder, "checkout")
        shutil.copytree(
            CHECKOUT / "lab", copy / "lab", ignore=shutil.ignore_patterns("__pycache__")
        )
        done = REFUSED.run(
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "env",
            "-C",
            str(copy),
            "HOME=/tmp/nobody",
            "/usr/bin/python3",
            "-m",
            "lab",
            "up",
            check=False,
        )
    assert done.returncode == 1
    assert (
        "lab: the lab makes network namespaces and mounts, so it needs root: run `sudo make …`"
        in done.stderr.splitlines()
    )


def test_a_machine_without_tun_is_told_how_to_get_it():
    line = refuse_where("mount -t tmpfs none /dev/net")
    assert line == (
        "lab: /dev/net/tun cannot be opened (No such file or directory), and tailscaled "
        "needs it: `modprobe tun`, or give this machine the device"
    )


def test_a_disk_nearly_full_is_named_with_what_is_needed(tmp_path):
    line = refuse_where(
        f"mount -t tmpfs -o size=64m none {tmp_path}", HEADCNI_LAB_DIR=str(tmp_path)
    )
    assert line.startswith(f"lab: {tmp_path} has 0.1 GiB free and the lab needs ")
    assert line.endswith("put HEADCNI_CACHE and HEADCNI_LAB_DIR on a larger disk")


def test_another_distribution_is_named_with_those_that_work(tmp_path):
    release = tmp_path / "os-release"
    release.write_text('ID=alpine\nVERSION_ID="3.20"\n')
    line = refuse_where(f"mount --bind {release} $(readlink -f /etc/os-release)")
    assert line.startswith("lab: the lab runs on Debian 12 and 13, this is alpine 3.20: use such a")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("10.300.0.0/24", "is not a network"),
        ("10.9.9.1/24", "is not a network: 10.9.9.1/24 has host bits set"),
        ("203.0.113.0/24", "give a /24 of 10/8, 172.16/12 or 192.168/16"),
        ("10.9.0.0/16", "give a /24 of 10/8, 172.16/12 or 192.168/16"),
    ],
)
def test_an_underlay_that_cannot_be_is_refused_by_name(value, said):
    line = refuse("make", "up", f"UNDERLAY={value}")
    assert line.startswith(f"lab: UNDERLAY={value}")
    assert said in line


def test_an_underlay_that_the_host_routes_already_is_refused(lab):
    taken = lab.underlay()
    line = refuse("make", "up", f"UNDERLAY={taken}")
    assert line.startswith(f"lab: UNDERLAY={taken} clashes with {taken[:-3]}")
    assert "choose another /24, or leave UNDERLAY out" in line


@pytest.mark.parametrize("count", ["0", "201"])
def test_a_number_of_nodes_that_cannot_be_is_refused(count):
    assert refuse("make", "up", f"NODES={count}") == (
        f"lab: NODES={count}: choose a number from 1 to 200"
    )


def test_a_command_on_a_lab_that_is_not_up_says_so():
    assert refuse("make", "status") == "lab: the lab is not up: run `make up` first"
    assert refuse("make", "shell") == "lab: the lab is not up: run `make up` first"
