"""Running other programs: always with a limit, never through a shell."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Mapping, Optional, Sequence, Union

from .layout import LabError

Argument = Union[str, Path]


def run(
    *argv: Argument,
    timeout: float = 60,
    check: bool = True,
    stdin: Optional[str] = None,
    env: Optional[Mapping[str, str]] = None,
) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in argv]
    try:
        done = subprocess.run(
            command,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"`{_short(command)}` took more than {timeout:.0f} s") from None
    except FileNotFoundError:
        raise LabError(
            f"`{command[0]}` is not installed: run `make up`, which installs it"
        ) from None
    if check and done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise LabError(f"`{_short(command)}` failed: {said[-1] if said else done.returncode}")
    return done


def _short(command: Sequence[str]) -> str:
    text = " ".join(command)
    return text if len(text) <= 120 else text[:117] + "…"
