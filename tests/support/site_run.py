"""A run of a playbook on a lab, with every task of it to be looked at."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import pytest
from lab_command import CHECKOUT, LabCommand

CALLBACKS = CHECKOUT / "tests/support/callback_plugins"
# Done by the controller alone, in a few hundredths of a second.
NO_MODULE = {
    f"ansible.builtin.{name}"
    for name in ("assert", "debug", "fail", "include_role", "include_tasks", "meta", "set_fact")
} | {"ansible.builtin.validate_argument_spec"}


@dataclass(frozen=True)
class Run:
    code: int
    output: str
    tasks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def recap(self) -> dict[str, dict[str, int]]:
        lines = self.output.partition("PLAY RECAP")[2].splitlines()[1:]
        return {
            line.split()[0]: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", line)}
            for line in lines
            if "unreachable=" in line
        }

    def counted(self, word: str) -> dict[str, int]:
        return {host: counts[word] for host, counts in self.recap.items()}

    @property
    def changed(self) -> set[tuple[str, str]]:
        return {(one["host"], one["task"]) for one in self.tasks if one["changed"]}

    def modules(self, host: str) -> list[str]:
        """The tasks of a host that ran a module, on it or for it."""
        return [
            one["task"]
            for one in self.tasks
            if one["host"] == host and one["status"] == "ok" and one["action"] not in NO_MODULE
        ]

    def failures(self, host: str) -> str:
        """What was said of a host that failed, all of it."""
        return "\n".join(
            str(one["msg"])
            for one in self.tasks
            if one["host"] == host and one["status"] in ("failed", "unreachable")
        )


@dataclass(frozen=True)
class Site:
    """site.yml, and its neighbours, on a lab."""

    lab: LabCommand
    always: dict[str, Any] = field(default_factory=dict)

    def command(self, playbook: str, words: tuple[str, ...], given: dict[str, Any]) -> list[str]:
        given = {**self.always, **given}
        extra = ["-e", json.dumps(given)] if given else []
        ansible = str(CHECKOUT / ".venv/bin/ansible-playbook")
        return [ansible, "-i", "inventories/lab", *extra, *words, playbook]

    def __call__(
        self,
        *words: str,
        playbook: str = "site.yml",
        check: bool = True,
        env: Mapping[str, str] = MappingProxyType({}),
        timeout: float = 280,
        **given: Any,
    ) -> Run:
        with tempfile.NamedTemporaryFile() as log:
            done = self.lab.run(
                *self.command(playbook, words, given),
                check=False,
                timeout=timeout,
                ANSIBLE_CALLBACK_PLUGINS=str(CALLBACKS),
                ANSIBLE_CALLBACKS_ENABLED="task_log",
                TASK_LOG=log.name,
                **env,
            )
            tasks = [json.loads(line) for line in Path(log.name).read_text().splitlines()]
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return Run(done.returncode, done.stdout + done.stderr, tasks)

    def verify(self, check: bool = True, **how: Any) -> Run:
        done = self(playbook="playbooks/verify.yml", check=False, **how)
        if check and done.code != 0:
            nodes = self.lab.inventory()["headcni"]["hosts"]
            pytest.fail("\n".join([done.output, *map(self._tailscaled_of, nodes)]))
        return done

    def _tailscaled_of(self, node: str) -> str:
        """What it knows, and has said: why one node does not reach another is seldom ours."""
        unit = "journalctl --no-pager -o short-precise -n 150 -u tailscaled -u headcni-tailscaled"
        said = self.lab.on(node, f"headcnictl status; {unit} | cut -c1-250", check=False)
        return f"--- {node}\n{said}"

    def cut_off_after(self, task: str, **given: Any) -> None:
        """Kill the run as soon as a task has been done on every node."""
        with self._begun(task, given):
            pass

    def after(self, task: str, do: Callable[[], object], **given: Any) -> Run:
        """A run in which something happens as soon as a task has been done on every node."""
        with self._begun(task, given) as (worker, output):
            do()
            code = worker.wait(240)
            return Run(code, _read(output))

    @contextmanager
    def _begun(
        self, task: str, given: dict[str, Any]
    ) -> Iterator[tuple[subprocess.Popen[bytes], IO[str]]]:
        """A run that has come so far, and its output; it is killed if it has not ended by then."""
        with tempfile.TemporaryFile("w+") as output:
            worker = subprocess.Popen(
                self.command("site.yml", (), given),
                cwd=CHECKOUT,
                env=self.lab.env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                until = time.monotonic() + 120
                while task not in _read(output).rpartition("TASK [")[0]:
                    assert time.monotonic() < until and worker.poll() is None, (
                        f"{task!r} was not seen:\n{_read(output)}"
                    )
                    time.sleep(0.05)
                yield worker, output
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.wait(10)


def _read(output: IO[str]) -> str:
    output.seek(0)
    return output.read()
