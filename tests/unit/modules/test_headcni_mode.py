"""The steps of a switch on the node: what each does, and what it leaves alone."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import mode_switch, node_config
from ansible_collections.headcni.mesh.plugins.module_utils.shared import modes
from ansible_collections.headcni.mesh.plugins.modules import headcni_mode


class Module:
    def __init__(self, state, mode="daemon", check_mode=False, **given):
        usual = {"keys": {}, "forget": False, "socket": modes.SOCKETS["host"]}
        self.params = {"state": state, "mode": mode, **usual, **given}
        self.check_mode = check_mode


@pytest.fixture
def node(tmp_path, monkeypatch):
    """In host mode, with a headcnictl that says what it was asked for."""
    config = tmp_path / "config.yaml"
    config.write_text("host")
    monkeypatch.setattr(node_config, "PATH", str(config))
    for name in ("NEXT", "NOTE", "PREVIOUS", "STATE_OF_OURS"):
        monkeypatch.setattr(mode_switch, name, str(tmp_path / name.lower()))
    effective = {
        "network": {"podCIDR": {"nodeLocal": ["10.5.1.0/24"], "base": []}},
        "tailscale": {"socket": {"path": str(tmp_path / "none.sock")}},
    }
    monkeypatch.setattr(
        mode_switch,
        "configuration",
        lambda: {**effective, "tailscale": {**effective["tailscale"], "mode": config.read_text()}},
    )
    asked: list[tuple[str, ...]] = []

    def ctl(handle, *words):
        asked.append(words)
        return "all was as it should be" if words[0] == "prepare" else "done"

    monkeypatch.setattr(mode_switch, "ctl", ctl)
    monkeypatch.setattr(mode_switch, "left_behind", list)
    return tmp_path, asked


def test_how_it_stands_is_told_without_a_tailscaled_that_answers(node):
    told = headcni_mode.step(Module("settled"), 0)
    assert (told["mode"], told["changed"], told["unfinished"]) == ("host", False, False)
    assert told["targets"] == [] and told["pod_cidrs"] == ["10.5.1.0/24"]


def test_the_note_keeps_keys_that_are_not_given_again(node):
    first = headcni_mode.step(Module("begun", keys={"host": "nodekey:1"}), 0)
    assert first["changed"] and first["left_mode"] == "host"
    again = headcni_mode.step(Module("begun", keys={"host": "nodekey:1"}), 0)
    assert not again["changed"]
    both = headcni_mode.step(Module("prepared", keys={"daemon": "nodekey:2", "host": ""}), 0)
    assert both["keys"] == {"host": "nodekey:1", "daemon": "nodekey:2"}
    assert not both["changed"]  # the note is no change of the node's


@pytest.mark.parametrize("state", ["begun", "prepared", "moved", "finished"])
def test_check_mode_asks_for_nothing(node, state):
    folder, asked = node
    mode = "host" if state == "finished" else "daemon"
    headcni_mode.step(Module(state, mode, check_mode=True), 0)
    assert asked == [] and not (folder / "note").exists()


def test_a_node_that_is_there_is_not_moved_again(node):
    _, asked = node
    assert not headcni_mode.step(Module("moved", "host"), 0)["changed"]
    assert asked == []


@pytest.mark.parametrize("state", ["dropped", "finished"])
def test_a_mode_that_the_node_is_in_is_not_left(node, state):
    with pytest.raises(mode_switch.SwitchError, match="is in host mode, not in daemon"):
        headcni_mode.step(Module(state, "daemon"), 0)


def test_what_is_finished_leaves_no_note_and_no_keys_that_are_worth_nothing(node):
    folder, asked = node
    headcni_mode.step(Module("begun", "host"), 0)
    (folder / "next").write_text("")
    (folder / "state_of_ours").mkdir()
    assert headcni_mode.step(Module("dropped", "host"), 0)["done"] == "done"
    assert asked == [("drop", "daemon")]
    told = headcni_mode.step(Module("finished", "host", forget=True), 0)
    assert told["changed"] and not told["unfinished"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml"]
