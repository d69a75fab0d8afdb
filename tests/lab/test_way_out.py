"""However a lab ends, nothing of it is left, and nobody else's lab is touched."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

import pytest
from lab_command import CHECKOUT, LabCommand
from leftovers import assert_nothing_left, differences
from patience import until

KILLS = 4
FORWARDING = ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding")
WARM_UP_SECONDS = 20.0  # about what a warm `make up` with two nodes takes


@pytest.fixture
def other(lab) -> LabCommand:
    """A second lab's commands; the first one's tools and image serve it too."""
    command = LabCommand("other")
    yield command
    command("down")


def test_what_another_program_creates_meanwhile_is_not_taken_for_a_leftover(other):
    """Its namespace, its link, its route and its process in a PID namespace."""
    stranger = f"stranger{os.getpid() % 10**6}"
    before = other.listing()
    with subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", "sleep", "60"]) as process:
        try:
            other.run("ip", "netns", "add", stranger)
            other.run("ip", "link", "add", stranger, "type", "bridge")
            other.run("ip", "link", "set", stranger, "up")
            other.run("ip", "route", "add", "198.51.100.0/24", "dev", stranger)
            assert differences(before, other.listing()) == {}
        finally:
            process.kill()
            other.run("ip", "link", "del", stranger, check=False)
            other.run("ip", "netns", "del", stranger, check=False)


def test_a_namespace_or_link_with_our_names_is_a_leftover(other):
    """Also a name of the runtime's, which must create nothing on this machine itself."""
    before = other.listing()
    namespaces = {f"hclab-{other.id}-left", "headcni-left"}
    try:
        for name in namespaces:
            other.run("ip", "netns", "add", name)
        other.run("ip", "link", "add", "hc0123456789a", "type", "bridge")
        found = differences(before, other.listing())
    finally:
        other.run("ip", "link", "del", "hc0123456789a", check=False)
        for name in namespaces:
            other.run("ip", "netns", "del", name, check=False)
    assert found["namespaces"]["left behind"] == namespaces
    assert found["links"]["left behind"] == {"hc0123456789a"}
    assert_nothing_left(before, other.listing())


def test_two_labs_stand_side_by_side_and_one_going_leaves_the_other(lab, other):
    before = other.listing()
    forwarding = other.run("sysctl", *FORWARDING).stdout
    other("up", "--nodes", "1")
    assert other.run("sysctl", *FORWARDING).stdout == forwarding
    assert other.underlay() != lab.underlay()
    assert other.on("node1", "hostname") == "node1\n"
    other("down")
    assert_nothing_left(before, other.listing())
    assert lab.on("node1", "hostname") == "node1\n"


def test_down_without_a_lab_is_fine_and_so_is_down_twice(other):
    assert other("down").returncode == 0
    assert other("down").returncode == 0


def test_a_lab_that_fails_to_come_up_takes_itself_down(other, tmp_path):
    broken = tmp_path / "broken.yml"
    broken.write_text(
        "- hosts: all\n  gather_facts: false\n  tasks: [{ansible.builtin.fail: {}}]\n"
    )
    before = other.listing()
    done = other("up", "--nodes", "1", "--playbook", str(broken), check=False)
    assert done.returncode == 1
    assert f"lab: {broken} failed" in done.stderr
    assert_nothing_left(before, other.listing())


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_an_interrupted_up_takes_itself_down(other, sent):
    before = other.listing()
    worker = subprocess.Popen(
        ["python3", "-m", "lab", "up", "--nodes", "1", "--playbook", "site.yml"],
        cwd=CHECKOUT,
        env=other.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # Tests that run in the background of a shell have it ignored, and hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until(lambda: f"hclab-{other.id}-node1" in other.listing()["namespaces"], 60, every=0.2)
    os.kill(worker.pid, sent)
    assert worker.wait(timeout=60) != 0
    assert_nothing_left(before, other.listing())


def test_down_ends_what_a_killed_up_had_started_in_a_session_of_its_own(other, tmp_path):
    """As Ansible's workers are: the kill of a process group does not reach them."""
    started = tmp_path / "started"
    stubborn = tmp_path / "stubborn.yml"
    stubborn.write_text(
        "- hosts: localhost\n  gather_facts: false\n  tasks:\n"
        f"    - ansible.builtin.shell: echo > {started}; exec setsid --wait sleep 600\n"
    )
    before = other.listing()
    worker = subprocess.Popen(
        ["python3", "-m", "lab", "up", "--nodes", "1", "--playbook", str(stubborn)],
        cwd=CHECKOUT,
        env=other.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until(lambda: started.exists() or worker.poll() is not None, 120, every=0.1)
    assert worker.poll() is None
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait(timeout=10)
    other("down")
    assert_nothing_left(before, other.listing())


@pytest.mark.parametrize("said", ["--destroy=always", "--destroy=never"])
def test_an_attended_lab_goes_with_the_program_that_uses_it_unless_told(other, tmp_path, said):
    """As `molecule test` does it: killed, it can take nothing down itself."""
    program, inventory, noted, up = (
        tmp_path / name for name in ("molecule", "inventory", "state.yml", "up")
    )
    program.write_text(
        f"#!/bin/sh\ntouch {inventory} {noted}\n"
        f"python3 -m lab attend molecule --unless never --forget {inventory} {noted} || exit\n"
        f"python3 -m lab up --nodes 1 && touch {up}; sleep 600\n"
    )
    program.chmod(0o755)
    before = other.listing()
    worker = subprocess.Popen(
        [str(program), "test", said], cwd=CHECKOUT, env=other.env, start_new_session=True
    )
    until(lambda: up.exists() or worker.poll() is not None, 120, every=0.1)
    assert worker.poll() is None
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait(timeout=10)
    if "never" in said:
        assert attendants(other) == [] and noted.exists()
        assert other.on("node1", "hostname") == "node1\n"
        return
    until(lambda: not attendants(other), 60, every=0.1)
    assert not inventory.exists() and not noted.exists()
    assert_nothing_left(before, other.listing())


def attendants(lab: LabCommand) -> list[str]:
    """The processes that wait for the end of the program that uses the lab."""
    return [one for one in lab.listing()["processes"] if " attend " in one]


def test_make_down_clears_up_after_a_make_up_that_was_killed_at_any_moment(other):
    seed = random.SystemRandom().randrange(10**6)
    moments = random.Random(seed)
    before = other.listing()
    for number in range(KILLS):
        # One in each part of a `make up`, so that few of them meet each phase.
        moment = max(0.1, (number + moments.random()) * WARM_UP_SECONDS / KILLS)
        whole_group = bool(number % 2)
        worker = subprocess.Popen(
            ["make", "up", "NODES=2"],
            cwd=CHECKOUT,
            env=other.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(moment)
        if whole_group:
            os.killpg(worker.pid, signal.SIGKILL)
        else:
            worker.kill()  # make alone: what it started must notice
        worker.wait(timeout=10)
        other.run("make", "down", timeout=120)
        when = f"killed after {moment:.2f} s (seed {seed}, round {number})"
        assert_nothing_left(before, other.listing(), when)
