"""headcnictl config: which settings are in use, where they come from, and what they mean."""

from __future__ import annotations

import json
import os
import tempfile

import pytest

from headcni import settings
from headcni.ctl import main as ctl
from headcni.daemon.observe.control import Control
from headcni.daemon.observe.events import Events

KEYS = [key for key, *_rest in settings.described()]


@pytest.fixture
def file(tmp_path):
    with tempfile.TemporaryDirectory(prefix="hct-") as folder:  # a socket's path must be short
        path = tmp_path / "config.yaml"
        path.write_text(f"daemon: {{socket: {folder}/cni.sock}}\nnetwork: {{mtu: 1300}}\n")
        yield path


@pytest.fixture
def run(capsys):
    def run(*words: object) -> tuple[int, str]:
        code = ctl.main([str(word) for word in ("config", *words)])
        said = capsys.readouterr()
        return code, said.out or said.err

    return run


@pytest.fixture
def daemon(file):
    """Answers with the settings that the file had when it started."""
    config = settings.load(str(file))
    told = {
        "path": str(file),
        "config": settings.as_dict(config),
        "derived": {**settings.derived(config), "daemon.nodeName": "told-by-the-daemon"},
    }
    control = Control(
        os.path.join(os.path.dirname(config.daemon.socket), "daemon.sock"),
        dict,
        Events(),
        lambda _unused: {},
        {"config": lambda: [told]},
    )
    control.start()
    yield control
    control.stop()


def shown(run, file) -> dict:
    code, said = run("show", "--json", "--config", file)
    assert code == 0
    answer = json.loads(said)
    return {**answer, "settings": {one["key"]: one for one in answer["settings"]}}


def test_without_a_daemon_the_files_settings_and_their_origin_are_shown(run, file):
    answer = shown(run, file)
    assert answer["daemon"] is False
    assert list(answer["settings"]) == KEYS
    of = {key: (one["value"], one["origin"]) for key, one in answer["settings"].items()}
    assert of["network.mtu"] == (1300, "file")
    assert of["monitoring.port"] == (9001, "default")
    assert of["tailscale.interfaceName"] == ("tailscale0", "derived")
    code, said = run("show", "--config", file)
    assert code == 0
    assert "the daemon does not answer" in said
    assert max(map(len, said.splitlines())) <= 100 + len(str(file))


def test_what_the_daemon_uses_is_shown_beside_what_awaits_a_reload_or_a_restart(run, file, daemon):
    answer = shown(run, file)
    assert answer["daemon"] is True
    assert answer["settings"]["daemon.nodeName"]["value"] == "told-by-the-daemon"
    assert all("in_file" not in one for one in answer["settings"].values())

    text = file.read_text().replace("1300", "1400")
    file.write_text(f"{text}logging: {{level: DEBUG}}\n")
    known = shown(run, file)["settings"]
    assert (known["network.mtu"]["value"], known["network.mtu"]["in_file"]) == (1300, 1400)
    assert known["logging.level"]["origin"] == "default"
    said = " ".join(run("show", "--config", file)[1].split())
    assert "network.mtu is 1400 in the file: systemctl restart headcni-daemon" in said
    assert 'logging.level is "DEBUG" in the file: systemctl reload headcni-daemon' in said


def test_a_file_with_mistakes_does_not_hide_what_the_daemon_uses(run, file, daemon, monkeypatch):
    monkeypatch.setattr("headcni.ctl.config.CONTROL", daemon.path)
    file.write_text("network: {mtu: wide}\n")
    answer = shown(run, file)
    assert answer["settings"]["network.mtu"]["value"] == 1300
    assert "network.mtu" in answer["problem"]
    daemon.stop()
    code, said = run("show", "--config", file)
    assert code == 1
    assert 'network.mtu is "wide": expected a number from 576 to 65535' in said


def test_validate_says_what_the_daemon_says_of_the_file(run, file):
    assert run("validate", "--config", file) == (0, f"{settings.check(str(file))[1]}\n")
    file.write_text("network: {mtu: wide, mtuu: 1}\n")
    code, said = run("validate", "--config", file)
    assert (code, said) == (1, f"{settings.check(str(file))[1]}\n")
    assert "2 mistakes" in said
    code, said = run("validate", "--json", "--config", file)
    assert code == 1
    assert json.loads(said)["valid"] is False
    assert run("validate", "--config", file.with_name("none"))[0] == 3


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("network.mtu", ["network.mtu"]),
        ("MTU", ["network.mtu"]),
        ("logging", ["logging.level", "logging.format"]),
        ("socket", ["daemon.socket"]),
        ("magicDNS", [key for key in KEYS if key.startswith("dns.magicDNS.")]),
        ("", KEYS),
    ],
)
def test_a_key_is_found_by_its_name_its_end_or_its_section(run, file, word, keys):
    words = ["explain", *filter(None, [word]), "--json", "--config", file]
    assert [one["key"] for one in json.loads(run(*words)[1])] == keys


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("mtuu", "did you mean network.mtu?"),
        ("network.mtoo", "did you mean network.mtu?"),
        ("zzz", "headcnictl config show lists all keys"),
        ("logging.output", "the log goes to stderr"),
    ],
)
def test_an_unknown_key_gets_a_hint(run, file, word, hint):
    code, said = run("explain", word, "--config", file)
    assert code == 3
    assert hint in said


def test_an_explanation_has_the_meaning_the_valid_values_and_how_to_apply_a_change(run, file):
    said = run("explain", "network.mtu", "--config", file)[1]
    assert "the MTU of pods' interfaces" in said
    assert "a number from 576 to 65535" in said
    assert "in use:    1300 (file)" in said
    assert "systemctl restart headcni-daemon" in said


def test_every_key_says_which_values_are_valid(run, file):
    found = json.loads(run("explain", "--json", "--config", file)[1])
    assert [one["key"] for one in found if not one["valid"]] == []


def test_a_key_is_only_for_explain(file):
    with pytest.raises(SystemExit, match="2"):
        ctl.main(["config", "show", "network.mtu"])
