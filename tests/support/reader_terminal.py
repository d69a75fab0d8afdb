"""The terminal of somebody who has read the documentation, and has nothing yet.

One bash runs everything, so directories, variables and activated environments carry over as they do
for a reader. It has an empty home and an empty working directory. Its mount and PID namespaces are
its own: there the names of the documentation lead to the lab, and whatever still runs at the
end (SSH keeps connections open) ends with it.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab_command import CHECKOUT

REPOSITORY = "https://github.com/headcni/mesh.git"
DONE = "the-step-is-done"
# What a reader does not have: the checkout's own tools, and what was set for them.
FOREIGN = ("ANSIBLE_", "HEADCNI_", "MOLECULE_", "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
FOREIGN += ("PYTEST_", "PYTHONPATH", "VIRTUAL_ENV", "XDG_", "MAKE", "TAILSCALE_")
START = """
mount --bind "$1" /etc/hosts
mount --bind "$2" /etc/ssh/ssh_config
exec bash --noprofile --norc
"""


@dataclass(frozen=True)
class Terminal:
    shell: subprocess.Popen[bytes]
    home: Path

    def run(self, commands: str, answers: str = "", seconds: float = 300) -> str:
        """What the commands print. The first that fails ends the terminal, and the test."""
        script, typed = self.home / ".step", self.home / ".typed"
        script.write_text(commands)
        typed.write_text(answers)
        line = f"set -eo pipefail; . {script} <{typed}; set +eo pipefail; echo {DONE}\n"
        assert self.shell.stdin is not None
        self.shell.stdin.write(line.encode())
        self.shell.stdin.flush()
        output = self._until_done(time.monotonic() + seconds)
        said, done, _ = output.partition(DONE)
        assert done, f"it failed, or took longer than {seconds:.0f} s:\n{commands}\n{said}"
        return said

    def _until_done(self, deadline: float) -> str:
        assert self.shell.stdout is not None
        read = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.shell.stdout, selectors.EVENT_READ)
            while f"{DONE}\n".encode() not in read and time.monotonic() < deadline:
                if selector.select(timeout=1):
                    more = os.read(self.shell.stdout.fileno(), 65536)
                    if not more:
                        break
                    read += more
        return read.decode(errors="replace")


@contextmanager
def terminal(
    folder: Path, hosts: Mapping[str, str], ssh_config: str, ca_file: Path
) -> Iterator[Terminal]:
    """In an empty directory. `ca_file` is trusted in addition to what this machine trusts."""
    home, work = folder / "home", folder / "work"
    for one in (home, work):
        one.mkdir()
    names = "".join(f"{address} {name}\n" for name, address in hosts.items())
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)
    (folder / "ssh_config").write_text(ssh_config)
    own_namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    start = ["sh", "-ec", START, "sh", str(folder / "hosts"), str(folder / "ssh_config")]
    shell = subprocess.Popen(
        [*own_namespaces, *start],
        cwd=work,
        env=_environment(folder, home, ca_file),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # without a terminal, prompts are answered by standard input
    )
    try:
        yield Terminal(shell, home)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate(timeout=30)


def _environment(folder: Path, home: Path, ca_file: Path) -> dict[str, str]:
    venv = str(CHECKOUT / ".venv")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    path = [one for one in kept["PATH"].split(":") if not one.startswith(venv)]
    trusted = Path(kept.get("REQUESTS_CA_BUNDLE") or "/etc/ssl/certs/ca-certificates.crt")
    bundle = folder / "trusted.pem"
    bundle.write_text(trusted.read_text() + ca_file.read_text())
    repository = folder / "repository"
    _copy_checkout(repository)
    return {
        **kept,
        **_pip_as_set_up(),
        "PATH": ":".join(path),
        "HOME": str(home),
        "REQUESTS_CA_BUNDLE": str(bundle),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf",
        "GIT_CONFIG_VALUE_0": REPOSITORY,
    }


def _pip_as_set_up() -> dict[str, str]:
    """The home is another, but pip's settings and its cache stay what they are."""
    real = Path.home()
    files = [real / ".config/pip/pip.conf", real / ".pip/pip.conf"]
    found = next((one for one in files if one.exists()), None)
    settings = {"PIP_CONFIG_FILE": str(found)} if found else {}
    return {**settings, "PIP_CACHE_DIR": str(real / ".cache/pip")}


def _copy_checkout(target: Path) -> None:
    """A repository with the checkout as it is now, committed or not."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, copy = CHECKOUT / name, target / name
        if os.path.lexists(source):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)
    for command in (
        ["init", "--quiet", "--initial-branch=main"],
        ["add", "--all", "--force"],
        ["-c", "user.name=test", "-c", "user.email=test@example.org", "commit", "-qm", "As it is"],
    ):
        subprocess.run(["git", "-C", target, *command], timeout=60, check=True)
