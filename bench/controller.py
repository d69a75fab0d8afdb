"""What a thousand hosts cost the controller, compared with a hundred of them. It needs no node.

The playbooks are run as they are, with modules that return at once (tests/support/strategy_plugins/
controller_only.py). The hosts are alike: what a task does for a host is done for the first few, and
counted for all.

The bars are for what is the same in every run: how many functions the controller calls, and its
memory. The processor's time has no bar, since it depends on what else the machine does: the same
work took from 0.7 to 1.6 times as long within minutes. It is shown because it contains what the
number of calls does not: loops without a call, and what a function written in C does inside. The
hundred hosts are run again and again beside the thousand, so that both feel the same load.

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
COUNTED_SAMPLE = 3  # hosts; they call the same functions
TIMED_SAMPLE = 31
PLAYBOOKS = {"site.yml, nothing to do": "site.yml", "uninstall.yml": "uninstall.yml"}
BAR = 1.1  # eleven times as much for ten times the hosts
LEAST = 0.0005  # seconds a host: what takes less is mostly noise


def run(findings: Findings) -> None:
    counts = _counted()
    for what, playbook in PLAYBOOKS.items():
        few, many = counts[playbook]
        timed_few, timed_many = _timed(playbook)
        findings.raw[f"controller, {playbook}"] = {
            str(FEW): [cost.tasks for cost in (few, *timed_few)],
            str(MANY): [cost.tasks for cost in (many, timed_many)],
        }
        calls = {
            name: _scaled([few], many, partial(_million_calls, task=name)) for name in many.tasks
        }
        seconds = {
            name: _scaled(timed_few, timed_many, partial(_seconds, task=name))
            for name in many.tasks
        }
        calls_most = _steepest(calls)
        slows_most = _steepest({name: of for name, of in seconds.items() if of[0] > LEAST * MANY})
        timed = partial(_scaled, timed_few, timed_many)
        for figure, pair, unit, bar, task in (
            ("functions called", _scaled([few], many, _million_calls), "million", BAR, ""),
            ("calls of the task that grows most", calls[calls_most], "million", BAR, calls_most),
            ("memory", timed(lambda cost: cost.mib), "MiB", BAR, ""),
            ("processor", timed(lambda cost: cost.seconds), "s", None, ""),
            ("of it, the search for garbage", timed(lambda cost: cost.collecting), "s", None, ""),
            ("seconds of the task that grows most", seconds[slows_most], "s", None, slows_most),
        ):
            title = f"controller, {what}, {MANY} hosts: {figure}"
            peer = f"itself with {FEW}, times {TIMES:.0f}"
            note = task.rpartition(": ")[2]
            findings.rows.append(Row("controller", title, peer, *pair, unit, bar=bar, note=note))


def _counted() -> dict[str, tuple[Cost, Cost]]:
    """By playbook, with few hosts and with many. Nothing is timed, so both cores are used."""
    with ThreadPoolExecutor(2) as pool:
        running = {
            (playbook, hosts): pool.submit(
                measured,
                f"playbooks/{playbook}",
                hosts,
                sample=COUNTED_SAMPLE,
                fresh=False,
                count_calls=True,
            )
            for hosts in (MANY, FEW)
            for playbook in PLAYBOOKS.values()
        }
        done = {which: cost.result() for which, cost in running.items()}
    return {
        playbook: (done[playbook, FEW], done[playbook, MANY]) for playbook in PLAYBOOKS.values()
    }


def _timed(playbook: str) -> tuple[list[Cost], Cost]:
    cost = partial(measured, f"playbooks/{playbook}", sample=TIMED_SAMPLE, fresh=False)
    few = []
    with ThreadPoolExecutor(1) as pool:
        many = pool.submit(cost, MANY)
        while not many.done():
            few.append(cost(FEW))
    return few, many.result()


def _scaled(few: list[Cost], many: Cost, figure: Callable[[Cost], float]) -> tuple[float, float]:
    """Ours, and what it would be if ten times the hosts cost ten times as much."""
    return figure(many), TIMES * median(list(map(figure, few)))


def _million_calls(cost: Cost, task: str = "") -> float:
    """Of one task, or of all."""
    return (cost.tasks[task]["calls"] if task else cost.calls) / 1_000_000


def _seconds(cost: Cost, task: str) -> float:
    return cost.tasks[task]["seconds"]


def _steepest(tasks: dict[str, tuple[float, float]]) -> str:
    return max(tasks, key=lambda name: tasks[name][0] / tasks[name][1])
