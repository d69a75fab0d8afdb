# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Format rows of text as a table."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row. Each column is as wide as its widest text. All rows have as many columns as
    the first one, the head."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows
    ]
