"""Links between the pages lead to files and to headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[3]
PAGES = [
    *(CHECKOUT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((CHECKOUT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of the headings."""
    titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in kept}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page):
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: there is no {path}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {target.name} has no #{anchor}"
