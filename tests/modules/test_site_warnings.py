"""The checks of site.yml on this machine, which they only look at, with a Headscale that is not
there: so no node can go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab_command import CHECKOUT

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> str:
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "tailscale_method": "files",
        "tailscale_files_dir": "/nonexistent",
        "headcni_headscale_url": NOWHERE,
        "headcni_headscale_api_key": "none",
        "headscale_routes_notes": ["the policy lets no pod through"],
        "headcni_node_pod_cidr": "10.91.1.0/24",
        "headcni_node_cni_bin_dirs": ["/opt/cni/bin"],
    }
    inventory = tmp_path_factory.mktemp("inventory") / "hosts.yml"
    inventory.write_text(json.dumps({"headcni": {"hosts": {"here": variables}}}))
    command = [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory]
    done = subprocess.run(
        [*command, "--check", "--tags", "preflight", "site.yml"],
        cwd=CHECKOUT,
        env={**os.environ, "ANSIBLE_FORCE_COLOR": "0"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def test_the_run_stops_with_what_stands_in_the_way(output):
    assert f"{NOWHERE} cannot be reached" in output
    assert "failed=1" in output and "changed=0" in output


def test_the_summary_is_shown_though_no_node_can_go_on(output):
    assert "here host 10.91.1.0/24 config NOT FINISHED: see above" in output


def test_the_warnings_follow_it(output):
    shown = output.partition("Warnings:")[2].partition("TASK [")[0]
    assert "Headscale: the policy lets no pod through" in shown
