"""``headcnictl explain ID``: why an error occurs, and what to do."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import asdict
from typing import Dict, List, Union

from .explanations import ALL, Explanation, find
from .main import OK, CannotTell, show

WIDTH = 80


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id",
        metavar="ID",
        nargs="?",
        help="an ID, a code or a name: HC103, 103, address_taken, tailscale; without it, list all",
    )


def run(args: argparse.Namespace) -> int:
    if args.id is None:
        show([_as_dict(each) for each in ALL] if args.json else _list(), args.json)
        return OK
    found = find(args.id)
    if found is None:
        raise CannotTell(
            f"{args.id[:80]!r} is no known error; headcnictl explain, without an ID, lists all"
        )
    show(_as_dict(found) if args.json else in_words(found), args.json)
    return OK


def in_words(found: Explanation) -> str:
    lines = [f"{found.id} {found.name}", ""]
    for title, text in (("cause", found.cause), ("next step", found.next_step)):
        lines += textwrap.wrap(
            text.replace("`", ""),
            WIDTH,
            initial_indent=f"{title + ':':<11}",
            subsequent_indent=" " * 11,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join([*lines, f"{'more:':<11}{found.link}"])


def _as_dict(found: Explanation) -> Dict[str, Union[str, int]]:
    return {"id": found.id, **asdict(found), "link": found.link}


def _list() -> str:
    lines: List[str] = [f"{each.id} {each.name}: {each.cause}" for each in ALL]
    return "\n".join(textwrap.shorten(line, WIDTH, placeholder=" …") for line in lines)
