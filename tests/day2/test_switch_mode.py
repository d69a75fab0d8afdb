"""switch_mode.yml: both ways, with pods that talk. Faults are in test_every_step.py."""

from __future__ import annotations

import pytest
from mesh_state import assert_in_mode
from traffic import assert_unharmed

pytestmark = pytest.mark.timeout(900)
NODES = ("node1", "node2")
OTHER = {"host": "daemon", "daemon": "host"}


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


def test_if_headscale_cannot_be_told_nothing_is_dropped_and_the_next_run_goes_on(cluster):
    wanted = OTHER[cluster.mode("node1")]
    with cluster.traffic.flowing() as costs:
        done = cluster.faulty(
            "switch_mode",
            *("--limit", "node1"),
            task="Withdraw the routes from the old identity",
            how="always",
            headcni_mode=wanted,
        )
        assert "NOT PUT BACK" in done.output and "served by both" in done.output
        cluster.run("switch_mode", "--limit", "node1", headcni_mode=wanted)
    assert_unharmed(costs)
    assert_in_mode(cluster.lab, "node1", wanted)


def test_wrong_words_are_refused_before_anything_changes(cluster):
    for given, said in (
        ({"headcni_mode": "both"}, "headcni_mode: both, expected"),
        ({"headcni_mode": "host", "headcni_former": "maybe"}, "headcni_former: maybe, expected"),
    ):
        done = cluster.run("switch_mode", check=False, **given)
        assert done.code != 0 and said in done.output
