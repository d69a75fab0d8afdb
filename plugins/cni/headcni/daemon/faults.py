"""Looks for faults of this node without being asked, as ``headcnictl diagnose`` finds them.

The command runs in a process of its own. It reads much that the daemon does not need otherwise,
such as all rules of Headscale's policy, and a look that hangs costs the daemon nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

from ..log import Log
from ..periodic import Periodic

SECONDS = 60.0  # between two looks
FIRST_SECONDS = 15.0  # after the start: routes and approvals come within seconds
LIMIT_SECONDS = 45.0  # of a look
STALE_SECONDS = 240.0  # without a look that has ended: two have failed to end, or to begin
STOP_SECONDS = 2.0
CLEAN_SECONDS = 1.0  # for a look that is interrupted to remove its nft table
MOST_FAULTS = 50
MOST_BYTES = 1 << 20
NICE = 10  # CNI calls come first
# The daemon itself knows or repairs what these parts look for, or has metrics for it.
WITHOUT = ("daemon", "pods", "conditions", "peers")
PROGRAM = Path(__file__).resolve().parents[2] / "bin/headcnictl"

log = Log("faults")


class Faults:
    """Looks from start() to stop(). Only faults that do not go away by themselves count."""

    def __init__(self, config_path: str, program: Path = PROGRAM) -> None:
        self._config_path, self._program = config_path, program
        self.found: tuple[Mapping[str, Any], ...] = ()
        self.looked_at = 0.0
        self.problem = ""
        self._known: set[str] = set()  # the ids that were found since the start
        self._interrupted_at = 0.0
        self._child: Optional[subprocess.Popen[bytes]] = None
        self._not_before = time.monotonic() + FIRST_SECONDS
        self._ended_at = time.monotonic()  # of the last look, whether it succeeded or not
        self._loop = Periodic("faults", self._work, SECONDS)

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop(STOP_SECONDS, self._end)

    def is_alive(self) -> bool:
        return self._loop.is_alive()

    def status(self) -> dict[str, Any]:
        return {
            "faults": list(self.found),
            "faults_at": self.looked_at,
            "faults_problem": self.problem or self._stale(),
        }

    def _stale(self) -> str:
        """A look may hang for ever, even when it is killed, if it waits for the kernel."""
        silent = time.monotonic() - self._ended_at
        if silent < STALE_SECONDS:
            return ""
        return f"faults could not be looked for: the last look ended {silent / 60:.0f} min ago"

    def counts(self) -> dict[tuple[str, ...], float]:
        """For the metric: 1 for what is found now, 0 for what was found earlier."""
        now = {str(one["id"]) for one in self.found}
        return {(name,): float(name in now) for name in sorted(self._known | now)}

    def _work(self) -> Optional[float]:
        wait = self._not_before - time.monotonic()
        if wait > 0:
            return wait
        try:
            self._tell(self._look())
            self.problem = ""
        except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError) as problem:
            if not self._loop.is_stopping and not self.problem:
                log.warn("faults could not be looked for", problem=problem)
            self.problem = f"faults could not be looked for: {problem}"
        self._ended_at = time.monotonic()
        return None

    def _look(self) -> list[dict[str, Any]]:
        command = [sys.executable, "-I", str(self._program), "diagnose", "--json"]
        command += ["--config", self._config_path, "--without", ",".join(WITHOUT)]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "NO_COLOR": "1"},
        ) as child:
            self._child = child
            try:
                _come_last(child.pid)
                said, _unused = child.communicate(timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(CLEAN_SECONDS)
                raise ValueError(f"diagnose did not end within {LIMIT_SECONDS:.0f} s") from None
            finally:
                child.kill()
                self._child = None
        if len(said) > MOST_BYTES:
            raise ValueError(f"the answer has {len(said)} bytes")
        if child.returncode < 0:
            raise ValueError(f"diagnose was ended by signal {-child.returncode}")
        answer: Any = {}
        with suppress(ValueError):
            answer = json.loads(said)
        if not isinstance(answer, dict) or "findings" not in answer:
            known = answer.get("error") if isinstance(answer, dict) else ""
            raise ValueError(
                f"diagnose: {known or f'no answer, with exit code {child.returncode}'}"
            )
        return [dict(one) for one in answer["findings"] if one["sure"]][:MOST_FAULTS]

    def _tell(self, found: Sequence[Mapping[str, Any]]) -> None:
        before = {str(one["id"]) for one in self.found}
        now = {str(one["id"]): one for one in found}
        for name, one in now.items():
            if name not in before:
                log.warn(
                    "fault", id=name, found=one["found"], run=one["run"] or "headcnictl diagnose"
                )
        for name in sorted(before - set(now)):
            log.info("the fault is gone", id=name)
        self._known |= set(now)
        self.found, self.looked_at = tuple(found), time.time()

    def _end(self) -> None:
        """It is called again and again."""
        child, now = self._child, time.monotonic()
        if child is None:
            return
        if not self._interrupted_at:
            self._interrupted_at = now
            child.send_signal(signal.SIGINT)
        elif now - self._interrupted_at > CLEAN_SECONDS:
            child.kill()


def _come_last(child: int) -> None:
    """If processor time or memory is short, the daemon comes first."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, child, NICE)
    with suppress(OSError), open(f"/proc/{child}/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
