"""For tests: every task of a run, as a line of JSON each, in the file that TASK_LOG names."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: task_log
type: aggregate
short_description: every task of a run as a line of JSON
description: For tests.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "task_log"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._file = open(os.environ["TASK_LOG"], "a", buffering=1)  # noqa: SIM115
        self._began: dict[str, float] = {}
        self._play = ""

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self._play = play.get_name()

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        self._began[f"{host}{task._uuid}"] = time.monotonic()

    def _note(self, result: Any, status: str) -> None:
        task, host = result._task, result._host.get_name()
        began = self._began.get(f"{host}{task._uuid}", time.monotonic())
        line = {
            "host": host,
            "play": self._play,
            "task": task.get_name(),
            "action": task.resolved_action or task.action,
            "status": status,
            "changed": bool(result._result.get("changed")),
            "msg": result._result.get("msg", ""),
            "result": {k: v for k, v in result._result.items() if k != "invocation"},
            "seconds": round(time.monotonic() - began, 2),
        }
        self._file.write(json.dumps(line, default=str) + "\n")

    def v2_runner_on_ok(self, result: Any) -> None:
        self._note(result, "ok")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._note(result, "failed")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._note(result, "unreachable")

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._note(result, "skipped")
