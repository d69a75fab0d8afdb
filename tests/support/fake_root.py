"""A file system of a machine that we do not have, for code that takes a root to look below."""

from __future__ import annotations

import os
from pathlib import Path

BOOTED = 1_700_000_000
TICKS = os.sysconf("SC_CLK_TCK")


class FakeRoot:
    """Files and processes below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file("/proc/stat", f"cpu 1 2 3\nbtime {BOOTED}\n")
        self.link("/proc/self/ns/pid", "pid:[1]")
        self._last_pid = 0
        self.process("systemd")

    def __str__(self) -> str:
        return str(self.folder)

    def file(self, path: str, text: str, changed: float = BOOTED) -> Path:
        made = self.folder / path.lstrip("/")
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(text)
        os.utime(made, (changed, changed))
        return made

    def link(self, path: str, target: str) -> None:
        made = self.folder / path.lstrip("/")
        made.parent.mkdir(parents=True, exist_ok=True)
        made.symlink_to(target)

    def process(
        self, name: str, *arguments: str, parent: int = 1, namespace: str = "1", age: int = 60
    ) -> int:
        """One that was started so many seconds after the boot."""
        self._last_pid += 1
        pid = self._last_pid
        self.file(f"/proc/{pid}/comm", f"{name}\n")
        self.file(f"/proc/{pid}/cmdline", "\0".join([f"/usr/bin/{name}", *arguments]) + "\0")
        rest = " ".join(["0"] * 17)
        self.file(f"/proc/{pid}/stat", f"{pid} ({name}) S {parent} {rest} {age * TICKS} 0\n")
        self.link(f"/proc/{pid}/ns/pid", f"pid:[{namespace}]")
        return pid
