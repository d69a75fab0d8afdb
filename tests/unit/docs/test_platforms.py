"""docs/platforms.md names tests: they are there."""

from __future__ import annotations

import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
TEXT = (CHECKOUT / "docs/platforms.md").read_text()


def test_every_test_that_the_page_names_is_there():
    named = re.findall(r"`((?:tests/[\w/]+/)?test_\w+\.py)(?:::(test_\w+))?`", TEXT)
    assert len(named) > 20
    for path, test in named:
        found = [CHECKOUT / path] if "/" in path else list((CHECKOUT / "tests/unit").rglob(path))
        assert len(found) == 1 and found[0].is_file(), path
        assert not test or f"def {test}(" in found[0].read_text(), f"{path}::{test}"


def test_every_folder_of_tests_that_the_page_names_is_there():
    for folder in re.findall(r"`(tests/[\w/]+/)`", TEXT):
        assert list((CHECKOUT / folder).glob("test_*.py")), folder


def test_every_page_and_section_that_is_linked_is_there():
    for page, anchor in re.findall(r"\]\(([\w.]+\.md)(?:#([\w-]+))?\)", TEXT):
        titles = re.findall(r"(?m)^#+ (.*)$", (CHECKOUT / "docs" / page).read_text())
        assert not anchor or anchor in [one.lower().replace(" ", "-") for one in titles]


def test_every_row_names_the_test_or_says_that_there_is_none():
    tests = r"`(?:tests/|test_)|Molecule scenario `|the same$"
    for row in (line for line in TEXT.splitlines() if line.startswith("| ")):
        *cells, by = (cell.strip() for cell in row[1:-1].split("|"))
        if by != "by" and not by.startswith("---") and cells[-1] != "not tested":
            assert re.search(tests, by), row
