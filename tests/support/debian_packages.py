"""Debian packages for the lab's nodes, which have no way to a mirror of their own.

They are fetched once, into the lab's cache, by the apt of the nodes' base image, so that versions
and dependencies are those that a node would get; a node then installs them with dpkg.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from lab_command import LabCommand

from lab.image import base_root
from lab.layout import cache_dir

SECONDS = 300


def fetched(*names: str) -> list[Path]:
    """The packages and what they need beyond the base image, as files."""
    key = hashlib.sha256(" ".join((base_root().name, *names)).encode()).hexdigest()[:16]
    folder = cache_dir() / "packages" / key
    if not folder.exists():
        _fetch(names, folder)
    return sorted(folder.glob("*.deb"))


def _fetch(names: tuple[str, ...], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        root = Path(work)
        for name in ("upper", "work", "merged"):
            (root / name).mkdir()
        merged = root / "merged"
        layers = f"lowerdir={base_root()},upperdir={root / 'upper'},workdir={root / 'work'}"
        subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", layers, merged], check=True, timeout=30
        )
        try:
            shutil.copy("/etc/resolv.conf", merged / "etc/resolv.conf")
            for command in (
                ["update", "-qq"],
                ["install", "-qq", "-y", "--no-install-recommends", "--download-only", *names],
            ):
                subprocess.run(["chroot", merged, "apt-get", *command], check=True, timeout=SECONDS)
            found = list((merged / "var/cache/apt/archives").glob("*.deb"))
            unfinished = root / "debs"
            unfinished.mkdir()
            for one in found:
                shutil.copy(one, unfinished)
            unfinished.rename(folder)
        finally:
            subprocess.run(["umount", merged], check=True, timeout=30)


def install(lab: LabCommand, node: str, *names: str) -> None:
    """As an operator would: the packages' own scripts run, and start what they start."""
    for deb in fetched(*names):
        lab.copy(deb, node, f"/root/debs/{deb.name}")
    lab.on(node, "DEBIAN_FRONTEND=noninteractive dpkg -i /root/debs/*.deb; rm -r /root/debs")
