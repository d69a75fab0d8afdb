"""How answers look on a terminal: tables, lines of at most 80 columns, and colour.

Colour is used only on a terminal, and not if NO_COLOR is set (https://no-color.org).
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from typing import Sequence

COLUMNS = 80
BAD, DOUBTFUL, GOOD, FAINT, STRONG = "31", "33", "32", "2", "1"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def coloured() -> bool:
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def paint(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if text and coloured() else text


def width(text: str) -> int:
    """The columns that a text takes: colours take none."""
    return len(_COLOUR.sub("", text))


def table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    """Columns as wide as needed, without trailing blanks."""
    lines = [list(head), *map(list, rows)]
    widths = [max(width(line[at]) for line in lines) for at in range(len(head))]
    padded = (
        "  ".join(cell + " " * (size - width(cell)) for cell, size in zip(line, widths))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def wrapped(text: str, first: str = "", rest: str = "") -> str:
    """A paragraph within 80 columns. Commands and addresses are not split. Only the beginning may
    have colours."""
    shown = textwrap.fill(
        text,
        COLUMNS,
        initial_indent="x" * width(first),
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return first + shown[width(first) :]
