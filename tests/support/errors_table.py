"""Every error of the runtime, as tables for docs/errors.md."""

from __future__ import annotations

import re
from collections.abc import Iterable

from headcni.ctl.explanations import Explanation


def table(explained: Iterable[Explanation], codes: bool = False) -> str:
    head = ("ID", *(["code"] if codes else []), "name", "cause", "what to do")
    lines = [_line(head), _line("---" for _unused in head)]
    for each in explained:
        place = f'<a id="{each.id.lower()}"></a>{each.id}'
        number = [str(each.number)] if codes else []
        texts = (_linked(each.cause), _linked(each.next_step))
        lines.append(_line((place, *number, f"`{each.name}`", *texts)))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _linked(text: str) -> str:
    """Pages are named as in a terminal: docs/PAGE.md."""
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text)
