"""report.yml with machines that are no nodes, for which it must not fail. This needs no lab."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab_command import CHECKOUT

INVENTORY = """
headcni:
  hosts:
    bare: {ansible_connection: local, ansible_python_interpreter: %s, headcni_site: here}
    gone: {ansible_host: 127.0.0.1, ansible_port: 9, ansible_ssh_common_args: -o ConnectTimeout=2}
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "hosts.yml").write_text(INVENTORY % sys.executable)

    def playbook(*words: str, cwd: Path = CHECKOUT) -> subprocess.CompletedProcess[str]:
        command = [CHECKOUT / ".venv/bin/ansible-playbook", "-i", tmp_path / "hosts.yml", *words]
        return subprocess.run(
            [*command, CHECKOUT / "playbooks/report.yml"],
            cwd=cwd,
            env={**os.environ, "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"), "PWD": str(cwd)},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return playbook


def test_machines_that_are_no_nodes_are_in_the_report_with_the_reason(run, tmp_path):
    done = run(
        "-e", f"headcni_report_dir={tmp_path}/out", "-e", '{"headcni_report_title": "Test & Co"}'
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "out/report.html").read_text()
    assert "HeadCNI is not installed on this node: run site.yml" in page
    assert "Ansible cannot connect to it" in page and "<h1>Test &amp; Co</h1>" in page
    assert "headcni_headscale_url and headcni_headscale_api_key are not set" in page
    data = json.loads(next((tmp_path / "out").glob("report-*.json")).read_text())
    assert [(node["name"], node["ready"]) for node in data["nodes"]] == [
        ("bare", False),
        ("gone", False),
    ]
    assert data["nodes"][0]["site"] == "here" and data["nodes"][0]["kernel"] == os.uname().release
    assert f"2 problems and 1 warnings: {tmp_path}/out/report.html" in done.stdout


def test_the_report_goes_into_the_current_directory(run, tmp_path):
    done = run("--limit", "bare", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "headcni-report/report.html").exists()


def test_check_mode_writes_nothing(run, tmp_path):
    done = run("--check", "-e", f"headcni_report_dir={tmp_path}/out", "--limit", "bare")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "headcni_report_dir=/proc/nothing",
            "dir (headcni_report_dir): /proc/nothing: No such file",
        ),
        ("headcni_report_keep=0", "keep (headcni_report_keep): 0, expected 1 or more"),
    ],
)
def test_wrong_options_are_named(run, given, said):
    done = run("-e", given, "--limit", "bare")
    assert done.returncode != 0 and said in done.stdout + done.stderr
