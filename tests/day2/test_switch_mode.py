"""switch_mode.yml: both ways, with pods that talk, and with a fault at each of its steps."""

from __future__ import annotations

import os

import pytest
from mesh_state import assert_in_mode
from traffic import assert_unharmed

pytestmark = pytest.mark.timeout(900)
NODES = ("node1", "node2")
OTHER = {"host": "daemon", "daemon": "host"}
# Before the routes are moved and after, and in the midst of it. HEADCNI_EVERY_STEP=1 walks through
# all that the playbook does on a node or for it.
FAILING = ["Take them from the former", "See that nothing was lost by it"]
KILLED = ["Send everything by the new one"]
EVERY = [
    "Put right what a run that was cut off has left",
    "Make a pod that asks the other nodes",
    "See what it reaches now",
    "Ask the tailscaled in charge for its key",
    "Note that a switch has begun",
    "Install Tailscale, which takes a while where it lacks",
    "Run a tailscaled of our own",
    "Stage the configuration to come",
    "Ask tailscaled how it stands",
    "Have a user for the nodes",
    "Mint a key for this run",
    "Join the tailnet with a tailscaled beside the present one",
    "Ask the tailscaled to come for its key",
    "Serve the pods by both",
    "Approve the routes for the identity to come",
    "Take them from the former",
    "See that Headscale sends others to the identity to come",
    "Give the other nodes time to hear of it",
    "Send everything by the new one",
    "See what the pod reaches now",
    "See that nothing was lost by it",
    "Write the daemon's configuration",
    "Run the daemon, and wait until it is ready",
    "Put HeadCNI in charge of pods",
    "Ask both for their keys",
    "Take back what was changed for the former",
    "Remove the identity",
    "Note that the switch is done",
]
if os.environ.get("HEADCNI_EVERY_STEP"):
    FAILING = KILLED = EVERY


@pytest.mark.parametrize("mode", ["daemon", "host"])
def test_a_switch_costs_no_connection(cluster, capsys, mode):
    foretold = cluster.run("switch_mode", "--check", headcni_mode=mode)
    assert {host for host, _ in foretold.changed} == set(NODES)
    with cluster.traffic.flowing() as costs:
        cluster.run("switch_mode", headcni_mode=mode)
    cluster.told(capsys, f"switched to {mode}")
    assert_unharmed(costs)
    assert sum(cost.lost for cost in costs.values()) <= 5, costs
    for node in NODES:
        assert_in_mode(cluster.lab, node, mode)


def test_a_node_that_is_in_the_mode_is_left_alone_and_a_mixed_cluster_works(cluster):
    cluster.run("switch_mode", "--limit", "node2", headcni_mode="daemon")
    assert [cluster.mode(node) for node in NODES] == ["host", "daemon"]
    assert "every pod reaches every other" in cluster.site.verify().output
    again = cluster.run("switch_mode", "--limit", "node2", headcni_mode="daemon")
    assert again.changed == set() and "left alone" in again.output


def test_the_name_stays_with_the_node(cluster):
    """node1 was in daemon mode and is back: no identity of ours and no other name is left."""
    names = {one["givenName"] for one in cluster.at_headscale()}
    assert {"node1", "node2"} <= names and not [one for one in names if "former" in one]
    assert len(names) == 3, names  # node2 has two identities while it is in daemon mode


@pytest.mark.parametrize("step", FAILING)
def test_a_step_that_fails_leaves_the_node_in_the_mode_it_had(cluster, step):
    """Or in the other one, if that had proved itself; either way it works."""
    before = cluster.mode("node1")
    wanted = OTHER[before]
    with cluster.traffic.flowing() as costs:
        done = cluster.faulty(
            "switch_mode", "--limit", "node1", task=step, how="fail", headcni_mode=wanted
        )
    if "this step was made to fail" not in done.output:
        pytest.skip(f"going to {wanted} mode does not come by this step")
    assert done.code != 0
    assert_unharmed(costs)
    now = cluster.mode("node1")
    if now == before:
        assert "FAILED, and put back" in done.output, done.output[-3000:]
        assert_in_mode(cluster.lab, "node1", before)
    else:
        assert "NOT FINISHED, but it works in this mode" in done.output, done.output[-3000:]
        cluster.run("switch_mode", "--limit", "node1", headcni_mode=wanted)
        assert_in_mode(cluster.lab, "node1", wanted)


@pytest.mark.parametrize("step", KILLED)
def test_a_run_that_is_killed_is_finished_by_the_next(cluster, step):
    """Back and forth: each step is met on the way to one mode or to the other."""
    wanted = OTHER[cluster.mode("node1")]
    with cluster.traffic.flowing() as costs:
        done = cluster.faulty(
            "switch_mode", "--limit", "node1", task=step, how="kill 0.5", headcni_mode=wanted
        )
        if done.code == 0:
            pytest.skip(f"going to {wanted} mode does not come by this step")
        cluster.run("switch_mode", "--limit", "node1", headcni_mode=wanted)
    assert_unharmed(costs)
    assert_in_mode(cluster.lab, "node1", wanted)


def test_if_headscale_cannot_be_told_nothing_is_dropped_and_the_next_run_goes_on(cluster):
    wanted = OTHER[cluster.mode("node1")]
    with cluster.traffic.flowing() as costs:
        done = cluster.faulty(
            "switch_mode",
            *("--limit", "node1"),
            task="Take them from the former",
            how="always",
            headcni_mode=wanted,
        )
        assert "NOT PUT BACK" in done.output and "served by both" in done.output
        cluster.run("switch_mode", "--limit", "node1", headcni_mode=wanted)
    assert_unharmed(costs)
    assert_in_mode(cluster.lab, "node1", wanted)


def test_a_run_that_is_killed_can_be_undone_as_well(cluster):
    before = cluster.mode("node1")
    with cluster.traffic.flowing() as costs:
        cluster.faulty(
            "switch_mode",
            *("--limit", "node1"),
            task="See that Headscale sends others to the identity to come",
            how="kill 0.5",
            headcni_mode=OTHER[before],
        )
        cluster.run("switch_mode", "--limit", "node1", headcni_mode=before)
    assert_unharmed(costs)
    assert_in_mode(cluster.lab, "node1", before)


def test_wrong_words_are_refused_before_anything_changes(cluster):
    for given, said in (
        ({"headcni_mode": "both"}, "headcni_mode: both, expected"),
        ({"headcni_mode": "host", "headcni_former": "maybe"}, "headcni_former: maybe, expected"),
    ):
        done = cluster.run("switch_mode", check=False, **given)
        assert done.code != 0 and said in done.output
