"""Each playbook is made to fail, or killed, at each of its steps in turn: running it again finishes
it, and the playbook that undoes it restores what was.

The steps are those of a run without a fault, so that none is forgotten. HEADCNI_EVERY_STEP=1 walks
through all of them and puts one fault in each, of the three kinds in turn, which takes two hours;
3 puts each kind in each; HEADCNI_FIRST_STEP=20 leaves out the first nineteen of each playbook, for
who has walked those already. Otherwise it is all kinds in the steps at which the most hangs in the
air.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import yaml
from lab_command import CHECKOUT
from mesh_state import assert_in_mode, server
from node_listing import differences, listing
from site_run import NO_MODULE, Run
from tailscale_site import NEWER, OLDER
from traffic import CNITOOL, assert_unharmed

EVERY = int(os.environ.get("HEADCNI_EVERY_STEP", "0"))
FIRST = int(os.environ.get("HEADCNI_FIRST_STEP", "1"))
pytestmark = pytest.mark.timeout(6 * 3600 if EVERY else 1800)
NODE, OTHER = "node1", "node2"
NEW_CIDRS = ["10.55.91.0/24", "fd55:0:0:91::/64"]
SITE = yaml.safe_load((CHECKOUT / "playbooks/site.yml").read_text())
PLAYS_OF_SITE = {play["name"] for play in SITE}


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


class Step(NamedTuple):
    name: str
    number: int  # which one of that name it is
    is_brief: bool  # done by the controller itself: it can fail, but not be killed in its midst
    is_early: bool  # nothing has been changed by then

    def __str__(self) -> str:
        return self.name if self.number == 1 else f"{self.name} ({self.number})"


class Kind(NamedTuple):
    """Of a fault: what happens in the step, and who finds what it has left."""

    how: str
    undone: bool  # by the way back; otherwise the same playbook is run again


KINDS = (Kind("fail", False), Kind("kill 0.5", True), Kind("kill 0.5", False))
BRIEF = "ansible.builtin.assert"


def steps_of(run: Run, leg: Leg) -> list[Step]:
    """What was done on the node or for it. What only looks, and is walked through as part of
    site.yml, need not be again where another playbook imports that."""
    seen: Counter[str] = Counter()
    found = []
    is_early = True
    for one in run.tasks:
        is_early = is_early and not one["changed"]
        if one["host"] == NODE:
            name = one["task"].rpartition(" : ")[2]
            seen[name] += 1
            is_imported = one["play"] in PLAYS_OF_SITE and leg.playbook != "site"
            if EVERY == 1 and is_imported and not one["changed"] and name not in leg.worst:
                continue
            if one["status"] == "ok" and one["action"] not in NO_MODULE - {BRIEF}:
                found.append(Step(name, seen[name], one["action"] == BRIEF, is_early))
    missing = set(leg.worst) - set(seen)
    assert not missing, f"{leg.playbook} has no step {missing}: {found}"
    return found[FIRST - 1 :] if EVERY else [one for one in found if one.name in leg.worst]


def shared_out(there: list[Step], back: list[Step]) -> list[list[Step]]:
    """Of steps that are in both: half of them on the way there, half of them on the way back."""
    of_back = {str(step) for step in back}
    mine = [step for turn, step in enumerate(there) if turn % 2 == 0 or str(step) not in of_back]
    done = {str(step) for step in mine}
    return [mine, [step for step in back if str(step) not in done]]


def faults_of(steps: list[Step], turn: int, can_be_undone: bool) -> list[tuple[Step, Kind]]:
    """Each kind in each step, or one in each, with another kind for the next."""
    found = []
    for number, step in enumerate(steps):
        kinds = [
            kind
            for kind in KINDS
            if can_be_undone or not kind.undone
            if not step.is_brief or kind.how == "fail"
        ]
        if EVERY == 1:
            kinds = [kinds[0 if step.is_early else (number + turn) % len(kinds)]]
        found += [(step, kind) for kind in kinds]
    return found


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

    def stumble(self, leg: Leg, step: Step, kind: Kind, other: Leg | None) -> bool:
        """Go with a fault, and then onward: to the end, or back. Whether it is back."""
        began = time.monotonic()
        onward = other if kind.undone and other else leg
        came = ""
        with self.subtests.test(f"{leg.playbook}: {kind.how} at {step}"):
            leg.first()
            flows = leg.silence and not step.is_early
            with self.cluster.traffic.flowing() if flows else nullcontext({}) as costs:
                fault = self.cluster.faulty(
                    leg.playbook,
                    *leg.words,
                    task=step.name,
                    number=step.number,
                    host=NODE,
                    how=kind.how,
                    **leg.given,
                )
                if kind.how == "fail":
                    assert "this step was made to fail" in fault.output, fault.output[-3000:]
                else:
                    assert "PLAY RECAP" not in fault.output, "it was not met"
                if is_back(fault):
                    came = "nothing was changed" if untouched(fault) else "put back by itself"
                    done = fault
                else:
                    came = "finished" if onward is leg else f"undone by {onward.playbook}"
                    done = self.cluster.run(
                        onward.playbook, *onward.words, check=False, **onward.given
                    )
                    said = f"{fault.output[-4000:]}\n--- and then\n{done.output[-4000:]}"
                    assert done.code == 0, said
            assert_unharmed(costs, leg.silence)
            where = other if done is fault else onward
            if where:
                where.arrived()
            worst = max((cost.gap for cost in costs.values()), default=0)
            gap = f", longest gap {worst:.2f} s" if flows else ""
            took = time.monotonic() - began
            self.say(f"{leg.playbook}: {kind.how} at {step}: {came}, {took:.0f} s{gap}")
            return done is fault or kind.undone
        # So that the next one does not fail for this one's sake.
        self.say(f"{leg.playbook}: {kind.how} at {step}: FAILED")
        self.cluster.run(onward.playbook, *onward.words, check=False, **onward.given)
        return kind.undone


def is_back(fault: Run) -> bool:
    """Whether a run that failed has left everything as it was before it."""
    return "FAILED, and put back" in fault.output or untouched(fault)


def untouched(fault: Run) -> bool:
    return bool(fault.recap) and not any(fault.counted("changed").values())


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
            (
                "Send pod traffic through the new tailscaled",
                "Check that the pod still reaches everything",
            ),
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
        worst = ("Install Tailscale (slow if it is missing)",)
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
    worst = ("Write the daemon's configuration", "Withdraw the approval of the nodes' routes")
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
        "headcni_headscale_url": elsewhere.url,
        "headcni_headscale_api_key": other,
        "headcni_former_url": here,
        "headcni_former_api_key": key,
    }
    home = {
        "headcni_yes": True,
        "headcni_former_url": elsewhere.url,
        "headcni_former_api_key": other,
    }
    worst = ("Join the tailnet", "Remove the identities that were left behind")
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

    worst = ("Log in again with a new node key",)
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

    worst = ("Remove the nodes from Headscale", "Join the tailnet")
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


@pytest.mark.parametrize("trip", THERE_AND_BACK + ONE_WAY)
def test_what_a_fault_has_left_is_finished_by_the_next_run_or_undone(walk, request, trip):
    legs = request.getfixturevalue(trip)
    steps = [steps_of(walk.go(leg), leg) for leg in legs]
    if EVERY == 1 and len(legs) == 2 and legs[0].playbook == legs[1].playbook != "switch_mode":
        steps = shared_out(*steps)
    todo = [faults_of(its_steps, turn, len(legs) == 2) for turn, its_steps in enumerate(steps)]
    here = 0  # from where legs[here] starts
    while any(todo):
        leg, other = legs[here], legs[here - 1] if len(legs) == 2 else None
        is_back = False
        if todo[here]:
            step, kind = todo[here].pop(0)
            is_back = walk.stumble(leg, step, kind, other)
        else:
            walk.go(leg)
        here = here if is_back or other is None else 1 - here
    if here:
        walk.go(legs[here])
