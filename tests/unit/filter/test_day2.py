"""What day-2 playbooks say of nodes."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.filter import (
    lost_reach,
    mode_summary,
    version_summary,
)

OK, NO = {"ok": True, "detail": "1 ms"}, {"ok": False, "detail": "no answer in 5 s"}


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ({"n": {"v4": OK}}, {"n": {"v4": OK}}, 0),
        ({"n": {"v4": OK, "mtu4": OK}}, {"n": {"v4": OK, "mtu4": NO}}, 1),
        ({"n": {"v4": NO}}, {"n": {"v4": NO}}, 0),  # it was down before
        ({"n": {"v4": OK}}, {}, 1),
        ({"n": {"route": NO, "v6": OK}}, {"n": {"v6": NO}}, 1),
    ],
)
def test_only_what_was_reached_before_can_be_lost(before, after, lost):
    assert len(lost_reach.lost(before, after)) == lost


@pytest.mark.parametrize(
    ("known", "state"),
    [
        ({}, "NOT ASKED"),
        ({"headcni_mode_state": {"mode": "host"}}, "to be switched"),
        ({"headcni_mode_state": {"mode": "daemon"}}, "left alone"),
        ({"headcni_mode_state": {"mode": "host", "unfinished": True}}, "in the midst of a switch"),
        ({"headcni_mode_state": {"mode": "daemon"}, "headcni_switched": True}, "switched"),
        ({"headcni_mode_state": {"mode": "host"}, "headcni_problem": "x"}, "FAILED, and put back"),
        (
            {"headcni_mode_state": {"mode": "daemon"}, "headcni_problem": "x"},
            "NOT FINISHED, but it",
        ),
        (
            {
                "headcni_mode_state": {"mode": "host"},
                "headcni_problem": "x",
                "headcni_restore_problem": "y",
            },
            "FAILED, and NOT PUT BACK (y)",
        ),
    ],
)
def test_where_a_node_stands_between_the_modes(known, state):
    head, row = mode_summary.summary(["n"], {"n": known}, "daemon")
    assert head.split() == ["node", "mode", "state"]
    assert state in row


@pytest.mark.parametrize(
    ("known", "row"),
    [
        ({}, "NOT ASKED"),
        ({"headcni_before": {"release": "1"}}, "not reached"),
        (
            {
                "headcni_before": {"release": "1", "tailscale_running": "5"},
                "headcni_after": {"release": "2", "tailscale_running": "5"},
                "headcni_upgraded": True,
            },
            "1 -> 2   5          done",
        ),
        (
            {
                "headcni_before": {"release": "1", "tailscale_running": "5"},
                "headcni_after": {"release": "1", "tailscale_running": "5"},
                "headcni_upgraded": True,
            },
            "left as it was",
        ),
        ({"headcni_before": {"release": "1"}, "headcni_problem": "x"}, "FAILED, and put back"),
    ],
)
def test_what_runs_on_a_node(known, row):
    assert row in version_summary.summary(["n"], {"n": known})[1]
