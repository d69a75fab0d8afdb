"""A lab that goes when the run that uses it ends, however that ends.

Molecule destroys what it created after a failure, but not after Ctrl-C or a kill. So a process of
its own waits for Molecule's end and takes down what is left then.
"""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Callable

from .layout import Lab, LabError
from .locks import locked

LIMIT = 6 * 60 * 60  # of the longest run
FORMER_LIMIT = 60  # in which the attendant of the run before has taken its lab down


def attend(lab: Lab, program: str, unless: str, take_down: Callable[[], None]) -> None:
    """Return at once; take the lab down when the program that this was called from has ended.

    With the word `unless` among its arguments it is left alone: `molecule test --destroy=never`.
    """
    process, words = _caller(program)
    if unless and any(unless in word.split("=") for word in words):
        return
    handle = os.pidfd_open(process)
    # Held until the lab is down, so that a run cannot lose its lab to the attendant of the last.
    with locked(f"attend-{lab.id}", "another run with this lab", FORMER_LIMIT):
        if os.fork():
            return
        os.setsid()  # Ctrl-C is for the others
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nowhere, standard)
        try:
            select.select([handle], [], [], LIMIT)
            take_down()
        finally:
            os._exit(0)


def _caller(program: str) -> tuple[int, list[str]]:
    """The process among our ancestors that runs the program, and its arguments."""
    process = os.getppid()
    while process > 1:
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
        # The program itself, or its interpreter first.
        if any(os.path.basename(word) == program for word in words[:2]):
            return process, words
        process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    raise LabError(f"`attend {program}` was not called from {program}: use `down` instead")
