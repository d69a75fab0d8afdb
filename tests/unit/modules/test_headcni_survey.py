"""headcni_survey on a machine that knows nothing of HeadCNI, and with answers of headcnictl."""

from __future__ import annotations

import json

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import headcnictl
from ansible_collections.headcni.mesh.plugins.modules import headcni_survey
from ansible_module import run

ANSWERS = {
    "status": {"ready": False, "mode": "host"},
    "routes": {
        "routes": [
            {"dst": "10.1.0.0/24", "state": "ok"},
            {"dst": "10.2.0.0/24", "state": "missing", "node": "b"},
        ],
        "own": [{"dst": "10.0.0.0/24", "approved": True}],
        "rules": ["5199", "5200"],
    },
    "ipam": {"pools": [{"subnet": "10.0.0.0/24", "held": [{"address": "10.0.0.2"}]}]},
    "diagnose": {"findings": [{"id": "clock-wrong"}]},
}


@pytest.fixture
def program(monkeypatch, tmp_path):
    """A headcnictl that answers from a file for each verb."""

    def write(answers):
        for verb, answer in answers.items():
            (tmp_path / verb).write_text(answer if isinstance(answer, str) else json.dumps(answer))
        path = tmp_path / "headcnictl"
        path.write_text(f'#!/bin/sh\ncat "{tmp_path}/$1"; echo "no $1" >&2; exit 1\n')
        path.chmod(0o755)
        monkeypatch.setattr(headcnictl, "COMMAND", str(path))

    return write


def test_answers_are_reduced_to_what_the_report_shows(program, tmp_path):
    program(ANSWERS)
    found = run("headcni_survey", socket=str(tmp_path / "none.sock"))
    assert found["changed"] is False and found["status"]["mode"] == "host"
    assert found["routes"]["counts"] == {"ok": 1, "missing": 1} and found["routes"]["rules"] == 2
    assert [route["dst"] for route in found["routes"]["wrong"]] == ["10.2.0.0/24"]
    assert found["pools"] == [{"subnet": "10.0.0.0/24"}]
    assert found["findings"] == [{"id": "clock-wrong"}]
    assert "none.sock is not there" in found["problems"]["paths"] and found["paths"] == []
    assert found["system"]["python"].startswith("3.")


def test_a_part_without_an_answer_is_named_and_the_others_are_there(program, tmp_path):
    program({**ANSWERS, "ipam": "", "routes": {"error": "tailscaled cannot be asked"}})
    found = run("headcni_survey", socket=str(tmp_path / "none.sock"))
    assert found["problems"]["ipam"] == "no ipam"
    assert found["problems"]["routes"] == "tailscaled cannot be asked"
    assert found["status"] and found["findings"] and found["pools"] == []


def test_a_node_without_headcni_is_no_failure(monkeypatch, tmp_path):
    monkeypatch.setattr(headcnictl, "COMMAND", str(tmp_path / "nothing"))
    found = run("headcni_survey", socket=str(tmp_path / "none.sock"))
    assert found["problems"]["status"] == "HeadCNI is not installed on this node: run site.yml"


def test_a_command_that_hangs_is_ended(monkeypatch, tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(headcnictl, "COMMAND", str(slow))
    assert headcnictl.ask("status", seconds=0.2) == ({}, "headcnictl status did not end in 0 s")


def test_the_distribution_is_read(tmp_path):
    (tmp_path / "release").write_text('NAME=x\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n')
    assert (
        headcni_survey.distribution(str(tmp_path / "release")) == "Debian GNU/Linux 12 (bookworm)"
    )
    assert headcni_survey.distribution(str(tmp_path / "none")) == ""
