# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which shim a node's container runtime starts: the native one of its architecture, or Python's.

A release has all of them, and on the node one of them is copied to bin/:

    bin/headcni, bin/headcni-ipam, bin/loopback    what the container runtime starts
    python/headcni, …                              the Python shims
    native/x86_64, …, native/SHA256SUMS            the native shim; its name selects the plugin
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass

PROGRAMS = ("headcni", "headcni-ipam", "loopback")
SECONDS = 30

# The output of `uname -m`, and the binary for it.
BINARIES = {
    "aarch64": "aarch64",
    "armv6l": "arm",
    "armv7l": "arm",
    "armv8l": "arm",
    "i386": "x86",
    "i486": "x86",
    "i586": "x86",
    "i686": "x86",
    "ppc64le": "ppc64le",
    "riscv64": "riscv64",
    "s390x": "s390x",
    "x86_64": "x86_64",
}


class ShimError(Exception):
    """The release's native shim cannot be trusted. The message says why and what to do."""


@dataclass(frozen=True)
class Shim:
    """The shim to start: the program for each name, and its label."""

    programs: dict[str, bytes]
    label: str  # as in "native (x86_64)"
    problem: str = ""  # why it is not the native shim, although that was wanted

    @property
    def is_native(self) -> bool:
        return self.label.startswith("native")


def choose(release: str, wanted: bool, machine: str = "") -> Shim:
    """The native shim, if it is wanted and the release has one that runs on this machine."""
    machine = machine or os.uname().machine
    name = BINARIES.get(machine, "")
    path = os.path.join(release, "native", name)
    if not wanted:
        return _python(release, "Python (the native shim is switched off)")
    if name and not os.path.isdir(release):
        return Shim({}, f"native ({name})")  # a release that is still to come has it
    if not name or not os.path.exists(path):
        return _python(release, f"Python (the release has no native shim for {machine})")
    content = _verified(release, name)
    problem = _trouble(path)
    if problem:
        shown = f"the native shim does not run on this node: {path}: {problem}"
        return _python(release, "Python (the native shim does not run)", shown)
    return Shim(dict.fromkeys(PROGRAMS, content), f"native ({name})")


def outdated(release: str, shim: Shim) -> list[str]:
    """The programs in bin/ that are not this shim. None for a release that has only Python's."""
    return [
        name
        for name, content in shim.programs.items()
        if content_of(os.path.join(release, "bin", name)) != content
    ]


def _python(release: str, label: str, problem: str = "") -> Shim:
    found = {name: content_of(os.path.join(release, "python", name)) for name in PROGRAMS}
    return Shim({name: content for name, content in found.items() if content}, label, problem)


def _verified(release: str, name: str) -> bytes:
    folder = os.path.join(release, "native")
    content = content_of(os.path.join(folder, name))
    digest = hashlib.sha256(content).hexdigest()
    listed = content_of(os.path.join(folder, "SHA256SUMS")).decode(errors="replace").splitlines()
    if f"{digest}  {name}" not in listed:
        raise ShimError(
            f"{folder}/{name}: its SHA-256 {digest} is not in {folder}/SHA256SUMS; the file was "
            f"changed after its installation: remove {release} and run again"
        )
    return content


def _trouble(path: str) -> str:
    """Why the native shim does not run on this machine. Outside of a bin directory it only
    prints a hint."""
    try:
        done = subprocess.run(
            [path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    if done.returncode == 1 and "native shim: " in done.stdout:
        return ""
    return f"exit code {done.returncode}, {(done.stdout or done.stderr)[:200]!r}"


def content_of(path: str) -> bytes:
    """Empty if there is no such file."""
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return b""
