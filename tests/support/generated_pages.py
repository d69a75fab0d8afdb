"""The parts of the documentation that are generated from the code: `make reference` writes them.

A part stands between two comments in a page, and the text around it is written by hand:

    <!-- generated: NAME -->
    <!-- end of NAME -->
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Callable

CHECKOUT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(CHECKOUT / "plugins/cni"))

import errors_table  # noqa: E402
import metrics_table  # noqa: E402

from headcni import settings  # noqa: E402
from headcni.ctl import explanations  # noqa: E402

Parts = Mapping[str, Callable[[], str]]


def daemon_keys() -> str:
    """Every key of config.yaml, as the code has it."""
    lines = ["| key | meaning | default | changed by |", "| --- | --- | --- | --- |"]
    for path, about, default, live in settings.described():
        plain = str(default).lower() if isinstance(default, bool) else str(default)
        shown = "" if default in ("", []) else f"`{plain}`"
        lines.append(f"| `{path}` | {about} | {shown} | {'reload' if live else 'restart'} |")
    return "\n".join(lines)


PAGES: Mapping[str, Parts] = {
    "docs/configuration.md": {"daemon keys": daemon_keys},
    "docs/errors.md": {
        "codes": lambda: errors_table.table(explanations.CODES, codes=True),
        "conditions": lambda: errors_table.table(explanations.CONDITIONS),
        "refused ranges": lambda: errors_table.table(explanations.REFUSED_RANGES),
        "faults": lambda: errors_table.table(explanations.FAULTS),
    },
    "docs/metrics.md": {
        "headcni": lambda: metrics_table.table(ours=True),
        "process": lambda: metrics_table.table(ours=False),
    },
}


def filled(text: str, parts: Parts) -> str:
    """The page with its parts as the code has them now."""
    for name, part in parts.items():
        between = re.compile(rf"(?s)(<!-- generated: {name} -->\n).*?(<!-- end of {name} -->)")
        content = f"\n{part()}\n\n"
        text, count = between.subn(lambda found, new=content: found[1] + new + found[2], text)
        if count != 1:
            raise SystemExit(f"the page needs exactly one part <!-- generated: {name} -->")
    return text


def main(arguments: list[str]) -> int:
    stale = []
    for page, parts in PAGES.items():
        path = CHECKOUT / page
        before = path.read_text()
        if (after := filled(before, parts)) != before:
            stale.append(page)
            if "--check" not in arguments:
                path.write_text(after)
    for page in stale:
        print(f"{page} {'is out of date' if '--check' in arguments else 'written'}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
