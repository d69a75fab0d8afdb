"""Every playbook that goes batch by batch says how far it is, as Ansible itself shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab_command import CHECKOUT

TASK = "Show how far this run is"
PLAYS = {
    path.stem: play
    for path in sorted((CHECKOUT / "playbooks").glob("*.yml"))
    for play in yaml.safe_load(path.read_text())
    if "serial" in play
}


def test_every_play_in_batches_begins_with_it():
    assert set(PLAYS) >= {"upgrade", "rollback", "switch_mode", "uninstall", "site"}
    assert [name for name, play in PLAYS.items() if play["tasks"][0]["name"] != TASK] == []


def test_it_is_the_same_in_all_of_them():
    tasks = [{**play["tasks"][0], "tags": None} for play in PLAYS.values()]
    assert all(one == tasks[0] for one in tasks)


def shown(folder: Path, *words: str, serial: int, then: Any = ()) -> list[str]:
    task = PLAYS["upgrade"]["tasks"][0]
    play = {"hosts": "all", "gather_facts": False, "serial": serial, "tasks": [task, *then]}
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    (folder / "hosts").write_text("node[1:5] ansible_connection=local\n")
    done = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", "hosts", "play.yml", *words],
        env={
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(CHECKOUT / "collections"),
            "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.default",
            "ANSIBLE_FORCE_COLOR": "0",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return [line.split('"')[3] for line in done.stdout.splitlines() if '"msg": "node' in line]


def test_each_batch_has_its_own_position(tmp_path):
    assert shown(tmp_path, serial=2) == [
        "nodes 1 to 2 of 5",
        "nodes 3 to 4 of 5",
        "node 5 of 5",
    ]


def test_a_limit_counts_what_it_leaves(tmp_path):
    assert shown(tmp_path, "--limit", "node2:node4:node5", serial=1) == [
        "node 1 of 3",
        "node 2 of 3",
        "node 3 of 3",
    ]


@pytest.mark.parametrize("failing", ["node3", "node4"])
def test_a_node_that_failed_is_still_counted(tmp_path, failing):
    then = [{"ansible.builtin.fail": None, "when": f"inventory_hostname == '{failing}'"}]
    assert shown(tmp_path, serial=2, then=then)[-1] == "node 5 of 5"
