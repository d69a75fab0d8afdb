# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""tailscaled as a service of systemd: what it is, what it runs with, and making it run.

Only the standard library is used, because this runs on nodes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Callable, NamedTuple

from .shared.localapi import SOCKET, LocalAPI, LocalAPIError
from .tailscale_release import InstallError

NAME = "tailscaled.service"
Run = Callable[..., "tuple[int, str, str]"]  # AnsibleModule.run_command


class Unit(NamedTuple):
    """The service as systemd knows it."""

    loaded: bool
    masked: bool
    path: str
    active: bool
    enabled: bool
    process: int
    stale: bool  # its file has changed since systemd read it


class Service:
    def __init__(self, run: Run, name: str = NAME, socket: str = SOCKET) -> None:
        self._run = run
        self.name = name
        self._api = LocalAPI(socket, timeout=3.0)

    def look(self) -> Unit:
        keys = "LoadState,FragmentPath,ActiveState,UnitFileState,MainPID,NeedDaemonReload"
        found = dict(
            line.partition("=")[::2]
            for line in self._systemctl("show", f"--property={keys}", self.name).splitlines()
        )
        return Unit(
            loaded=found.get("LoadState") == "loaded",
            masked=found.get("LoadState") == "masked",
            path=found.get("FragmentPath", ""),
            active=found.get("ActiveState") in ("active", "activating", "reloading"),
            enabled=found.get("UnitFileState") in ("enabled", "enabled-runtime"),
            process=int(found.get("MainPID") or 0),
            stale=found.get("NeedDaemonReload") == "yes",
        )

    def running_version(self) -> str:
        """What the running one says that it is; empty if none answers."""
        try:
            return self._api.status().version
        except LocalAPIError:
            return ""

    def reload(self) -> None:
        self._systemctl("daemon-reload")

    def enable(self) -> None:
        self._systemctl("enable", self.name)

    def disable(self) -> None:
        self._systemctl("disable", self.name)

    def unmask(self) -> None:
        self._systemctl("unmask", self.name)

    def stop(self) -> None:
        self._systemctl("stop", self.name)

    def restart(self, version: str, timeout: float) -> None:
        """Start it, anew if it runs, and wait until it answers."""
        self._systemctl("restart", self.name)
        until = time.monotonic() + timeout
        while not self.running_version():
            if time.monotonic() > until:
                raise InstallError(
                    f"{self.name} was started, and does not answer after {timeout:g} s: "
                    f"see `journalctl -u {self.name}`"
                )
            time.sleep(0.1)
        found = self.running_version()
        if version and found != version:
            raise InstallError(
                f"{self.name} runs {found}, though {version} is installed: "
                f"see which program `systemctl cat {self.name}` starts"
            )

    def _systemctl(self, *words: str) -> str:
        code, out, err = self._run(["systemctl", "--no-pager", *words])
        if code != 0:
            said = (err or out).strip().splitlines() or [f"exit code {code}"]
            if words[0] == "restart":
                said = [*self._last_words(), f"see `journalctl -u {self.name}`"]
            raise InstallError(f"`systemctl {' '.join(words)}` failed: {'; '.join(said)}")
        return out

    def _last_words(self) -> list[str]:
        """What tailscaled itself, and not systemd, said last."""
        mine = ("journalctl", "--no-pager", "--output=cat", f"--unit={self.name}")
        out = self._run([*mine, "_COMM=tailscaled", "--lines=3"])[1]
        return [line.strip() for line in out.splitlines() if line.strip()][-3:]


def lacks(process: int, values: Mapping[str, str]) -> list[str]:
    """The variables that a running process has with another value, or not at all."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            pairs = (os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0"))
            has = {name: value for name, _unused, value in pairs}
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [name for name, value in values.items() if has.get(name) != value]


def unit_exists(name: str = NAME) -> bool:
    """Whether systemd finds it, without asking systemd."""
    folders = ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib")
    return any(os.path.exists(f"{folder}/systemd/system/{name}") for folder in folders)


def refuse_other_inits() -> None:
    if not os.path.isdir("/run/systemd/system"):
        raise InstallError(
            "this node's init is not systemd: with service none only the programs are installed, "
            "and starting tailscaled is left to you"
        )
