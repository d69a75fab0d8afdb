"""For tests: a run in which one step fails, or in the midst of which the controller is killed.

FAULT_TASK names the task, and FAULT_NUMBER which one of that name it is on FAULT_HOST (the first on
any host, unless said). FAULT_HOW is fail (once), always (fail each time it comes) or kill, and
FAULT_AFTER says how many seconds after the task was sent to its node the kill comes.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from ansible.plugins.strategy.linear import StrategyModule as Linear

DOCUMENTATION = """
name: faulty
short_description: linear, with one fault
description: For tests.
author: HeadCNI
"""
seen = 0  # of the tasks of that name; each play has a strategy of its own


def is_due(host: str, task: str, how: str) -> bool:
    global seen
    if task != os.environ.get("FAULT_TASK") or host != os.environ.get("FAULT_HOST", host):
        return False
    seen += 1
    return how == "always" or seen == int(os.environ.get("FAULT_NUMBER", "1"))


class StrategyModule(Linear):
    def _queue_task(self, host: Any, task: Any, task_vars: Any, play_context: Any) -> None:
        how = os.environ.get("FAULT_HOW", "")
        due = is_due(host.get_name(), task.name, how)
        if due and how in ("fail", "always"):
            task = task.copy()
            task.action = task._resolved_action = "ansible.builtin.fail"
            task.args = {"msg": "this step was made to fail"}
            task.loop = task.loop_control = task.register = None
            task.no_log = False
        super()._queue_task(host, task, task_vars, play_context)
        if due and how == "kill":
            time.sleep(float(os.environ.get("FAULT_AFTER", "0")))
            os.killpg(os.getpgrp(), signal.SIGKILL)
