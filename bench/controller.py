"""What a thousand hosts cost the controller, beside a hundred of them. It needs no node.

The playbooks are run as they are, with modules that return at once (tests/support/strategy_plugins/
controller_only.py). The hosts are alike: what a task does for a host is done for the first few.
"""

from __future__ import annotations

from controller_cost import Cost, measured

from .measure import Findings, Row

FEW, MANY = 100, 1000
SAMPLE = 20
PLAYBOOKS = {"site.yml, nothing to do": "site.yml", "uninstall.yml": "uninstall.yml"}
BAR = 1.1  # eleven times as much for ten times the hosts
LEAST = 0.0005  # seconds a host: of what is below, the clock and the other load are most


def run(findings: Findings) -> None:
    peer = f"itself with {FEW}, times {MANY // FEW}"
    for what, playbook in PLAYBOOKS.items():
        few, many = (
            measured(f"playbooks/{playbook}", hosts, sample=SAMPLE, fresh=False)
            for hosts in (FEW, MANY)
        )
        findings.raw[f"controller, {playbook}"] = {FEW: few.tasks, MANY: many.tasks}
        times = MANY / FEW
        rows = {
            "processor": (many.seconds, few.seconds * times, "s", ""),
            "memory": (many.mib, few.mib * times, "MiB", ""),
        }
        task = _steepest(few, many)
        ours, theirs = many.tasks[task]["seconds"], few.tasks[task]["seconds"] * times
        rows["the task that grows most"] = (ours, theirs, "s", task.rpartition(": ")[2])
        for name, (ours, theirs, unit, note) in rows.items():
            title = f"controller, {what}, {MANY} hosts: {name}"
            findings.rows.append(
                Row("controller", title, peer, ours, theirs, unit, bar=BAR, note=note)
            )


def _steepest(few: Cost, many: Cost) -> str:
    def growth(name: str) -> float:
        return many.tasks[name]["seconds"] / few.tasks[name]["seconds"]

    counted = [name for name, task in many.tasks.items() if task["seconds"] > LEAST * MANY]
    return max(counted, key=growth)
