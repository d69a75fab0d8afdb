"""tailscaled as a service: what systemd says of it, and what its process was started with."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.tailscale_release import InstallError
from ansible_collections.headcni.mesh.plugins.module_utils.tailscale_service import (
    Service,
    Unit,
    lacks,
)


def service(answer: tuple[int, str, str], socket: str = "/nonexistent") -> Service:
    return Service(lambda argv: answer, socket=socket)


def test_what_systemd_says_is_read():
    said = (
        "LoadState=loaded\nFragmentPath=/etc/x\nActiveState=active\nUnitFileState=enabled\n"
        "MainPID=7\nNeedDaemonReload=yes\n"
    )
    assert service((0, said, "")).look() == Unit(True, False, "/etc/x", True, True, 7, True)
    nothing = "LoadState=not-found\nActiveState=inactive\nMainPID=0\n"
    assert service((0, nothing, "")).look() == Unit(False, False, "", False, False, 0, False)
    assert service((0, "LoadState=masked\n", "")).look().masked


def test_a_start_that_fails_tells_tailscaleds_last_words_and_where_to_look():
    def run(argv: list[str]) -> tuple[int, str, str]:
        failed = (1, "", "Job for tailscaled.service failed.\n")
        return failed if argv[0] == "systemctl" else (0, "flag not defined: -x\n", "")

    said = r"`systemctl restart .* failed: flag not defined: -x; see `journalctl -u tailscaled"
    with pytest.raises(InstallError, match=said):
        Service(run, socket="/nonexistent").restart("1.102.5", 1)
    with pytest.raises(InstallError, match=r"enable .* failed: Job for tailscaled.service failed"):
        Service(run).enable()


def test_one_that_is_started_and_never_answers_is_given_up():
    with pytest.raises(InstallError, match=r"does not answer after 0.2 s"):
        service((0, "", "")).restart("1.102.5", 0.2)


def test_a_processs_environment_is_compared_with_what_it_should_be():
    with subprocess.Popen(["sleep", "60"], env={"A": "1", "B": "x=y"}) as process:
        try:
            while not Path(f"/proc/{process.pid}/environ").read_bytes():
                time.sleep(0.01)  # until the kernel has set it up
            assert lacks(process.pid, {"A": "1", "B": "x=y"}) == []
            assert lacks(process.pid, {"A": "2", "C": ""}) == ["A", "C"]
        finally:
            process.kill()
    assert lacks(process.pid, {"A": "1"}) == []
    assert lacks(os.getpid(), {}) == []
