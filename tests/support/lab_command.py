"""The lab as a user drives it: `python3 -m lab`, make, and SSH."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from leftovers import Listing, listing

from lab.layout import Lab

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class LabCommand:
    """`python3 -m lab`, and make, as a user calls them, on a lab of the given name."""

    name: str
    limit: float = 300  # seconds, of one command
    # In the environment of its processes: another checkout's lab may have the same name.
    MARK: ClassVar[str] = "HEADCNI_TESTED_LAB"

    @property
    def env(self) -> dict[str, str]:
        known = {"HEADCNI_LAB": self.name, self.MARK: self.id}
        return {**os.environ, **known, "ANSIBLE_FORCE_COLOR": "0"}

    @property
    def id(self) -> str:
        return Lab.named(self.name).id

    def listing(self) -> Listing:
        """What this lab and the runtime have put on the machine so far."""
        return listing(Lab.named(self.name), f"{self.MARK}={self.id}")

    def run(
        self, *argv: str, check: bool = True, timeout: float = 0, **env: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            argv,
            cwd=CHECKOUT,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=timeout or self.limit,
            check=False,
        )
        if check and done.returncode != 0:
            pytest.fail(f"{' '.join(argv)} → {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def __call__(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("python3", "-m", "lab", *words, check=check)

    def on(self, machine: str, command: str, check: bool = True) -> str:
        """Run a shell command on a machine, over SSH."""
        return self.run(*self._ssh(machine, command), check=check).stdout

    def wait(self, machine: str, command: str, seconds: int = 60) -> None:
        """Until a shell command on a machine succeeds."""
        loop = (
            f"for i in $(seq {seconds * 2}); do {{ {command}; }} && exit 0; sleep 0.5; done; exit 1"
        )
        self.on(machine, loop)

    def copy(self, source: Path, machine: str, target: str) -> None:
        self.write(machine, target, source.read_bytes())

    def write(self, machine: str, target: str, data: bytes) -> None:
        """Put a file on a machine, its folder too."""
        command = f"mkdir -p {os.path.dirname(target)} && cat > {target}"
        subprocess.run(
            self._ssh(machine, command),
            cwd=CHECKOUT,
            env=self.env,
            input=data,
            timeout=120,
            check=True,
        )

    def _ssh(self, machine: str, command: str) -> list[str]:
        """What `lab shell` runs."""
        return ["ssh", "-F", str(Lab.named(self.name).ssh_config), machine, command]

    def inventory(self) -> dict[str, Any]:
        known: dict[str, Any] = json.loads(self("inventory").stdout)
        return known

    def underlay(self) -> str:
        return str(self.inventory()["lab"]["vars"]["lab_underlay"])
