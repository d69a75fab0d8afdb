"""What a playbook costs the controller with so many hosts; no node is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab_command import CHECKOUT

LIMIT = 600


@dataclass(frozen=True)
class Cost:
    mib: float
    collecting: float  # seconds in which Python looked for garbage; not in those of the tasks
    tasks: dict[str, dict[str, float]]  # seconds of the processor, reads of hosts' variables, …

    @property
    def calls(self) -> float:
        return sum(task["calls"] for task in self.tasks.values())

    @property
    def seconds(self) -> float:
        return self.collecting + sum(task["seconds"] for task in self.tasks.values())


def measured(
    playbook: Path | str,
    hosts: int,
    *words: str,
    sample: int = 2,
    fresh: bool = True,
    count_calls: bool = False,
    **given: Any,
) -> Cost:
    """Of hosts that are bare, or on which there is nothing to do. `given` are extra variables."""
    with tempfile.TemporaryDirectory(prefix="hct-cost-") as folder:
        home = Path(folder)
        common = {
            "ansible_connection": "local",
            "headcni_headscale_url": "http://192.0.2.1",
            "headcni_headscale_api_key": "hskey-api-x",
            "headcni_node_cluster_cidr": ["10.0.0.0/8"],
        }
        names = {f"node{number}": {} for number in range(1, hosts + 1)}
        inventory = {"headcni": {"hosts": names, "vars": common}}
        (home / "hosts.json").write_text(json.dumps(inventory))
        done = subprocess.run(
            [
                *(Path(sys.executable).with_name("ansible-playbook"), "-i", home / "hosts.json"),
                *(CHECKOUT / playbook, "-e", json.dumps(given), *words),
            ],
            env={
                **os.environ,
                "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"),
                "ANSIBLE_COLLECTIONS_PATH": str(CHECKOUT / "collections"),
                "ANSIBLE_STRATEGY": "controller_only",
                "ANSIBLE_STRATEGY_PLUGINS": str(CHECKOUT / "tests/support/strategy_plugins"),
                "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.default",
                "ANSIBLE_DEPRECATION_WARNINGS": "false",
                "CONTROLLER_COSTS": str(home / "costs"),
                "CONTROLLER_SAMPLE": str(sample),
                "CONTROLLER_NODES": "fresh" if fresh else "settled",
                **({"CONTROLLER_COUNT": "calls"} if count_calls else {}),
                "PYTHONHASHSEED": "0",  # the order of sets decides how much is called
            },
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{playbook}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
        found = json.loads((home / "costs").read_text())
    return Cost(found["kib"] / 1024, found["collecting"], found["tasks"])
