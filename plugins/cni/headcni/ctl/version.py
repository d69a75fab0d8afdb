"""``headcnictl version``."""

from __future__ import annotations

import argparse
import os
import platform

from .. import __version__
from ..skel import VERSIONS
from .main import OK, show


def arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing but --json."""
    del parser


def run(args: argparse.Namespace) -> int:
    python, shim = platform.python_version(), active_shim()
    if args.json:
        answer = {"headcni": __version__, "cni": list(VERSIONS), "python": python, "shim": shim}
        show(answer, as_json=True)
    else:
        versions = f"headcni {__version__}, CNI {', '.join(VERSIONS)}, Python {python}"
        show(f"{versions}, {shim} shim", as_json=False)
    return OK


def active_shim() -> str:
    """The shim of this release that a container runtime starts: native or Python."""
    release = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        with open(os.path.join(release, "bin", "headcni"), "rb") as program:
            return "native" if program.read(4) == b"\x7fELF" else "Python"
    except OSError:
        return "no"
