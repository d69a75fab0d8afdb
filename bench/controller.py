"""What a thousand hosts cost the controller, beside a hundred of them. It needs no node.

The playbooks are run as they are, with modules that return at once (tests/support/strategy_plugins/
controller_only.py). The hosts are alike: what a task does for a host is done for the first few.

While the thousand are run, the hundred are run again and again beside them: what else the machine
does makes both slower, by up to a half. The figures are medians of these runs.

A task is compared by its seconds divided by what a fixed piece of work took meanwhile, which is
done every few hosts: the machine may have been slow for just these seconds. The table has seconds
all the same, at the pace of the runs with a hundred.

Python's search for garbage has a row of its own and is not in the seconds of the tasks. With a
thousand hosts one search takes up to a second, and it happens in whichever task makes the object
that is one too many: it would be most of the cost of a task that has nothing to do with it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from controller_cost import Cost, measured

from .measure import Findings, Row, median

FEW, MANY = 100, 1000
TIMES = MANY / FEW
SAMPLE = 31
ROUNDS = 3
PLAYBOOKS = {"site.yml, nothing to do": "site.yml", "uninstall.yml": "uninstall.yml"}
BAR = 1.1  # eleven times as much for ten times the hosts
LEAST = 0.0005  # seconds a host: of what is below, the clock and the other load are most


def run(findings: Findings) -> None:
    for what, playbook in PLAYBOOKS.items():
        few, many = _side_by_side(playbook)
        findings.raw[f"controller, {playbook}"] = {
            str(FEW): [one.tasks for one in few],
            str(MANY): [one.tasks for one in many],
        }
        tasks = {name: _compared(few, many, partial(_of, task=name)) for name in many[0].tasks}
        pace = median([task["pace"] for cost in few for task in cost.tasks.values()])
        tasks = {name: (ours * pace, theirs * pace) for name, (ours, theirs) in tasks.items()}
        counted = [name for name, (ours, _) in tasks.items() if ours > LEAST * MANY]
        steepest = max(counted, key=lambda name: tasks[name][0] / tasks[name][1])
        note = steepest.rpartition(": ")[2]
        for name, (ours, theirs), unit, said in (
            ("processor", _compared(few, many, lambda cost: cost.seconds), "s", ""),
            ("search for garbage", _compared(few, many, lambda cost: cost.collecting), "s", ""),
            ("memory", _compared(few, many, lambda cost: cost.mib), "MiB", ""),
            ("the task that grows most", tasks[steepest], "s", note),
        ):
            title = f"controller, {what}, {MANY} hosts: {name}"
            peer = f"itself with {FEW}, times {TIMES:.0f}"
            findings.rows.append(
                Row("controller", title, peer, ours, theirs, unit, bar=BAR, note=said)
            )


def _side_by_side(playbook: str) -> tuple[list[Cost], list[Cost]]:
    cost = partial(measured, f"playbooks/{playbook}", sample=SAMPLE, fresh=False)
    few = []
    with ThreadPoolExecutor(1) as pool:
        many = [pool.submit(cost, MANY) for _ in range(ROUNDS)]
        while not all(one.done() for one in many):
            few.append(cost(FEW))
    return few, [one.result() for one in many]


def _compared(
    few: list[Cost], many: list[Cost], figure: Callable[[Cost], float]
) -> tuple[float, float]:
    """Ours, and what it would be if ten times the hosts cost ten times as much."""
    return median(list(map(figure, many))), TIMES * median(list(map(figure, few)))


def _of(cost: Cost, task: str) -> float:
    """How many of the fixed pieces of work it costs."""
    return cost.tasks[task]["seconds"] / cost.tasks[task]["pace"]
