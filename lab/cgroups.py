"""One cgroup a machine, in every hierarchy, v1 or v2: to find its processes and end them all."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

ROOT = Path("/sys/fs/cgroup")


def hierarchies() -> list[Path]:
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT]
    return sorted(p for p in ROOT.iterdir() if p.is_dir() and not p.is_symlink())


@dataclass(frozen=True)
class Cgroup:
    lab: str
    machine: str

    def _paths(self) -> Iterator[Path]:
        return (h / self.lab / self.machine for h in hierarchies())

    def create(self) -> None:
        if hierarchies() == [ROOT]:
            self._count_memory()
        for path in self._paths():
            for level in (path.parent, path):
                level.mkdir(exist_ok=True)
                for limit in ("cpuset.cpus", "cpuset.mems"):
                    if (level / limit).exists() and not (level / limit).read_text().strip():
                        (level / limit).write_text((level.parent / limit).read_text())
            shares = path.parent / "cpu.shares"
            if shares.exists():  # otherwise all machines together weigh as much as one process
                machines = sum(one.is_dir() for one in path.parent.iterdir())
                shares.write_text(str(1024 * machines))

    def _count_memory(self) -> None:
        """In cgroup v2 a controller is handed down level by level; without it, nobody counts."""
        (ROOT / self.lab).mkdir(exist_ok=True)
        for level in (ROOT, ROOT / self.lab):
            with suppress(OSError):
                (level / "cgroup.subtree_control").write_text("+memory")

    def enter(self) -> None:
        """For a child process, before it becomes another program."""
        for path in self._paths():
            (path / "cgroup.procs").write_text(str(os.getpid()))

    def alive(self) -> bool:
        return any(processes(path) for path in self._paths())

    def memory(self) -> int:
        """Bytes in use, page cache of the machine included; 0 where nobody counts."""
        for path in self._paths():
            for name in ("memory.current", "memory.usage_in_bytes"):
                if (path / name).exists():
                    return int((path / name).read_text())
        return 0

    def kill(self) -> None:
        for path in self._paths():
            end(path)
            with suppress(OSError):  # other machines of the lab are in there
                path.parent.rmdir()


def processes(top: Path) -> set[int]:
    """Every process in a cgroup and below it."""
    found: set[int] = set()
    for folder, _, _ in os.walk(top):
        try:
            found.update(map(int, Path(folder, "cgroup.procs").read_text().split()))
        except OSError:
            continue
    return found


def end(top: Path, limit: float = 20) -> None:
    """Kill everything in the cgroup, wait until it is gone, remove the cgroup."""
    deadline = time.monotonic() + limit
    while top.exists():
        for process in processes(top) - {os.getpid()}:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for folder, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                break
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes in {top} do not end")
        time.sleep(0.02)


def remove(lab: str) -> None:
    """End all of a lab; the caller itself may be in one of its cgroups, and steps out first."""
    for hierarchy in hierarchies():
        if (top := hierarchy / lab).exists():
            (hierarchy / "cgroup.procs").write_text(str(os.getpid()))
            end(top)
