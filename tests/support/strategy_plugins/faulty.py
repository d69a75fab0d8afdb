"""For tests: a run in which one step fails, or in the midst of which the controller is killed.

FAULT_TASK names the task. FAULT_HOW is fail (once), always (fail each time it comes) or kill, and
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


class StrategyModule(Linear):
    failed = False

    def _queue_task(self, host: Any, task: Any, task_vars: Any, play_context: Any) -> None:
        how = os.environ.get("FAULT_HOW", "")
        if task.name != os.environ.get("FAULT_TASK") or (how == "fail" and self.failed):
            super()._queue_task(host, task, task_vars, play_context)
        elif how in ("fail", "always"):
            self.failed = True
            broken = task.copy()
            broken.action, broken.args = (
                "ansible.builtin.fail",
                {"msg": "this step was made to fail"},
            )
            broken._resolved_action = "ansible.builtin.fail"
            broken.loop = broken.loop_control = None
            broken.register = None
            super()._queue_task(host, broken, task_vars, play_context)
        else:
            super()._queue_task(host, task, task_vars, play_context)
            time.sleep(float(os.environ.get("FAULT_AFTER", "0")))
            os.killpg(os.getpgrp(), signal.SIGKILL)
