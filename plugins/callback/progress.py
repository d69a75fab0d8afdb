# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Says what a long run is doing, and how long its steps took."""

from __future__ import annotations

DOCUMENTATION = r"""
name: progress
type: aggregate
short_description: Show what a long run waits for, and how long each step took
version_added: 0.2.0
description:
  - While a task takes longer than O(interval), it says which nodes the run waits for, how many are
    done, and for how long.
  - In a play that goes through the nodes in batches, it says which node of how many comes next.
  - At the end it shows the time of each step, the slowest tasks, and what to do next.
  - It writes to stderr and leaves the output of other callbacks alone.
options:
  enabled:
    description: Whether anything is shown.
    type: bool
    default: true
    env:
      - name: HEADCNI_PROGRESS
    ini:
      - section: callback_progress
        key: enabled
  interval:
    description: After how many seconds a task that still runs is shown, and how often after that.
    type: float
    default: 10
    env:
      - name: HEADCNI_PROGRESS_INTERVAL
    ini:
      - section: callback_progress
        key: interval
requirements:
  - "C(callbacks_enabled = headcni.mesh.progress) in the section C([defaults]) of ansible.cfg."
  - "The ansible.cfg of a checkout has it."
author:
  - The HeadCNI authors (@headcni)
"""

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ansible.plugins.callback import CallbackBase

SLOWEST = 3  # tasks in the summary
SLOW = 1.0  # seconds: a faster task is never among the slowest
NAMES = 5  # of nodes in a line

# What to do after a playbook that has succeeded.
NEXT = {
    "site": ("test whether pods reach each other: {verify}",),
    "verify": ("look at a node: headcnictl status",),
    "switch_mode": ("set headcni_mode in the inventory to the same value", "{verify}"),
    "upgrade": ("{verify}", "to return to the previous runtime: {rollback}"),
    "rollback": ("{verify}",),
    "change_pod_cidr": ("set headcni_node_pod_cidr in the inventory to the same value", "{verify}"),
    "replace_node": ("{verify}",),
    "rotate_keys": ("{verify}",),
    "move_server": ("{verify}",),
    "up": ("look at the machines: make status", "log in to a node: make shell NODE=node1"),
}
AFTER_A_FAILURE = (
    "correct the cause, which is shown above, and run the same command again: it finishes what is"
    " left"
)


class Task(NamedTuple):
    """A task that runs, on these nodes of the current batch."""

    name: str
    began: float
    nodes: int
    waiting: dict[str, None]  # by name, in the order in which they began
    done: set[str]


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "headcni.mesh.progress"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._began = time.monotonic()
        self._playbook = ""
        self._play = ""
        self._nodes = 0
        self._seen: dict[str, int] = {}  # nodes of a play in earlier batches
        self._steps: dict[str, float] = {}
        self._tasks: dict[str, float] = {}
        self._task: Task | None = None
        self._step_began = self._began
        self._over = threading.Event()

    def set_options(self, *args: Any, **kwargs: Any) -> None:
        super().set_options(*args, **kwargs)
        self.disabled = not self.get_option("enabled")

    def v2_playbook_on_start(self, playbook: Any) -> None:
        self._playbook = os.path.realpath(playbook._file_name)
        interval = max(float(self.get_option("interval")), 0.1)
        threading.Thread(target=self._watch, args=(interval,), daemon=True).start()

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self._end_step()
        self._play = play.get_name().strip()
        inventory = play.get_variable_manager()._inventory
        batch = [str(host) for host in inventory.get_hosts(play.hosts)]
        every = inventory.get_hosts(play.hosts, ignore_restrictions=True)
        self._nodes = len(batch)
        if len(batch) < len(every):
            first = self._seen.get(self._play, 0) + 1
            self._seen[self._play] = last = first + len(batch) - 1
            which = f"node {first}" if first == last else f"nodes {first} to {last}"
            self._say(f"{self._play}: {which} of {len(every)} ({_named(batch)})")

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        del is_conditional
        self._end_task()
        name = task.get_name().strip()
        self._task = Task(name, time.monotonic(), self._nodes, {}, set())

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        self.v2_playbook_on_task_start(task, False)

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        del task
        if self._task is not None:
            self._task.waiting[str(host)] = None

    def v2_runner_on_ok(self, result: Any, **kwargs: Any) -> None:
        del kwargs
        self._answered(result)

    def v2_runner_on_failed(self, result: Any, **kwargs: Any) -> None:
        del kwargs
        self._answered(result)

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._answered(result)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._answered(result)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        self._over.set()
        self._end_step()
        failed = bool(stats.failures or stats.dark)
        self._write([*self._summary(), *self._what_next(failed)])

    def _answered(self, result: Any) -> None:
        if self._task is not None:
            name = str(result._host)
            self._task.waiting.pop(name, None)
            self._task.done.add(name)

    def _end_task(self) -> None:
        if self._task is not None:
            took = time.monotonic() - self._task.began
            name = self._task.name
            self._tasks[name] = self._tasks.get(name, 0.0) + took
        self._task = None

    def _end_step(self) -> None:
        self._end_task()
        now = time.monotonic()
        if self._play:
            self._steps[self._play] = self._steps.get(self._play, 0.0) + now - self._step_began
        self._step_began = now

    def _watch(self, interval: float) -> None:
        """In a thread of its own. Another thread may fork meanwhile, so it takes no lock."""
        told: tuple[Task | None, float] = (None, 0.0)
        while not self._over.wait(min(interval / 4, 1.0)):
            task, now = self._task, time.monotonic()
            since = told[1] if task is told[0] else (task.began if task else now)
            if task is not None and now - since >= interval:
                told = (task, now)
                self._say(_waiting(self._play, task, now))

    def _say(self, text: str) -> None:
        self._write([f"  … {text} · {_time(time.monotonic() - self._began)} in all"])

    def _write(self, lines: Iterable[str]) -> None:
        """One write, so that no other output comes between."""
        try:
            os.write(2, "".join(f"{line}\n" for line in lines).encode())
        except OSError:
            self._over.set()  # nobody reads it any more

    def _summary(self) -> list[str]:
        width = max((len(name) for name in self._steps), default=0)
        total = time.monotonic() - self._began
        lines = ["", f"  {'step':<{max(width, 5)}}  time"]
        lines += [f"  {name:<{max(width, 5)}}  {_time(took)}" for name, took in self._steps.items()]
        lines.append(f"  {'in all':<{max(width, 5)}}  {_time(total)}")
        slow = sorted(self._tasks.items(), key=lambda one: -one[1])[:SLOWEST]
        shown = [f"{name} ({_time(took)})" for name, took in slow if took >= SLOW]
        if shown:
            lines += ["", "  slowest tasks:", *(f"    {one}" for one in shown)]
        return lines

    def _what_next(self, failed: bool) -> list[str]:
        installed = "/ansible_collections/" in self._playbook

        def named(name: str) -> str:
            return f"headcni.mesh.{name}" if installed else f"playbooks/{name}.yml"

        steps = (AFTER_A_FAILURE,) if failed else NEXT.get(Path(self._playbook).stem, ())
        names = {name: f"ansible-playbook {named(name)}" for name in ("verify", "rollback")}
        lines = [f"    {step.format(**names)}" for step in steps]
        return ["", "  next:", *lines, ""] if lines else [""]


def _waiting(play: str, task: Task, now: float) -> str:
    names = list(task.waiting)
    done = f"{len(task.done)} of {task.nodes} nodes done"
    waits = f", waits for {_named(names)}" if names else ""
    return f"{play}: {task.name}: {_time(now - task.began)}, {done}{waits}"


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
