"""What keeps pods' packets from passing and could not be repaired, as the last look found it.

Whoever keeps the firewalls writes it down here; STATUS, which may run in a process of its own,
reads it.
"""

from __future__ import annotations

import os
from contextlib import suppress

PATH = "/run/headcni/blocked"
_LONGEST = 4096


def write(problem: str) -> None:
    """An empty problem means that nothing is blocked."""
    with suppress(OSError):
        if not problem:
            os.unlink(PATH)
            return
        with open(f"{PATH}.new", "w", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n{problem[:_LONGEST]}")
        os.replace(f"{PATH}.new", PATH)


def read() -> str:
    """Nothing once the process that wrote it has ended: nobody knows then how it stands."""
    try:
        with open(PATH, encoding="utf-8") as file:
            writer, _unused, problem = file.read(_LONGEST).partition("\n")
    except OSError:
        return ""
    return problem if os.path.exists(f"/proc/{writer}") else ""
