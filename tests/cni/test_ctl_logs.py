"""headcnictl logs on a real journal, in namespaces of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from lab_command import CHECKOUT


@pytest.fixture(scope="module")
def answers():
    if shutil.which("journalctl") is None or not os.path.exists("/lib/systemd/systemd-journald"):
        pytest.skip("there is no journald on this machine")
    alone = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--propagation", "private"]
    done = subprocess.run(
        [*alone, sys.executable, CHECKOUT / "tests/support/journal_node.py", sys.executable],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT / "plugins/cni")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def said(lines: list[str]) -> list[str]:
    return [line[15:] for line in lines]


def test_the_sources_are_one_stream_without_what_others_say(answers):
    code, lines, _unused = answers[""]
    assert code == 0
    assert said(lines) == [
        "tailscaled INFO  magicsock: home is now derp-1",
        "daemon     INFO  part=daemon msg=ready",
        'plugin     ERROR plugin type="headcni" failed: a test',
        *(f"plugin     INFO  headcni number {number}" for number in range(3)),
    ]


def test_the_last_lines_of_a_source_and_a_time_can_be_chosen(answers):
    assert said(answers["--only plugin --lines 2"][1]) == [
        "plugin     INFO  headcni number 1",
        "plugin     INFO  headcni number 2",
    ]
    assert said(answers["--since 1h --only daemon"][1]) == [
        "daemon     INFO  part=daemon msg=ready"
    ]
    assert answers["--since 2030-01-01"] == [0, [], ""]
    code, _unused, complaint = answers["wrong"]
    assert code == 2 and "'soon': expected a time such as 2h" in complaint


def test_what_comes_is_followed_without_a_repetition_until_it_is_interrupted(answers):
    code, lines, _unused = answers["follow"]
    assert code == 0
    assert [line.strip()[15:] for line in lines] == [
        "daemon     INFO  part=daemon msg=ready",
        "daemon     WARN  part=routes msg=later",
    ]
