"""``headcnictl version``."""

from __future__ import annotations

import argparse
import platform

from .. import __version__
from ..result import VERSIONS
from .main import OK, show


def arguments(parser: argparse.ArgumentParser) -> None:
    """None beside --json."""
    del parser


def run(args: argparse.Namespace) -> int:
    python = platform.python_version()
    if args.json:
        answer = {"headcni": __version__, "cni": list(VERSIONS), "python": python}
        show(answer, as_json=True)
    else:
        show(f"headcni {__version__}, CNI {', '.join(VERSIONS)}, Python {python}", as_json=False)
    return OK
