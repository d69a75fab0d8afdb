"""Releases of the runtime as they might come: of another version, or one that does not run."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from lab_command import CHECKOUT

PARSED = "args = parser.parse_args(arguments)"
BROKEN = f'{PARSED}\n    if not args.check_config:\n        raise SystemExit("it does not run")'


def built(folder: Path) -> Path:
    """What this checkout is."""
    command = [str(CHECKOUT / ".venv/bin/python"), "plugins/cni/release.py", "--output"]
    subprocess.run([*command, str(folder)], cwd=CHECKOUT, timeout=300, check=True)
    return next(folder.glob("*.tar.gz"))


def variant(source: Path, version: str, broken: bool = False) -> Path:
    """The same, called otherwise. A broken one tells its version, and does no more."""
    was = source.name.removeprefix("headcni-runtime-").removesuffix(".tar.gz")
    target = source.parent / f"headcni-runtime-{version}.tar.gz"
    assert target != source, f"the checkout's runtime is {version} already"
    with tarfile.open(source) as old, tarfile.open(target, "w:gz", compresslevel=1) as new:
        for member in old.getmembers():
            stream = old.extractfile(member)
            assert stream is not None
            data = stream.read()
            member.name = member.name.replace(was, version, 1)
            if member.name.endswith(("/VERSION", "headcni/__init__.py")):
                data = data.replace(was.encode(), version.encode())
            if broken and member.name.endswith("headcni/daemon/main.py"):
                assert PARSED.encode() in data
                data = data.replace(PARSED.encode(), BROKEN.encode())
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    return target
