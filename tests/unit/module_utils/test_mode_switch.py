"""A switch that was cut off: what is left is put right, and what is noted is found again."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import mode_switch, node, node_config


@pytest.fixture
def files(tmp_path, monkeypatch):
    """config.yaml and its neighbours, in a folder of the test's own."""
    config = tmp_path / "config.yaml"
    monkeypatch.setattr(node_config, "PATH", str(config))
    monkeypatch.setattr(mode_switch, "PREVIOUS", f"{config}.previous")
    monkeypatch.setattr(mode_switch, "NOTE", str(tmp_path / "switch.json"))
    ordered: list[tuple[str, ...]] = []
    unit = node.Unit("headcni-daemon.service", "loaded", "inactive", "enabled", 0, 0.0, False)
    monkeypatch.setattr(node, "unit", lambda name: unit)
    monkeypatch.setattr(node, "order", lambda *words: ordered.append(words))
    return tmp_path, ordered


def test_cut_off_between_the_two_renames_the_former_configuration_counts(files):
    folder, ordered = files
    (folder / "config.yaml.previous").write_text("host")
    mode_switch.put_right()
    assert (folder / "config.yaml").read_text() == "host"
    assert ordered == [("start", "headcni-daemon.service")]


def test_cut_off_after_them_the_new_one_counts(files):
    folder, _ = files
    (folder / "config.yaml.previous").write_text("host")
    (folder / "config.yaml").write_text("daemon")
    assert len(mode_switch.left_behind()) == 2
    mode_switch.put_right()
    assert (folder / "config.yaml").read_text() == "daemon"
    assert not (folder / "config.yaml.previous").exists()


def test_a_note_is_found_again_and_a_broken_one_is_named(files):
    folder, _ = files
    note = mode_switch.Note("host", "daemon", {"host": "nodekey:1"})
    assert mode_switch.read_note() is None
    assert mode_switch.write_note(note) and not mode_switch.write_note(note)
    assert mode_switch.read_note() == note
    (folder / "switch.json").write_text("{")
    with pytest.raises(mode_switch.SwitchError, match=r"switch\.json cannot be understood"):
        mode_switch.read_note()


CONFIG = {"network": {"podCIDR": {"nodeLocal": ["10.5.1.0/24"], "base": ["10.5.0.0/16"]}}}


@pytest.mark.parametrize(
    ("peer", "addresses"),
    [
        ({"PrimaryRoutes": ["10.5.2.0/24"], "Online": True}, [["10.5.2.1"], ["100.64.0.2"]]),
        ({"PrimaryRoutes": ["10.5.2.0/24"], "Online": False}, []),
        ({"PrimaryRoutes": ["192.168.1.0/24"], "Online": True}, []),  # somebody's own
        ({"PrimaryRoutes": ["10.5.1.0/24"], "Online": True}, []),  # our own, by another identity
        ({"Online": True}, []),
    ],
)
def test_pods_should_reach_each_node_that_has_pods(peer, addresses):
    known = {"DNSName": "node2.mesh.lab.", "TailscaleIPs": ["100.64.0.2"], **peer}
    found = mode_switch.targets(CONFIG, {"Peer": {"k": known}})
    assert [one["addresses"] for one in found] == addresses
