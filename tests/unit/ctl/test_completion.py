"""headcnictl completion, in real shells: what a user gets who presses the key."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess

import pytest

from headcni import settings
from headcni.ctl import main as ctl
from headcni.ctl.completion import SHELLS, verbs
from headcni.ctl.main import VERBS

IN_BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_headcnictl headcnictl "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
# compadd and _files need a terminal; what they are given does not.
IN_ZSH = """
compdef() { :; }
compadd() { shift; print -l -- ${(M)@:#${PREFIX}*}; }
_files() { print -l -- ${PREFIX}*(N); }
source "$1"; shift
words=("$@"); CURRENT=$#; PREFIX=${words[CURRENT]}
_headcnictl
"""
IN_FISH = "source $argv[1]; complete -C $argv[2]"


@pytest.fixture(params=SHELLS)
def shell(request):
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param} on this machine")
    return request.param


@pytest.fixture
def script(shell, tmp_path, capsys):
    assert ctl.main(["completion", shell]) == 0
    file = tmp_path / f"headcnictl.{shell}"
    file.write_text(capsys.readouterr().out)
    return file


@pytest.fixture
def completed(shell, script, tmp_path):
    def completed(line: str) -> list[str]:
        words = line.split(" ")
        command = {
            "bash": ["bash", "--norc", "-c", IN_BASH, "bash", script, *words],
            "zsh": ["zsh", "-f", "-c", IN_ZSH, "zsh", script, *words],
            "fish": ["fish", "--no-config", "-c", IN_FISH, script, line],
        }[shell]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
        )
        assert done.stderr == "", done.stderr
        return sorted(line.partition("\t")[0] for line in done.stdout.splitlines() if line)

    return completed


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("headcnictl ", sorted(VERBS)),
        ("headcnictl con", sorted(verb for verb in VERBS if verb.startswith("con"))),
        ("headcnictl zzz", []),
        ("headcnictl config ", ["explain", "show", "validate"]),
        ("headcnictl conflist --dry-run ", ["restore", "show", "write"]),
        ("headcnictl logs --o", ["--only"]),
        ("headcnictl logs --only ", ["daemon", "plugin", "tailscaled"]),
        ("headcnictl logs --only p", ["plugin"]),
        ("headcnictl logs --since ", []),
        ("headcnictl events --f", ["--follow"]),
        ("headcnictl explain HC10", [f"HC10{number}" for number in range(10)]),
        ("headcnictl completion ", sorted(SHELLS)),
    ],
)
def test_verbs_options_choices_and_ids_are_completed(completed, shell, line, expected):
    found = completed(line)
    if line.endswith("HC10"):
        assert found and set(found) <= set(expected)
    else:
        assert found == expected


def test_the_keys_of_the_settings_and_the_names_of_metrics_are_completed(completed, shell):
    keys = sorted(key for key, *_rest in settings.described() if key.startswith("network.p"))
    assert completed("headcnictl config explain network.p") == keys
    assert "headcni_peers" in completed("headcnictl metrics headcni_p")


def test_files_are_completed_where_files_are_meant(completed, tmp_path):
    (tmp_path / "a file.yaml").touch()
    (tmp_path / "folder").mkdir()
    assert "folder" in [one.rstrip("/") for one in completed("headcnictl validate fol")]
    assert completed("headcnictl status --config a") == ["a file.yaml"]
    assert completed("headcnictl restore --check fol") != []
    assert completed("headcnictl status fol") == []


def test_an_option_that_takes_a_value_does_not_count_as_an_argument(completed):
    assert completed("headcnictl config --config x ") == ["explain", "show", "validate"]


def test_every_verb_with_every_option_is_there():
    found = {verb.name: verb for verb in verbs()}
    assert list(found) == list(VERBS)
    parser, _modules = ctl.parser_with(VERBS)
    [subparsers] = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    for name, verb in found.items():
        known = {option for each in verb.options for option in each.names}
        assert known == set(subparsers.choices[name]._option_string_actions)
        assert {"--json", "--help"} <= known


@pytest.mark.parametrize("name", SHELLS)
def test_nothing_in_a_script_needs_quotes_that_are_missing(name):
    for verb in verbs():
        for words in (*verb.places, *(option.words for option in verb.options)):
            if isinstance(words, tuple):
                assert all(shlex.quote(word) == word for word in words)
    assert SHELLS[name](verbs()).isascii() or name == "fish"


def test_the_script_is_also_told_in_json(capsys):
    assert ctl.main(["completion", "fish", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["shell"] == "fish" and "complete -c headcnictl" in answer["script"]
