"""The commands of a page of the documentation: its blocks marked `sh`, as they are printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(.*)$")


@dataclass(frozen=True)
class Step:
    """One block, to be pasted into a terminal as a whole."""

    section: str
    line: int
    commands: str

    @property
    def asks_for_the_key(self) -> bool:
        return "getpass" in self.commands

    @property
    def only_checks(self) -> bool:
        called = [line for line in self.commands.splitlines() if "ansible-playbook" in line]
        return bool(called) and all("--check" in line for line in called)

    def runs(self, playbook: str) -> bool:
        """Whether the step runs this playbook, and not in check mode alone."""
        called = rf"ansible-playbook .*\b{playbook}(\.yml)?$"
        return re.search(called, self.commands, re.M) is not None


def steps(page: Path) -> list[Step]:
    """In the order of the page."""
    found: list[Step] = []
    section, language, begun, block = "", None, 0, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if language is None:
            if fence:
                language, begun, block = fence[1].strip(), number + 1, []
            elif line.startswith("#"):
                section = line.lstrip("#").strip()
        elif fence:
            if language == "sh":
                found.append(Step(section, begun, "".join(f"{one}\n" for one in block)))
            language = None
        else:
            block.append(line)
    assert language is None, f"{page}:{begun}: the block has no end"
    return found
