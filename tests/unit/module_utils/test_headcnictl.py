"""headcnictl is asked for JSON, and there is a reason if it has no answer."""

from __future__ import annotations

import sys

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import headcnictl


@pytest.fixture
def says(tmp_path, monkeypatch):
    """Have a program in the place of headcnictl say this."""

    def install(text: str, code: int = 0) -> None:
        program = tmp_path / "headcnictl"
        program.write_text(f"#!{sys.executable}\nimport sys\n{text}\nsys.exit({code})\n")
        program.chmod(0o755)
        monkeypatch.setattr(headcnictl, "COMMAND", str(program))

    return install


def test_an_answer_that_says_no_is_an_answer(says):
    says("print('{\"ready\": false}')", 1)
    assert headcnictl.ask("status", seconds=20) == ({"ready": False}, "")


def test_the_verb_and_its_options_are_passed_on(says):
    says("import json; print(json.dumps({'words': sys.argv[1:]}))")
    answer, _problem = headcnictl.ask("routes", "--no-ping", seconds=20)
    assert answer == {"words": ["routes", "--json", "--no-ping"]}


@pytest.mark.parametrize(
    ("text", "code", "problem"),
    [
        ('print(\'{"error": "no daemon"}\')', 3, "no daemon"),
        ("print('oh', file=sys.stderr)", 2, "oh"),
        ("", 0, "headcnictl status printed nothing"),
        ("print([])", 0, "headcnictl status printed nothing"),
    ],
)
def test_without_an_answer_there_is_a_reason(says, text, code, problem):
    says(text, code)
    assert headcnictl.ask("status", seconds=20) == ({}, problem)


def test_a_node_without_headcni_is_told_what_to_run(monkeypatch):
    monkeypatch.setattr(headcnictl, "COMMAND", "/nowhere/headcnictl")
    said = headcnictl.ask("status", seconds=20)
    assert said == ({}, "HeadCNI is not installed on this node: run site.yml")


def test_a_command_that_does_not_end_is_ended(says):
    says("import time; time.sleep(60)")
    assert headcnictl.ask("status", seconds=0.5) == ({}, "headcnictl status did not end in 0 s")


def test_what_was_printed_is_returned_with_its_exit_code(says):
    says("print(sys.argv[1:]); print('careful', file=sys.stderr)", 1)
    assert headcnictl.printed(["routes", "--no-ping"], 20) == (
        1,
        "['routes', '--no-ping']\n",
        "careful\n",
    )


def test_a_command_that_did_not_run_is_an_unknown(monkeypatch, says):
    says("print('x' * 100)")
    monkeypatch.setattr(headcnictl, "MOST_OUTPUT", 50)
    code, output, said = headcnictl.printed(["routes"], 20)
    assert (code, output) == (3, "") and "the answer has 101 characters" in said
    monkeypatch.setattr(headcnictl, "COMMAND", "/nowhere/headcnictl")
    said = "headcnictl: HeadCNI is not installed on this node: run site.yml\n"
    assert headcnictl.printed(["routes"], 20) == (3, "", said)
