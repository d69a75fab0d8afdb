"""The paths to peers, as tailscaled's LocalAPI shows them."""

from __future__ import annotations

import pytest
from tailscaled_stub import NEVER, Tailscaled, go_time, peer

from headcni.errors import CniError
from headcni.mesh import paths
from headcni.mesh.localapi import LocalApi
from headcni.shared.paths import Path


@pytest.fixture
def tailscaled(tmp_path):
    server = Tailscaled(str(tmp_path / "sock"))
    yield server
    server.end()


@pytest.fixture
def api(tailscaled):
    return LocalApi(str(tailscaled.server_address))


@pytest.mark.parametrize(
    ("known", "path"),
    [
        ({"Active": True, "CurAddr": "192.168.7.2:41641"}, ("direct", "192.168.7.2:41641")),
        ({"Active": True, "PeerRelay": "192.168.7.9:40000:vni:3"}, ("peer-relay", "192.168.7.9")),
        ({"Active": True, "age": 20}, ("derp", "lab")),
        ({}, ("idle", "")),
        ({"Online": False}, ("none", "")),
    ],
)
def test_a_peers_path_is_the_one_in_use(tailscaled, api, known, path):
    handshake = go_time(known["age"]) if "age" in known else NEVER
    tailscaled.peers = [peer(2, **known, LastHandshake=handshake)]
    [found] = paths.read(api).peers
    assert found.path.kind == path[0]
    assert found.path.through.startswith(path[1])


@pytest.mark.parametrize("handshake", [NEVER, go_time(400)])
def test_a_relay_over_which_nothing_arrives_is_no_path(tailscaled, api, handshake):
    tailscaled.peers = [peer(2, Active=True, LastHandshake=handshake)]
    [found] = paths.read(api).peers
    assert found.path.kind == "none"


def test_a_peer_that_answers_directly_has_a_path_although_headscale_calls_it_offline(
    tailscaled, api
):
    tailscaled.peers = [peer(2, Online=False, Active=True, CurAddr="192.168.7.2:1")]
    assert paths.read(api).counts()["direct"] == 1


def test_only_peers_that_serve_pods_count(tailscaled, api):
    tailscaled.peers = [peer(2), peer(3, Active=True, CurAddr="192.168.7.3:1"), peer(4)]
    found = paths.read(api, {"3", "4"})
    assert [one.name for one in found.peers] == ["n3", "n4"]
    assert found.counts() == {"direct": 1, "peer-relay": 0, "derp": 0, "idle": 1, "none": 0}


def test_a_ping_finds_the_path_and_the_latency_of_an_idle_peer(tailscaled, api):
    tailscaled.peers = [peer(2), peer(3), peer(4)]
    tailscaled.pings = {
        "100.64.0.2": {"Endpoint": "192.168.7.2:41641", "LatencySeconds": 0.0012},
        "100.64.0.3": {"DERPRegionID": 999, "DERPRegionCode": "lab", "LatencySeconds": 0.02},
    }
    two, three, four = paths.pinged(api, paths.read(api).peers)
    assert two.path == Path("direct", "192.168.7.2:41641", 1.2)
    assert three.path == Path("derp", "lab (999)", 20.0)
    assert three.path.in_words == "DERP region lab (999)"
    assert four.path == Path("none")


def test_times_are_read_in_any_zone():
    assert paths.seconds("2026-11-18T20:00:00.5+01:00") == paths.seconds("2026-11-18T19:00:00Z")
    assert paths.seconds("2026-11-18T19:00:00Z") == 1795028400.0
    assert paths.seconds(NEVER) == 0
    assert paths.seconds("soon") == paths.seconds(None) == 0


def test_the_expiry_of_this_nodes_key_is_known(tailscaled, api):
    assert paths.read(api).key_expires == 0
    tailscaled.self_known = {"KeyExpiry": "2026-11-18T19:00:00Z"}
    assert paths.read(api).key_expires == 1795028400.0


def test_many_questions_in_a_row_ask_tailscaled_once(tailscaled, api):
    tailscaled.peers = [peer(2)]
    watched = paths.Watched(api, lambda: {"2"})
    assert [watched.counts()[("idle",)] for _unused in range(5)] == [1.0] * 5
    assert tailscaled.asked == 1


RELAYED = {"DERPRegionID": 999, "DERPRegionCode": "lab", "LatencySeconds": 0.02}


def seen(watched, seconds=paths.KEPT_SECONDS):
    """What is found when the last answer is some seconds old."""
    watched._read_at -= seconds
    return [one.path.kind for one in watched.now().peers]


def relayed(number, sent):
    return peer(number, Active=True, LastHandshake=go_time(20), TxBytes=sent)


def test_a_peer_counts_as_relayed_only_if_it_answers_through_the_relay(tailscaled, api):
    watched = paths.Watched(api, lambda: {"2", "3"})
    tailscaled.peers = [relayed(2, sent=10), relayed(3, sent=10)]
    tailscaled.pings = {"100.64.0.2": RELAYED}
    assert seen(watched) == ["derp", "none"]
    assert watched.now().peers[0].path == Path("derp", "lab (999)", 20.0)
    tailscaled.peers = [relayed(2, sent=20), relayed(3, sent=20)]
    tailscaled.pings = {"100.64.0.3": RELAYED}
    assert seen(watched) == ["none", "derp"]


def test_a_relayed_peer_is_not_kept_active_by_pings(tailscaled, api):
    """A ping counts as activity: without packets of pods there must be none."""
    watched = paths.Watched(api, lambda: {"2"})
    tailscaled.peers = [relayed(2, sent=10)]
    tailscaled.pings = {"100.64.0.2": RELAYED}
    assert seen(watched) == ["derp"]
    tailscaled.pings = {}
    assert seen(watched) == ["derp"]
    tailscaled.peers = [relayed(2, sent=11)]
    assert seen(watched) == ["none"]


def test_no_peer_but_a_relayed_one_is_pinged_for_the_counts(tailscaled, api):
    tailscaled.peers = [peer(2), peer(3, Active=True, CurAddr="192.168.7.3:1")]
    tailscaled.pings = {f"100.64.0.{number}": RELAYED for number in (2, 3)}
    assert seen(paths.Watched(api, lambda: {"2", "3"})) == ["idle", "direct"]


def test_without_tailscaled_there_is_no_count(tmp_path):
    watched = paths.Watched(LocalApi(str(tmp_path / "none")), frozenset)
    assert "is not there" in watched.now().problem
    with pytest.raises(CniError, match="is not there"):
        watched.counts()
