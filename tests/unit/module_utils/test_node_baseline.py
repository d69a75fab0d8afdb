"""How a node was: written down once, and compared when HeadCNI leaves."""

from __future__ import annotations

import json

from ansible_collections.headcni.mesh.plugins.module_utils import node_baseline
from ansible_collections.headcni.mesh.plugins.modules import headcni_leave


def test_it_is_written_down_once_with_the_directories_that_lack(tmp_path, monkeypatch):
    monkeypatch.setattr(node_baseline, "_tailscale", lambda socket: {"joined": False})
    monkeypatch.setattr(node_baseline, "_sysctls", lambda: iter([("net/ipv4/ip_forward", "0")]))
    path = tmp_path / "state" / "before.json"
    node_baseline.remember([str(tmp_path / "a" / "b")], path=str(path))
    found = node_baseline.recall(str(path))
    assert found["sysctls"] == {"net/ipv4/ip_forward": "0"}
    assert {str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(found["missing"])
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_text()
    node_baseline.remember([str(tmp_path / "c")], path=str(path))
    assert path.read_text() == before


def test_without_a_note_or_with_one_that_is_broken_nothing_is_known(tmp_path):
    path = tmp_path / "before.json"
    assert node_baseline.recall(str(path)) == {}
    path.write_text("[1")
    assert node_baseline.recall(str(path)) == {}


def test_only_what_differs_is_turned_back_and_forwarding_comes_first(monkeypatch):
    now = {"a/rp_filter": "2", "net/ipv4/ip_forward": "1", "b/accept_ra": "1"}
    monkeypatch.setattr(node_baseline, "read_sysctl", now.get)
    before = {"a/rp_filter": "0", "net/ipv4/ip_forward": "0", "b/accept_ra": "1", "gone": "1"}
    assert node_baseline.turned(json.loads(json.dumps({"sysctls": before}))) == [
        ("net/ipv4/ip_forward", "1", "0"),
        ("a/rp_filter", "2", "0"),
    ]


def noted(path, prefs, **more):
    path.write_text(json.dumps({"tailscale": {"joined": True, "prefs": prefs, **more}}))
    return str(path)


def test_what_a_join_has_turned_is_turned_back_and_not_what_the_owner_turned_since(tmp_path):
    was = {"RouteAll": False, "NoSNAT": False, "CorpDNS": True, "Hostname": ""}
    path = noted(tmp_path / "before.json", was, turned={})
    node_baseline.note_turned({"CorpDNS": False, "Hostname": "node1", "WantRunning": True}, path)
    node_baseline.note_turned({"RouteAll": True}, path)
    now = {"RouteAll": True, "NoSNAT": True, "CorpDNS": False, "Hostname": "his-own"}
    before = node_baseline.recall(path)
    assert before["tailscale"]["turned"] == {
        "CorpDNS": False,
        "Hostname": "node1",
        "RouteAll": True,
    }
    assert node_baseline.prefs_to_turn_back(before, now) == {"RouteAll": False, "CorpDNS": True}


def test_a_note_of_an_older_release_has_everything_turned_back(tmp_path):
    path = noted(tmp_path / "before.json", {"CorpDNS": True, "Hostname": ""})
    node_baseline.note_turned({"CorpDNS": False}, path)
    before = node_baseline.recall(path)
    assert "turned" not in before["tailscale"]
    assert node_baseline.prefs_to_turn_back(before, {"Hostname": "x"}) == {
        "CorpDNS": True,
        "Hostname": "",
    }


def test_what_a_join_turns_on_a_node_without_a_note_is_not_noted(tmp_path):
    node_baseline.note_turned({"CorpDNS": False}, str(tmp_path / "before.json"))
    assert list(tmp_path.iterdir()) == []


def test_that_tailscale_is_ours_is_known_to_the_run_after_one_that_was_cut_off(
    tmp_path, monkeypatch
):
    path = tmp_path / "before.json"
    path.write_text(json.dumps({"tailscale": {"joined": False}}))
    unit = {"text": "# of HeadCNI"}
    monkeypatch.setattr(headcni_leave.node_config, "read", lambda _unused: unit["text"])
    monkeypatch.setattr(headcni_leave, "is_ours", bool)
    assert headcni_leave.tailscale_is_ours(node_baseline.recall(str(path)))
    node_baseline.note_tailscale_is_ours(str(path))
    unit["text"] = None
    assert headcni_leave.tailscale_is_ours(node_baseline.recall(str(path)))


def test_a_tailscale_that_is_not_ours_does_not_become_so(tmp_path, monkeypatch):
    monkeypatch.setattr(headcni_leave.node_config, "read", lambda _unused: None)
    path = noted(tmp_path / "before.json", {}, ours=True)
    assert not headcni_leave.tailscale_is_ours(node_baseline.recall(path))
    node_baseline.note_tailscale_is_ours(str(tmp_path / "none.json"))
    assert not (tmp_path / "none.json").exists()
