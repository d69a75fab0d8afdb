"""Which paths a node measures, and what it makes of the answers."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import path_survey
from ansible_collections.headcni.mesh.plugins.module_utils.path_survey import Peer
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import (
    NO_ANSWER,
    LocalAPIError,
)

DIRECT = {"Endpoint": "192.0.2.1:41641", "LatencySeconds": 0.0012}
RELAYED = {"DERPRegionID": 9, "DERPRegionCode": "lab", "LatencySeconds": 0.05}
LOST = LocalAPIError(NO_ANSWER, "tailscaled did not answer in time")
PEER = Peer("node2", "100.64.0.2")


def measured(*answers):
    """The last answer is repeated."""
    left = list(answers)

    def ping(address):
        assert address == PEER.address
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return path_survey.measured(ping, [PEER], pause=0)[0]


def test_latency_is_the_median_and_loss_is_counted():
    found = measured(DIRECT, LOST, {**DIRECT, "LatencySeconds": 0.009}, {"Err": "timeout"}, DIRECT)
    assert found == {
        "name": "node2",
        "address": "100.64.0.2",
        "path": "direct",
        "through": "192.0.2.1:41641",
        "sent": 5,
        "lost": 2,
        "latency_ms": 1.2,
    }


def test_a_path_that_becomes_direct_is_direct():
    assert measured(RELAYED, RELAYED, DIRECT)["path"] == "direct"


def test_a_relayed_path_gets_more_time_to_become_direct():
    found = measured(RELAYED)
    assert (found["path"], found["sent"], found["through"]) == ("derp", 10, "DERP region lab (9)")


def test_a_peer_that_never_answers_has_no_path_and_no_latency():
    found = measured(LOST)
    assert (found["path"], found["sent"], found["lost"], found["latency_ms"]) == (
        "none",
        5,
        5,
        None,
    )


def test_without_time_nothing_is_sent(monkeypatch):
    monkeypatch.setattr(path_survey, "SECONDS", 0.0)
    assert measured(DIRECT)["sent"] == 0


def test_only_nodes_are_measured():
    def peer(name, **more):
        return {"DNSName": f"{name}.tailnet.", "TailscaleIPs": [f"100.64.0.{len(name)}"], **more}

    status = {
        "Self": {"Tags": ["tag:headcni"]},
        "Peer": {
            "a": peer("phone"),
            "b": peer("tagged", Tags=["tag:headcni"]),
            "c": peer("router", PrimaryRoutes=["10.1.0.0/16"]),
            "d": peer("other", Tags=["tag:other"]),
            "e": {"DNSName": "gone.", "Tags": ["tag:headcni"], "TailscaleIPs": None},
        },
    }
    assert [peer.name for peer in path_survey.mesh_peers(status)] == ["router", "tagged"]


@pytest.mark.parametrize(("size", "each"), [(2, 1), (50, 49), (51, 12), (500, 12)])
def test_each_chosen_pair_is_measured_in_both_directions(size, each):
    nodes = [Peer(f"node{at:03}", f"100.64.{at // 250}.{at % 250}") for at in range(size)]
    found = {
        (me.name, other.name)
        for me in nodes
        for other in path_survey.choice(me, [peer for peer in nodes if peer != me])
    }
    assert len(found) == size * each
    assert all((b, a) in found for a, b in found)
