"""A real Prometheus: Debian's package, unpacked and not installed, so that no service starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from debian_packages import fetched

from lab.layout import cache_dir


def programs() -> Path:
    """The folder with the programs prometheus and promtool."""
    [package] = [path for path in fetched("prometheus") if path.name.startswith("prometheus_")]
    folder = cache_dir() / "packages" / package.stem.replace(":", "-")
    if not folder.exists():
        work = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            subprocess.run(["dpkg-deb", "-x", package, work], check=True, timeout=60)
            os.rename(work / "usr/bin", folder)
        finally:
            shutil.rmtree(work)
    return folder
