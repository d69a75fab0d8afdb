"""Eight nodes of the lab, with site.yml run on them, for what needs more than one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from lab_command import CHECKOUT, LabCommand

NODES = tuple(f"node{number}" for number in range(1, 9))
LIMIT = 900


@contextmanager
def standing() -> Iterator[LabCommand]:
    lab = LabCommand("bench")
    try:
        lab.run("python3", "-m", "lab", "up", "--nodes", str(len(NODES)), timeout=LIMIT)
        playbook(lab, "site.yml")
        yield lab
    finally:
        lab("down")


def playbook(lab: LabCommand, *words: str) -> str:
    return ansible(lab, "ansible-playbook", *words)


def ansible(lab: LabCommand, program: str, *words: str) -> str:
    argv = [str(CHECKOUT / ".venv/bin" / program), "-i", "inventories/lab", *words]
    done = subprocess.run(
        argv, cwd=CHECKOUT, env=lab.env, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
    return done.stdout
