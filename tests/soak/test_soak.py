"""Pods come and go for an hour on nodes where things go wrong: nothing is lost, nothing is left.

HEADCNI_SOAK_SECONDS sets how long; `make test-soak` takes that and some five minutes more.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time

import pytest
from firewalled_nodes import FIREWALLS, SITE, Fleet
from lab_command import CHECKOUT, LabCommand
from site_run import Site

SECONDS = int(os.environ.get("HEADCNI_SOAK_SECONDS", "3600"))
ROUND = 45  # seconds of coming and going between two looks
NODES = ("node1", "node2", "node3")
DATA = "/var/lib/cni/headcni"
RELOADS = {
    "node1": ("systemctl restart docker",),
    "node2": ("ufw reload", "systemctl restart ufw"),
    "node3": ("firewall-cmd --reload", "systemctl restart firewalld"),
}
FILL = f"dd if=/dev/zero of={DATA}/filler bs=64k 2>/dev/null; sleep {{}}; rm {DATA}/filler"

pytestmark = pytest.mark.timeout(SECONDS + 1800)


@pytest.fixture(scope="module")
def fleet():
    lab = LabCommand("soak", limit=600)
    lab("up", "--nodes", str(len(NODES)))
    made = Fleet(lab, Site(lab, SITE))
    for node in NODES:
        made.turn_on(node)
        # The store has a small disk of its own, which can be filled.
        lab.on(node, f"mkdir -p {DATA} && mount -t tmpfs -o size=8m,mode=700 tmpfs {DATA}")
    made.site()
    for node in NODES:
        lab.copy(CHECKOUT / "tests/support/soak_pods.py", node, "/root/soak_pods.py")
    yield made
    lab("down")


def everywhere(fleet: Fleet, command: str) -> dict[str, str]:
    return {node: fleet.lab.on(node, command, check=False) for node in NODES}


def await_pods(fleet: Fleet) -> None:
    """Nothing stands in the way of new pods any more, so each node must get some."""
    count = "import json; print(len(json.load(open('/run/soak/pods.json'))))"
    for node in NODES:
        fleet.lab.wait(node, f'test "$(python3 -c "{count}")" -ge 2', seconds=60)


def pause(fleet: Fleet) -> None:
    everywhere(fleet, "touch /run/soak/pause")
    for node in NODES:
        fleet.lab.wait(node, "test -e /run/soak/paused", seconds=120)


def resume(fleet: Fleet) -> None:
    everywhere(fleet, "rm -f /run/soak/pause /run/soak/paused")


def disturb(fleet: Fleet, chosen: random.Random) -> list[str]:
    """Reload a firewall, or fill a disk for a while."""
    node = chosen.choice(NODES)
    if chosen.random() < 0.4:
        command = FILL.format(chosen.randint(3, 15))
        fleet.lab.on(node, f"systemd-run -q --collect --unit=filler sh -c '{command}'", check=False)
    else:
        command = chosen.choice(RELOADS[node])
        fleet.lab.on(node, command, check=False)
    return [f"{FIREWALLS[node]}: {command}"]


def unreached(fleet: Fleet) -> tuple[int, list[str]]:
    """Every live pod asks every live pod, of both families."""
    alive = {node: json.loads(fleet.lab.on(node, "cat /run/soak/pods.json")) for node in NODES}
    held = [one for pods in alive.values() for addresses in pods.values() for one in addresses]
    assert len(held) == len(set(held)), "two pods have one address"
    asked, failed = 0, []
    for node in NODES:
        done = subprocess.run(
            fleet.lab._ssh(node, "python3 /root/soak_pods.py reach"),
            input="\n".join(held),
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        found = json.loads(done.stdout)
        asked += found["asked"]
        failed += [f"{node} {one}" for one in found["failed"]]
    return asked, failed


def test_pods_come_and_go_and_nothing_is_lost_or_left(fleet, capsys):
    chosen = random.Random(17)
    everywhere(fleet, "systemd-run -q --unit=soak python3 /root/soak_pods.py run")
    began, deleted, rounds, asked = time.monotonic(), False, 0, 0
    while time.monotonic() - began < SECONDS:
        done: list[str] = []
        until = time.monotonic() + ROUND
        while time.monotonic() < until:
            done += disturb(fleet, chosen)
            time.sleep(chosen.uniform(4, 12))
        if not deleted and time.monotonic() - began > SECONDS / 2:
            fleet.lab.on("node2", f"rm -rf {DATA}/*")
            done.append("node2: the store is deleted")
            deleted = True
            time.sleep(5)
        everywhere(fleet, "while systemctl is-active -q filler; do sleep 0.5; done")
        await_pods(fleet)
        pause(fleet)
        count, failed = unreached(fleet)
        rounds, asked = rounds + 1, asked + count
        wrong = everywhere(fleet, "cat /run/soak/wrong")
        assert not failed, f"after {done}: {failed[:10]}"
        assert not any(wrong.values()), f"after {done}: {wrong}"
        with capsys.disabled():
            elapsed = time.monotonic() - began
            print(
                f"\n  {elapsed:.0f} s: {count} pings between live pods; {'; '.join(done)}", end=""
            )
        resume(fleet)
    everywhere(fleet, "touch /run/soak/stop; while systemctl is-active -q soak; do sleep 0.5; done")
    counts = everywhere(fleet, "cat /run/soak/counts.json")
    everywhere(fleet, "python3 /root/soak_pods.py clear")
    with capsys.disabled():
        print(f"\n  {rounds} looks, {asked} pings; {counts}")
    assert deleted
    for node in NODES:
        fleet.lab.wait(node, "test -z \"$(ls /sys/class/net | grep '^h[ci][0-9a-f]\\{5\\}')\"", 60)
        assert fleet.lab.on(node, "headcnictl pods --json").strip() == "[]", node
        held = (
            f'python3 -c "import sqlite3; db=sqlite3.connect(\\"{DATA}/headcni.db\\"); '
            "print([db.execute(f'select count(*) from {t}').fetchone()[0] "
            "for t in ('allocation','attachment','port','tombstone')])\""
        )
        fleet.lab.wait(node, f"test \"$({held})\" = '[0, 0, 0, 0]'", 60)
        assert not fleet.lab.on(node, "cat /run/soak/wrong", check=False), node
