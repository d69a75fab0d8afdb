"""``headcnictl validate FILE``: every mistake at once, whatever kind of file it is."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any, Dict, List

from .. import validation
from ..problems import Problem, render
from .main import NO, OK, read, show


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a path, or - for stdin")


def run(args: argparse.Namespace) -> int:
    text = read(args.file)
    kind = kind_of(args.file, text)
    found = problems(kind, text)
    doubts = [] if kind == "config.yaml" else validation.doubts(text, _ours())
    if args.json:
        answer: Dict[str, Any] = {"file": args.file, "kind": kind}
        if doubts:
            answer["warnings"] = doubts
        show({**answer, **json.loads(render(found, as_json=True))}, as_json=True)
    else:
        lines = [f"{args.file} ({kind}): {render(found)}"]
        show("\n".join([*lines, *(f"  warning: {doubt}" for doubt in doubts)]), as_json=False)
    return NO if found else OK


def kind_of(path: str, text: bytes) -> str:
    """The kind of a file by its content; a file that is not JSON by its name."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if path.endswith((".conflist", ".json")):
            return "conflist"
        return "netconf" if path.endswith(".conf") else "config.yaml"
    if isinstance(value, dict) and {"cniVersion", "type", "plugins"} & set(value):
        # A netconf may have plugins too, for a chain of its own, but a conflist has no type.
        return "netconf" if "type" in value else "conflist"
    return "config.yaml"


def problems(kind: str, text: bytes) -> List[Problem]:
    ours = _ours()
    if kind == "conflist":
        return validation.conflist_problems(text, ours)
    if kind == "netconf":
        return validation.problems(text, ours)
    from ..settings import parse  # imports a YAML parser

    return parse(text)[1]


def _ours() -> Dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith("HEADCNI_")}
