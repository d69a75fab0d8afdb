"""headcnictl support-bundle: limits and failures of its parts. tests/daemon makes a whole one."""

from __future__ import annotations

import json
import os
import stat
import tarfile
import time

import pytest

from headcni.ctl import main as ctl
from headcni.ctl import support_bundle
from headcni.ctl.support_bundle import Part, _done


def sh(script: str, **limits: object) -> Part:
    return Part("part", ("sh", "-c", script), **limits)


def done(part: Part) -> support_bundle.Done:
    return _done(part, part.seconds, part.size)


def test_a_part_is_what_its_command_prints():
    found = done(sh("echo said; echo more >&2"))
    assert (found.content, found.code, found.cut, found.problem) == ("said\n", 0, False, "")


def test_a_part_that_fails_says_why_and_keeps_what_it_had():
    found = done(sh("echo said; echo broken >&2; exit 3"))
    assert (found.content, found.code, found.problem) == ("said\n", 3, "broken")
    assert done(sh("exit 1")).problem == "exit code 1"
    assert done(sh("exit 1", good=(0, 1))).problem == ""
    assert "cannot be run" in done(Part("part", ("/no/such/program",))).problem


def test_a_part_that_takes_too_long_is_ended_with_its_children(tmp_path):
    began = time.monotonic()
    alive = tmp_path / "alive"
    found = done(sh(f"echo one; (sleep 3; touch {alive}) & sleep 60", seconds=0.5))
    assert time.monotonic() - began < 5
    assert (found.content, found.problem) == ("one\n", "not finished within 0 s")
    time.sleep(3)
    assert not alive.exists()


def test_a_part_that_closes_its_output_and_goes_on_is_ended_too():
    began = time.monotonic()
    assert "not finished" in done(sh("exec >&-; sleep 60", seconds=0.5)).problem
    assert time.monotonic() - began < 5


def test_a_large_part_is_cut_at_the_end_of_a_line():
    found = done(sh("yes 0123456789", size=1000, seconds=20.0))
    assert found.cut and len(found.content) == 990
    assert found.seconds < 10
    assert found.problem == ""


def test_nothing_is_run_when_the_bundle_has_reached_its_limit():
    part = sh("echo said")
    for seconds, size in ((0.0, 100), (1.0, 0)):
        found = _done(part, seconds, size)
        assert (found.code, found.content) == (None, "")
        assert "reached its limit" in found.problem


@pytest.fixture
def few(monkeypatch):
    parts = [sh("echo token=hunter22"), sh("echo oh >&2; exit 1")._replace(name="other")]
    monkeypatch.setattr(support_bundle, "_parts", lambda *_unused: iter(parts))


def test_the_file_is_for_root_only_and_is_never_an_existing_one(few, tmp_path, capsys):
    file = tmp_path / "b.tar.gz"
    old = os.umask(0)
    try:
        command = ["support-bundle", str(file), "--json", "--config", str(tmp_path / "none")]
        assert ctl.main(command) == 0
        answer = json.loads(capsys.readouterr().out)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert answer["bytes"] == file.stat().st_size
        assert [part["problem"] for part in answer["parts"]] == ["", "oh"]
        before = file.read_bytes()
        assert ctl.main(command) == 3
        assert file.read_bytes() == before
        link, target = tmp_path / "link", tmp_path / "target"
        link.symlink_to(target)
        command[1] = str(link)
        assert ctl.main(command) == 3
        assert not target.exists()
    finally:
        os.umask(old)
    with tarfile.open(file) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        assert names == ["part", "manifest.json"]
        texts = [archive.extractfile(member).read().decode() for member in archive]
    assert texts[0] == "token=(redacted)\n"
    assert json.loads(texts[1])["parts"][1]["problem"] == "oh"
    assert "hunter22" not in "".join(texts)


def test_a_bundle_that_cannot_be_finished_is_removed(few, tmp_path, monkeypatch):
    def fail(*_unused: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(support_bundle, "add", fail)
    file = tmp_path / "b.tar.gz"
    assert ctl.main(["support-bundle", str(file), "--config", str(tmp_path / "none")]) == 3
    assert not file.exists()


def test_secrets_are_found_by_a_configuration_that_has_mistakes(few, tmp_path, monkeypatch):
    key, config, file = tmp_path / "key", tmp_path / "config.yaml", tmp_path / "b.tar.gz"
    key.write_text("plain-word\n")
    config.write_text(f"headscale: {{apiKeyFile: {key}}}\nnetwork: {{mtu: wide}}\n")
    monkeypatch.setattr(support_bundle, "_parts", lambda *_unused: iter([sh("echo plain-word")]))
    assert ctl.main(["support-bundle", str(file), "--config", str(config)]) == 0
    with tarfile.open(file) as archive:
        texts = [archive.extractfile(member).read().decode() for member in archive]
    assert texts[0] == "(redacted)\n"
    assert "network.mtu" in json.loads(texts[1])["config_problem"]
