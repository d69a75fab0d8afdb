"""``headcnictl logs``: the journal of the daemon, tailscaled and the plugin in one stream."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time

from . import journal, node
from .journal import Entry
from .main import OK, CannotTell
from .terminal import BAD, DOUBTFUL, FAINT, paint

LINES, MOST_LINES = 200, 10_000
_COLOURS = {"ERROR": BAD, "WARN": DOUBTFUL, "DEBUG": FAINT}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", "-f", action="store_true", help="and go on, until ^C")
    parser.add_argument(
        "--since", default="", metavar="TIME", help="30m, 2h, 3d, or a time as journalctl has it"
    )
    parser.add_argument(
        "--lines",
        "-n",
        type=_count,
        default=LINES,
        metavar="N",
        help=f"at most the last N of each source (%(default)s, at most {MOST_LINES})",
    )
    parser.add_argument("--only", choices=journal.SOURCES, help="only this source")
    node.with_config(parser)
    parser.set_defaults(refuse=parser.error)


def _count(text: str) -> int:
    if text.isdigit() and 1 <= int(text) <= MOST_LINES:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text[:20]!r}: expected a number from 1 to {MOST_LINES}")


def run(args: argparse.Namespace) -> int:
    sources = [args.only] if args.only else journal.SOURCES
    of = journal.units(node.load(args), sources)
    began = time.time()
    try:
        shown, cut = journal.latest(of, args.lines, since(args.since))
    except journal.WrongTime:
        args.refuse(f"{args.since[:80]!r}: expected a time such as 2h, or one of journalctl")
    for entry in shown:
        _print(entry, args.json)
    if cut:
        print(
            f"headcnictl: {' and '.join(cut)} may have more: journalctl did not end within "
            f"{journal.READ_SECONDS:.0f} s; --since 1h lets it search less",
            file=sys.stderr,
        )
    if not args.follow:
        return OK
    seen = {entry.cursor for entry in shown if entry.time >= began}
    try:
        with journal.following(of, began) as entries:
            for entry in entries:
                if entry.cursor not in seen:
                    _print(entry, args.json)
    except KeyboardInterrupt:
        return OK
    raise CannotTell("journalctl has ended")


def since(text: str) -> str:
    """30m as journalctl understands it; other texts are journalctl's own."""
    span = re.match(r"(\d{1,6})([smhd])\Z", text)
    return f"@{time.time() - int(span[1]) * _UNITS[span[2]]:.0f}" if span else text


def _print(entry: Entry, as_json: bool) -> None:
    if as_json:
        known = {key: value for key, value in entry._asdict().items() if key != "cursor"}
        print(json.dumps(known, ensure_ascii=False), flush=True)
    else:
        print(in_words(entry), flush=True)


def in_words(entry: Entry) -> str:
    at = time.strftime("%m-%d %H:%M:%S", time.localtime(entry.time))
    line = f"{at} {entry.source:<10} {entry.level:<5} {entry.message}"
    return paint(line, _COLOURS[entry.level]) if entry.level in _COLOURS else line
