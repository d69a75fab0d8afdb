"""headcni_status asks headcnictl, and says why there is no answer."""

from __future__ import annotations

import sys

import pytest
from ansible_collections.headcni.mesh.plugins.modules import headcni_status


def said(text: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; {text}; sys.exit({code})"]


def test_the_answer_of_headcnictl_is_the_status():
    assert headcni_status.ask(said("print('{\"ready\": false}')", 1)) == ({"ready": False}, "")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["/nowhere/headcnictl"], "HeadCNI is not installed on this node: run site.yml"),
        (said('print(\'{"error": "no daemon"}\')', 3), "no daemon"),
        (said("print('oh', file=sys.stderr)", 2), "oh"),
        (said("pass"), "headcnictl status printed nothing"),
    ],
)
def test_without_an_answer_there_is_a_reason(command, problem):
    assert headcni_status.ask(command) == ({}, problem)
