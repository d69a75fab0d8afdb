"""Pods ping each other on every pair of nodes while, one after another, all that can go away does.

HEADCNI_HEADSCALE_AWAY=600 keeps Headscale away for ten minutes instead of ten seconds.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass, field
from itertools import permutations

import pytest
from lab_command import LabCommand

NODES = ("node1", "node2", "node3")
INTERVAL = 0.1
AWAY = int(os.environ.get("HEADCNI_HEADSCALE_AWAY", "10"))
SETTLE = 12  # seconds after each event; what is broken then stays broken
UNIT = {"host": "tailscaled", "daemon": "headcni-tailscaled"}

# All that goes away does so before the first test of a mode.
pytestmark = pytest.mark.timeout(900 + 2 * AWAY)


@dataclass
class Cluster:
    lab: LabCommand
    mode: str
    addresses: dict[str, str] = field(default_factory=dict)
    windows: list[tuple[str, float, float]] = field(default_factory=list)

    def pods(self) -> None:
        cnitool = "CNI_PATH=/opt/cni/bin /opt/lab/cni/cnitool"
        for node in NODES:
            self.lab.on(node, "ip netns add pod")
            made = json.loads(self.lab.on(node, f"{cnitool} add headcni /run/netns/pod"))
            self.addresses[node] = made["ips"][0]["address"].partition("/")[0]

    def start_pings(self) -> None:
        for source, target in permutations(NODES, 2):
            ping = f"ping -n -D -i {INTERVAL} -W 1 {self.addresses[target]}"
            self.lab.wait(source, f"ip netns exec pod ping -c 1 -W 1 {self.addresses[target]}")
            self.lab.on(
                source,
                f"systemd-run --quiet --unit=ping-{target}"
                f" --property=StandardOutput=file:/run/ping-{target}.log"
                f" ip netns exec pod {ping}",
            )

    def during(self, name: str, *steps: tuple[str, str] | float, settle: float = SETTLE) -> None:
        """Commands on machines, and pauses; then time to settle."""
        began = time.time()
        for step in steps:
            if isinstance(step, float):
                time.sleep(step)
            elif step[0] == "lab":
                self.lab(*step[1].split())
            else:
                self.lab.on(*step)
        time.sleep(settle)
        self.windows.append((name, began, time.time()))

    def replies(self, source: str, target: str) -> list[float]:
        text = self.lab.on(source, f"cat /run/ping-{target}.log")
        return [float(at) for at in re.findall(r"^\[([\d.]+)\] \d+ bytes from", text, re.M)]

    def gaps(self) -> dict[str, dict[str, float]]:
        """The longest silence of each pair in each window, less the interval."""
        found: dict[str, dict[str, float]] = {name: {} for name, _, _ in self.windows}
        for source, target in permutations(NODES, 2):
            replies = self.replies(source, target)
            for name, began, ended in self.windows:
                inside = [began, *(at for at in replies if began < at < ended), ended]
                longest = max(b - a for a, b in zip(inside, inside[1:]))
                pair = f"{source}→{target}"
                found[name][pair] = round(max(0.0, longest - 2 * INTERVAL), 1)
                if inside[-2] < ended - 3:
                    found[name][pair] = float("inf")  # and not back when it ended
        return found


@pytest.fixture(scope="module", params=["host", "daemon"])
def outages(request):
    """What each event cost, in seconds, by pair."""
    lab = LabCommand(f"out{request.param[0]}")
    try:
        lab("up", "--nodes", str(len(NODES)))
        lab.run(
            *(".venv/bin/ansible-playbook", "-i", "inventories/lab", "site.yml"),
            *("-e", f"headcni_mode={request.param}"),
            timeout=600,
        )
        cluster = Cluster(lab, request.param)
        cluster.pods()
        cluster.start_pings()
        cluster.during("nothing")
        cluster.during("daemon restarted", ("node1", "systemctl restart headcni-daemon"))
        cluster.during("daemon killed", ("node1", "systemctl kill -s KILL headcni-daemon"))
        cluster.during("tailscaled restarted", ("node1", f"systemctl restart {UNIT[cluster.mode]}"))
        cluster.during(
            f"Headscale away {AWAY} s",
            ("control", "systemctl stop headscale"),
            settle=float(AWAY),
        )
        # It takes a node's routes from the others until that node has come back to it, and nodes
        # try again ever more rarely.
        cluster.during(
            "Headscale back", ("control", "systemctl start headscale"), settle=SETTLE + AWAY / 10
        )
        cluster.during("link cut 5 s", ("lab", "cut node1"), 5.0, ("lab", "heal node1"))
        yield cluster, cluster.gaps()
    finally:
        lab("down", check=False)


def test_what_goes_away_costs_no_more_than_it_must(outages, capsys):
    cluster, found = outages
    worst = {name: max(pairs.values()) for name, pairs in found.items()}
    with capsys.disabled():
        shown = "  ".join(f"{name}: {seconds:.1f} s" for name, seconds in worst.items())
        print(f"\n{cluster.mode} mode, longest silence of any pair: {shown}")
    for name in ("nothing", "daemon restarted", "daemon killed", f"Headscale away {AWAY} s"):
        assert worst[name] <= 0.5, found[name]
    assert worst["tailscaled restarted"] < 15, found
    assert worst["Headscale back"] < 5 + AWAY / 10, found
    assert worst["link cut 5 s"] < 5 + 15, found


def test_pairs_that_an_event_is_no_business_of_do_not_notice(outages):
    _, found = outages
    for name in ("tailscaled restarted", "link cut 5 s"):
        for pair in ("node2→node3", "node3→node2"):
            assert found[name][pair] <= 0.5, (name, found[name])


def test_nothing_stays_broken(outages):
    cluster, _ = outages
    for node in NODES:
        cluster.lab.wait(node, "headcnictl status >/dev/null", seconds=30)
        routes = json.loads(cluster.lab.on(node, "headcnictl routes --json"))["routes"]
        assert {one["node"] for one in routes} == {*NODES} - {node}
        assert {one["state"] for one in routes} == {"ok"}
