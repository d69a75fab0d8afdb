# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Rows of text as a table to be read."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, the columns as wide as their widest text. All rows are of one length,
    that of the first, which is the head."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows
    ]
