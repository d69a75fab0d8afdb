"""The terminal captures in the documentation. tests/lab makes them on a lab."""

from __future__ import annotations

import pytest

from lab.captures import CAPTURES, PAGE, filled


def test_each_part_of_the_page_is_filled_with_a_block():
    page = "# T\n\n<!-- captured: routes -->\n\nold\n<!-- end of routes -->\n\nafter\n"
    once = filled(page, "routes", "$ headcnictl routes\n\\1 is no group")
    assert "```text\n$ headcnictl routes\n\\1 is no group\n```" in once
    assert "old" not in once and once.endswith("after\n")
    assert filled(once, "routes", "$ headcnictl routes\n\\1 is no group") == once
    with pytest.raises(SystemExit, match="exactly one part"):
        filled(page, "ipam", "")


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda one: one.name)
def test_the_page_shows_each_command_with_an_answer(capture):
    part = PAGE.read_text().partition(f"<!-- captured: {capture.name} -->")[2]
    lines = part.partition(f"<!-- end of {capture.name} -->")[0].strip().splitlines()
    assert lines[0] == "```text" and lines[-1] == "```"
    assert lines[1] == f"$ bin/headcnictl -i inventories/mine {' '.join(capture.words)}"
    assert len(lines) > 5
