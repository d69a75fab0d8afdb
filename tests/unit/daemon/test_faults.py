"""The daemon looks for faults by itself: they are in status and metrics until they are gone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from patience import until

from headcni.ctl.main import main
from headcni.daemon import faults
from headcni.daemon.faults import PROGRAM, WITHOUT, Faults

CLOCK = {"id": "clock-wrong", "found": "the clock", "run": "set it", "where": "node", "sure": True}
NOTE = {"id": "relayed", "found": "the path", "run": "", "where": "node", "sure": False}


@pytest.fixture
def looking(tmp_path, monkeypatch):
    """It runs what the test writes, again and again."""
    monkeypatch.setattr(faults, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(faults, "SECONDS", 0.05)
    monkeypatch.setattr(faults, "LIMIT_SECONDS", 0.5)
    program = tmp_path / "program.py"
    program.write_text("print('{\"findings\": []}')")
    made = Faults(str(tmp_path / "config.yaml"), program)
    made.start()
    yield made, program
    made.stop()


def finds(program: Path, *findings: object) -> None:
    text = json.dumps({"findings": findings})
    (program.parent / "next").write_text(f"print({text!r})")
    (program.parent / "next").rename(program)


def test_a_fault_is_told_until_it_is_gone_and_notes_are_left_out(looking):
    made, program = looking
    until(lambda: made.looked_at > 0)
    assert (made.counts(), made.status()["faults"]) == ({}, [])
    finds(program, CLOCK, NOTE)
    until(lambda: made.found)
    assert made.status()["faults"] == [CLOCK]
    assert made.counts() == {("clock-wrong",): 1.0}
    finds(program)
    until(lambda: not made.found)
    assert made.counts() == {("clock-wrong",): 0.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import time; time.sleep(60)", "diagnose did not end within"),
        ("import os; os.kill(os.getpid(), 9)", "diagnose was ended by signal 9"),
        ("raise RuntimeError('a bug')", "diagnose: no answer, with exit code 1"),
        ('print(\'{"error": "1 mistake"}\'); raise SystemExit(1)', "diagnose: 1 mistake"),
        ("print('no JSON')", "could not be looked for"),
        ("print('[]')", "could not be looked for"),
        ("print('x' * (1 << 21))", "the answer has"),
    ],
)
def test_a_look_that_fails_is_told_and_the_next_one_is_tried(looking, text, said):
    made, program = looking
    program.write_text(text)
    until(lambda: said in made.problem)
    assert made.status()["faults_problem"] == made.problem
    finds(program, CLOCK)
    until(lambda: made.found and not made.problem)


@pytest.mark.parametrize("how", ["stopped", "too slow"])
def test_a_look_that_is_ended_cleans_up(looking, how):
    """A look may have a table in the kernel, which finds the rule that drops packets."""
    made, program = looking
    began, cleaned = program.parent / "began", program.parent / "cleaned"
    if how == "stopped":
        faults.LIMIT_SECONDS = 30.0  # the fixture restores it
    text = f"""
import pathlib, time
try:
    pathlib.Path({str(began)!r}).touch()
    time.sleep(60)
finally:
    pathlib.Path({str(cleaned)!r}).touch()
"""
    (program.parent / "next").write_text(text)
    (program.parent / "next").rename(program)
    until(began.exists)
    if how == "stopped":
        made.stop()
        assert not made.is_alive()
    until(cleaned.exists, 5)


def test_a_look_that_never_ends_is_told(looking, monkeypatch):
    """Such as one that waits in the kernel, where it cannot be killed."""
    made, _unused = looking
    until(lambda: made.looked_at > 0)
    assert made.status()["faults_problem"] == ""
    monkeypatch.setattr(made, "_look", lambda: time.sleep(60))
    monkeypatch.setattr(faults, "STALE_SECONDS", 0.5)
    until(lambda: "the last look ended" in made.status()["faults_problem"])


def test_the_daemon_comes_before_the_look_for_faults(looking):
    """If memory is short, the kernel ends the process that looks, and not the daemon."""
    made, program = looking
    shown = json.dumps({"findings": [CLOCK]})
    text = f"""
import json, os, time
time.sleep(0.2)
found = json.loads({shown!r})
with open("/proc/self/oom_score_adj") as file:
    found["findings"][0]["found"] = f"{{os.nice(0)}} {{file.read().strip()}}"
print(json.dumps(found))
"""
    (program.parent / "next").write_text(text)
    (program.parent / "next").rename(program)
    until(lambda: made.found)
    nice, adjusted = made.found[0]["found"].split()
    assert int(nice) >= faults.NICE
    assert adjusted == "1000"


def test_the_program_is_that_of_the_same_release_and_knows_the_parts(capsys, tmp_path):
    assert PROGRAM.is_file()
    file = tmp_path / "config.yaml"
    file.write_text("{}")
    command = ["diagnose", "--config", str(file), "--without"]
    assert main([*command, "daemon,nonsense"]) == 3
    said = capsys.readouterr()
    assert "there is no part nonsense" in said.err + said.out
    assert all(part in f"{said.err}{said.out}".rpartition(": ")[2] for part in WITHOUT)
