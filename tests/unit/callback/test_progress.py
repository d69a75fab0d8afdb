"""The progress of a run, as ansible-playbook shows it to somebody who waits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.headcni.mesh.plugins.callback.progress import NEXT
from lab_command import CHECKOUT

SLOW = {"name": "Wait for it", "ansible.builtin.command": "sleep {{ seconds | default(0) }}"}


def run(
    folder: Path, plays: list[dict[str, Any]], name: str = "site.yml", **env: str
) -> subprocess.CompletedProcess[str]:
    (folder / name).write_text(yaml.safe_dump(plays))
    (folder / "hosts").write_text("node[1:3] ansible_connection=local\n[all:vars]\n")
    return subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", "hosts", name],
        cwd=folder,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(CHECKOUT / "collections"),
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "HEADCNI_PROGRESS_INTERVAL": "0.5",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )


def play(name: str, *tasks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "hosts": "all", "gather_facts": False, "tasks": list(tasks), **more}


def test_a_slow_task_says_which_nodes_it_waits_for(tmp_path):
    slow = SLOW | {"vars": {"seconds": "{{ 4 if inventory_hostname == 'node2' else 0 }}"}}
    done = run(tmp_path, [play("Install", slow)])
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"(?m)^  … (.*)$", done.stderr)
    assert said, done.stderr
    expected = (
        r"Install: Wait for it: [\d.]+ s, 2 of 3 nodes done, waits for node2 · [\d.]+ s in all"
    )
    assert re.fullmatch(expected, said[-1]), said


def test_a_batch_says_which_node_of_how_many_it_is(tmp_path):
    done = run(tmp_path, [play("Upgrade the nodes", SLOW, serial=2)])
    batches = re.findall(r"(?m)^  … (Upgrade the nodes: nodes? .*) · ", done.stderr)
    assert batches == [
        "Upgrade the nodes: nodes 1 to 2 of 3 (node1, node2)",
        "Upgrade the nodes: node 3 of 3 (node3)",
    ]


def test_the_summary_has_the_time_of_each_step_and_the_slowest_tasks(tmp_path):
    slow = SLOW | {"vars": {"seconds": 2}}
    done = run(tmp_path, [play("First step", slow), play("Second", SLOW)])
    summary = done.stderr.partition("\n  step ")[2]
    times = dict(re.findall(r"(?m)^  (First step|Second|in all) +([\d.]+) s$", summary))
    assert set(times) == {"First step", "Second", "in all"}
    first, second, everything = (float(times[key]) for key in ("First step", "Second", "in all"))
    assert first >= 2 and second < 2 + first and everything >= first + second - 0.2
    assert re.search(r"slowest tasks:\n    Wait for it \([\d.]+ s\)", summary)


def test_it_says_what_to_do_next(tmp_path):
    done = run(tmp_path, [play("Install", SLOW)])
    assert (
        "next:\n    test whether pods reach each other: ansible-playbook playbooks/verify.yml"
        in (done.stderr)
    )


def test_after_a_failure_the_next_step_is_to_run_it_again(tmp_path):
    done = run(tmp_path, [play("Install", {"ansible.builtin.fail": {"msg": "no"}})])
    assert done.returncode == 2
    assert "next:\n    correct the cause" in done.stderr
    assert "verify" not in done.stderr.partition("next:")[2]


def test_the_installed_collection_names_its_playbooks_by_their_names(tmp_path):
    folder = tmp_path / "ansible_collections/headcni/mesh/playbooks"
    folder.mkdir(parents=True)
    done = run(folder, [play("Upgrade", SLOW)], "upgrade.yml")
    assert "    ansible-playbook headcni.mesh.verify\n" in done.stderr
    assert "previous runtime: ansible-playbook headcni.mesh.rollback\n" in done.stderr


def test_it_can_be_turned_off(tmp_path):
    done = run(tmp_path, [play("Install", SLOW)], HEADCNI_PROGRESS="0")
    assert done.returncode == 0
    assert "in all" not in done.stderr and "next:" not in done.stderr


def test_it_leaves_stdout_to_others(tmp_path):
    with_it = run(tmp_path, [play("Install", SLOW)]).stdout
    without = run(tmp_path, [play("Install", SLOW)], HEADCNI_PROGRESS="0").stdout
    assert without_times(with_it) == without_times(without)


def without_times(text: str) -> str:
    return re.sub(r"\d+[\d:.]*", "0", text)


@pytest.mark.parametrize("name", NEXT)
def test_every_playbook_with_a_next_step_exists(name):
    assert (CHECKOUT / "playbooks" / f"{name}.yml").is_file() or name == "up"
