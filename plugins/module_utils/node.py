# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Shared by all modules that run on a node: require Linux and root, and talk to systemd."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SECONDS = 120  # for systemctl; units have their own timeouts


class NodeError(Exception):
    """Something on the node prevents this. The message says what, and what to do."""


def unsupported() -> str:
    """Why this machine cannot be a node; empty if it can."""
    if sys.platform != "linux":
        return f"{os.uname().sysname} cannot be a node: HeadCNI needs Linux (a VM of it will do)"
    return ""


def refuse_other_platforms(module: Any) -> None:
    reason = unsupported()
    if reason:
        module.fail_json(msg=reason)


_NAMED_SECRET = re.compile(r"(?i)(?:KEY|TOKEN|SECRET|PASSWORD)\Z")


def secrets_of(environment: Mapping[str, Any]) -> list[str]:
    """What of a service's variables must not be shown: the password of a proxy's address, and what
    is called a secret."""
    found = []
    for name, value in environment.items():
        in_address = re.search(r"://[^/@\s:]*:([^/@\s]+)@", str(value))
        if in_address:
            found.append(in_address[1])
        elif _NAMED_SECRET.search(str(name)) and len(str(value)) >= 6:  # no 1, no true
            found.append(str(value))
    return found


class Unit(NamedTuple):
    """A unit as systemd reports it."""

    name: str
    load: str  # loaded, not-found, …
    active: str  # active, inactive, failed, activating, …
    enabled: str  # enabled, disabled, …
    pid: int
    changed_at: float  # when its state last changed, reloads included; 0 if never
    stale: bool  # its file on disk is newer than the one that systemd has read

    @property
    def is_active(self) -> bool:
        return self.active in ("active", "reloading")


def has_systemd() -> bool:
    return os.path.isdir("/run/systemd/system")


def systemctl(*arguments: str, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["systemctl", "--no-pager", "--no-ask-password", *arguments],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise NodeError("systemctl is not there: HeadCNI's services need systemd") from None
    except subprocess.TimeoutExpired:
        raise NodeError(f"systemctl {' '.join(arguments)} did not end in {seconds:g} s") from None


def run_bounded(
    argv: Sequence[str], environ_update: Any = None, seconds: float = 30
) -> tuple[int, str, str]:
    """Like AnsibleModule.run_command, but a program that hangs or is missing counts as failed."""
    try:
        done = subprocess.run(
            list(argv),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environ_update or {})},
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return 1, "", str(problem)
    return done.returncode, done.stdout, done.stderr


_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "UnitFileState",
    "MainPID",
    "StateChangeTimestampMonotonic",
    "NeedDaemonReload",
)


def unit(name: str) -> Unit:
    import time

    done = systemctl("show", name, *(f"--property={one}" for one in _PROPERTIES))
    said = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    microseconds = int(said.get("StateChangeTimestampMonotonic") or 0)
    # Files have the wall clock's time: what systemd counts from the boot is put in its terms.
    since_boot = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    return Unit(
        name=name,
        load=said.get("LoadState", ""),
        active=said.get("ActiveState", ""),
        enabled=said.get("UnitFileState", ""),
        pid=int(said.get("MainPID") or 0),
        changed_at=since_boot + microseconds / 1e6 if microseconds else 0.0,
        stale=said.get("NeedDaemonReload") == "yes",
    )


def order(verb: str, *names: str) -> None:
    """systemctl start, stop and so on. If it fails, the error quotes the unit's last messages."""
    done = systemctl(verb, *names)
    if done.returncode == 0:
        return
    said = last_words(names) if names else []
    reason = "; ".join(said[-3:]) or done.stderr.strip() or f"exit code {done.returncode}"
    raise NodeError(
        f"systemctl {verb} {' '.join(names)} failed: {reason}"
        + (f"; see journalctl -u {names[0]}" if names else "")
    )


def last_words(names: Sequence[str], lines: int = 10, pid: int = 0) -> list[str]:
    """The end of the journal without systemd's own messages; of one process, if it is given."""
    command = ["journalctl", "--no-pager", "--output=cat", f"--lines={lines}", "--boot=0"]
    command += [f"--identifier={name.partition('.')[0]}" for name in names]
    command += [f"_PID={pid}"] if pid else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]
