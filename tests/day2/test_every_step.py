"""Each playbook is made to fail, or killed, at each of its steps in turn: running it again finishes
it, and the playbook that undoes it restores what was.

The steps are those of a run without a fault, so that none is forgotten. HEADCNI_EVERY_STEP=1 walks
through all of them, which takes hours; otherwise it is those at which the most hangs in the air.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import pytest
from mesh_state import assert_in_mode, server
from node_listing import differences, listing
from site_run import NO_MODULE, Run
from tailscale_site import NEWER, OLDER
from traffic import CNITOOL, assert_unharmed

EVERY = bool(os.environ.get("HEADCNI_EVERY_STEP"))
pytestmark = pytest.mark.timeout(6 * 3600 if EVERY else 1800)
NODE, OTHER = "node1", "node2"
NEW_CIDRS = ["10.55.91.0/24", "fd55:0:0:91::/64"]


@dataclass(frozen=True)
class Leg:
    """From one state of a node to another, by a playbook."""

    playbook: str
    arrived: Callable[[], None]
    worst: tuple[str, ...]  # of its steps
    given: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ("--limit", NODE)
    first: Callable[[], object] = lambda: None  # what happens before anybody runs the playbook
    silence: float = 0  # the longest that pods may notice, cut off or not; 0 if there are none


Step = tuple[str, int]  # a task's name, and which one of that name it is


def steps_of(run: Run, leg: Leg, how: str) -> list[Step]:
    """What was done on the node or for it. What the controller does by itself can fail, but is too
    short to be killed in."""
    passed_over = NO_MODULE - ({"ansible.builtin.assert"} if how == "fail" else set())
    seen: Counter[str] = Counter()
    found = []
    for one in run.tasks:
        if one["host"] == NODE:
            name = one["task"].rpartition(" : ")[2]
            seen[name] += 1
            if one["status"] == "ok" and one["action"] not in passed_over:
                found.append((name, seen[name]))
    missing = set(leg.worst) - set(seen)
    assert not missing, f"{leg.playbook} has no step {missing}: {found}"
    return [one for one in found if EVERY or one[0] in leg.worst]


@dataclass(frozen=True)
class Walk:
    cluster: Any
    subtests: Any
    say: Callable[[str], None]

    def go(self, leg: Leg) -> Run:
        leg.first()
        run: Run = self.cluster.run(leg.playbook, *leg.words, **leg.given)
        leg.arrived()
        return run

    def stumble(self, leg: Leg, step: Step, how: str, onward: Leg, start: Leg | None) -> None:
        """Go with a fault, and then onward: to the end, or back."""
        began = time.monotonic()
        name, number = step
        at = name if number == 1 else f"{name} ({number})"
        with self.subtests.test(f"{leg.playbook}: {how} at {at}"):
            leg.first()
            traffic = self.cluster.traffic.flowing() if leg.silence else nullcontext({})
            with traffic as costs:
                fault = self.cluster.faulty(
                    leg.playbook,
                    *leg.words,
                    task=name,
                    number=number,
                    host=NODE,
                    how=how,
                    **leg.given,
                )
                if how == "fail":
                    assert "this step was made to fail" in fault.output, fault.output[-3000:]
                    if start and "FAILED, and put back" in fault.output:
                        start.arrived()
                else:
                    assert "PLAY RECAP" not in fault.output, "it was not met"
                done = self.cluster.run(onward.playbook, *onward.words, check=False, **onward.given)
            said = f"{fault.output[-4000:]}\n--- and then\n{done.output[-4000:]}"
            assert done.code == 0, said
            assert_unharmed(costs, leg.silence)
            onward.arrived()
            worst = max((cost.gap for cost in costs.values()), default=0)
            gap = f", longest gap {worst:.2f} s" if leg.silence else ""
            back = "" if onward is leg else f", then {onward.playbook}"
            took = time.monotonic() - began
            self.say(f"{leg.playbook}: {how} at {at}{back}: {took:.0f} s{gap}")


@pytest.fixture
def walk(cluster, subtests, capsys) -> Walk:
    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n  {line}", end="", flush=True)

    return Walk(cluster, subtests, say)


def of(cluster, name: str) -> dict:
    (found,) = [one for one in cluster.at_headscale() if one["givenName"] == name]
    return found


def assert_a_new_pod_talks(cluster, cidrs=("10.55.1.0/24", "fd55:0:0:1::/64")) -> None:
    lab = cluster.lab
    made = json.loads(
        lab.on(NODE, f"ip netns add guest; {CNITOOL} add headcni /run/netns/guest 2>/dev/null")
    )
    try:
        assert made["ips"][0]["address"].rpartition(".")[0] == cidrs[0].rpartition(".")[0]
        address = made["ips"][0]["address"].partition("/")[0]
        lab.wait(OTHER, f"ip netns exec pod ping -c 1 -W 1 {address}")
        assert sorted(of(cluster, NODE)["subnetRoutes"]) == sorted(cidrs)
        assert sorted(of(cluster, NODE)["approvedRoutes"]) == sorted(cidrs)
    finally:
        lab.on(NODE, f"{CNITOOL} del headcni /run/netns/guest; ip netns del guest")
        lab.on(NODE, "rm -rf /var/lib/cni/results")  # cnitool's own


@pytest.fixture
def drained(cluster):
    """The node has no pods."""
    cluster.lab.on(NODE, f"{CNITOOL} del headcni /run/netns/pod; ip netns del pod")
    cluster.lab.on(NODE, "rm -rf /var/lib/cni/results")
    yield
    cluster.lab.on(NODE, f"ip netns add pod; {CNITOOL} add headcni /run/netns/pod")
    cluster.traffic.find_pods()
    cluster.traffic.reached()


@pytest.fixture
def switched(cluster):
    def to(mode: str) -> Leg:
        return Leg(
            "switch_mode",
            lambda: assert_in_mode(cluster.lab, NODE, mode),
            ("Send everything by the new one", "See that nothing was lost by it"),
            {"headcni_mode": mode},
            silence=1,
        )

    return to("daemon"), to("host")


@pytest.fixture
def upgraded(cluster, releases):
    def runs(version: str) -> None:
        status = json.loads(cluster.lab.on(NODE, "headcnictl status --json"))
        assert status["ready"] and status["version"] == version

    former = cluster.lab.on(NODE, "basename $(readlink /opt/headcni/current)").strip()
    version = json.loads(cluster.lab.on(NODE, "headcnictl status --json"))["version"]
    worst = ("Run the daemon, and wait until it is ready",)
    later = {
        "headcni_upgrade": "runtime",
        "headcni_node_release_src": str(releases["0.2.0"]),
    }
    return (
        Leg("upgrade", lambda: runs("0.2.0"), worst, later, silence=1),
        Leg("rollback", lambda: runs(version), worst, {"headcni_release": former}, silence=1),
    )


@pytest.fixture
def other_tailscale(cluster, tarballs):
    def runs(version: str) -> None:
        status = json.loads(cluster.lab.on(NODE, "tailscale status --json"))
        assert status["Version"].partition("-")[0] == version

    def to(version: str) -> Leg:
        given = {
            "headcni_upgrade": "tailscale",
            "tailscale_version": version,
            "tailscale_method": "files",
            "tailscale_files_dir": str(tarballs),
        }
        worst = ("Install Tailscale, which takes a while where it lacks",)
        return Leg("upgrade", lambda: runs(version), worst, given, silence=30)

    return to(OLDER), to(NEWER)


@pytest.fixture
def uninstalled(cluster, drained):
    lab = cluster.lab
    cluster.run("uninstall", "--limit", NODE)
    bare = listing(lab, NODE)
    cluster.run("site", "--limit", NODE)

    def gone() -> None:
        assert differences(bare, listing(lab, NODE)) == []
        assert [one["givenName"] for one in cluster.at_headscale()] == [OTHER]

    return (
        Leg("uninstall", gone, ("Leave the mesh",)),
        Leg("site", lambda: assert_a_new_pod_talks(cluster), ("Join the tailnet",)),
    )


@pytest.fixture
def another_cidr(cluster, drained):
    worst = ("Write the daemon's configuration", "Take the approval back")
    new = {"headcni_new_pod_cidr": ",".join(NEW_CIDRS)}
    return (
        Leg("change_pod_cidr", lambda: assert_a_new_pod_talks(cluster, NEW_CIDRS), worst, new),
        Leg("change_pod_cidr", lambda: assert_a_new_pod_talks(cluster), worst),
    )


@pytest.fixture
def another_server(cluster, elsewhere):
    here, key = server(cluster.lab)
    other = elsewhere.command("apikeys", "create").strip().splitlines()[-1]

    def there() -> None:
        nodes = json.loads(elsewhere.command("nodes", "list", "-o", "json"))
        assert sorted(one["given_name"] for one in nodes) == [NODE, OTHER]
        assert cluster.at_headscale() == []
        cluster.traffic.reached()

    def back() -> None:
        assert sorted(one["givenName"] for one in cluster.at_headscale()) == [NODE, OTHER]
        assert not json.loads(elsewhere.command("nodes", "list", "-o", "json"))
        cluster.traffic.reached()

    given = {
        "headcni_yes": True,
        "tailscale_login_server": elsewhere.url,
        "headscale_routes_url": elsewhere.url,
        "headscale_routes_api_key": other,
        "headcni_former_url": here,
        "headcni_former_api_key": key,
    }
    home = {
        "headcni_yes": True,
        "headcni_former_url": elsewhere.url,
        "headcni_former_api_key": other,
    }
    worst = ("Join the tailnet", "Remove the identity that was left")
    return (
        Leg("move_server", there, worst, given, words=()),
        Leg("move_server", back, worst, home, words=()),
    )


@pytest.fixture
def new_keys(cluster):
    was: dict[str, Any] = {}

    def arrived() -> None:
        now = of(cluster, NODE)
        assert now["nodeKey"] != was["nodeKey"]
        for same in ("id", "ipAddresses", "approvedRoutes", "subnetRoutes"):
            assert sorted(now[same]) == sorted(was[same]), same
        assert len(cluster.at_headscale()) == 2

    def first() -> None:
        was.update(of(cluster, NODE))

    worst = ("Log in anew, with a new node key",)
    return (Leg("rotate_keys", arrived, worst, first=first, silence=30),)


@pytest.fixture
def replaced(cluster, drained):
    was: dict[str, Any] = {}

    def first() -> None:
        was.update(of(cluster, NODE))
        cluster.wipe(NODE)

    def arrived() -> None:
        assert of(cluster, NODE)["id"] != was["id"]
        assert len(cluster.at_headscale()) == 2
        assert_a_new_pod_talks(cluster)

    worst = ("Remove the identity", "Join the tailnet")
    return (Leg("replace_node", arrived, worst, first=first),)


THERE_AND_BACK = [
    "switched",
    "upgraded",
    "other_tailscale",
    "another_cidr",
    "another_server",
    "uninstalled",
]
ONE_WAY = ["new_keys", "replaced"]


@pytest.mark.parametrize("how", ["fail", "kill 0.5"])
@pytest.mark.parametrize("trip", THERE_AND_BACK + ONE_WAY)
def test_a_run_with_a_fault_is_finished_by_the_next(walk, request, trip, how):
    legs = request.getfixturevalue(trip)
    steps = [steps_of(walk.go(leg), leg, how) for leg in legs]
    for row in zip_longest(*steps):
        for number, step in enumerate(row):
            start = legs[number - 1] if len(legs) > 1 else None
            if step is None:
                walk.go(legs[number])
            else:
                walk.stumble(legs[number], step, how, onward=legs[number], start=start)


@pytest.mark.parametrize("trip", THERE_AND_BACK)
def test_a_run_that_was_killed_can_be_undone(walk, request, trip):
    there, back = request.getfixturevalue(trip)
    how = "kill 0.5"
    steps = [steps_of(walk.go(leg), leg, how) for leg in (there, back)]
    for leg, other, its_steps in ((there, back, steps[0]), (back, there, steps[1])):
        for step in its_steps:
            walk.stumble(leg, step, how, onward=other, start=None)
        walk.go(leg)
