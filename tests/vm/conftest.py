"""Two virtual machines and a node, with site.yml run on them; what takes long is shown."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from lab_command import CHECKOUT, LabCommand
from leftovers import assert_nothing_left
from site_run import Site

# Without KVM a virtual machine is some ten times slower than this one.
LIMIT = 30 * 60


class Shown(LabCommand):
    """The lab as a user sees it: `make test-vm` runs pytest with -s."""

    def run(
        self, *argv: str, check: bool = True, timeout: float = LIMIT, **env: str
    ) -> subprocess.CompletedProcess[str]:
        limit = max(timeout, LIMIT)
        if {"shell", "inventory"} & set(argv):
            return super().run(*argv, check=check, timeout=limit, **env)
        print(f"\n$ {' '.join(argv)[:150]}", file=sys.stderr, flush=True)
        worker = subprocess.Popen(
            argv,
            cwd=CHECKOUT,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        timer = threading.Timer(limit, worker.kill)
        timer.start()
        lines = []
        assert worker.stdout is not None
        try:
            for line in worker.stdout:
                lines.append(line)
                print(f"  {line}", end="", file=sys.stderr, flush=True)
            code = worker.wait()
        finally:
            timer.cancel()
            worker.kill()
        if check and code != 0:
            pytest.fail(f"{' '.join(argv)} → {code}: see above")
        return subprocess.CompletedProcess(argv, code, "".join(lines), "")


@pytest.fixture(scope="session")
def lab():
    command = Shown("vm")
    command("down")
    before = command.listing()
    command("up", "--nodes", "1", "--vms", "2")
    yield command
    command("down")
    assert_nothing_left(before, command.listing())


@pytest.fixture(scope="session")
def site(lab, tmp_path_factory):
    """Every run with one release, whatever becomes of the sources meanwhile."""
    folder = tmp_path_factory.mktemp("dist")
    lab.run(".venv/bin/python", "plugins/cni/release.py", "--output", str(folder))
    found = Site(lab, {"headcni_node_release_src": str(next(folder.iterdir()))})
    found()
    return found
