"""Lists as Python-Markdown wants them.

The pages are written for GitHub, where what belongs to an item is indented by the width of its
marker, two or three characters. Python-Markdown wants four, and an empty line before a list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

ITEM = re.compile(r"(- +|\d+\. +)(?=\S)")
FENCE = re.compile(r"(```+|~~~+)")


def for_site(markdown: str) -> str:
    return "\n".join(_indented(markdown.split("\n")))


def _indented(lines: Sequence[str]) -> list[str]:
    done: list[str] = []
    after_item = is_loose = False  # is_loose: the previous item has paragraphs
    at = 0
    while at < len(lines):
        line = lines[at]
        if fence := FENCE.match(line):
            end = _end_of_fence(lines, at, fence[1])
            done += lines[at:end]
            at, after_item = end, False
        elif item := ITEM.match(line):
            if done and done[-1].strip() and (is_loose or not after_item):
                done.append("")
            end = _end_of_item(lines, at + 1, len(item[1]))
            inner = [one[len(item[1]) :] for one in lines[at + 1 : end]]
            done.append(line)
            done += [f"    {one}" if one.strip() else "" for one in _indented(inner)]
            at, after_item, is_loose = end, True, "" in inner
        else:
            done.append(line)
            after_item = after_item and not line.strip()
            at += 1
    return done


def _end_of_fence(lines: Sequence[str], start: int, fence: str) -> int:
    for number in range(start + 1, len(lines)):
        if lines[number].startswith(fence):
            return number + 1
    return len(lines)


def _end_of_item(lines: Sequence[str], start: int, width: int) -> int:
    """The line after the last one that belongs to the item."""
    end = start
    for number in range(start, len(lines)):
        if lines[number].startswith(" " * width):
            end = number + 1
        elif lines[number].strip():
            break
    return end
