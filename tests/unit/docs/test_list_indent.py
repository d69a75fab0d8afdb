"""Lists of the pages, which are written for GitHub, as the documentation site needs them."""

from __future__ import annotations

import importlib.util
import textwrap

import pytest
from lab_command import CHECKOUT


def for_site(text: str) -> str:
    spec = importlib.util.spec_from_file_location(
        "list_indent", CHECKOUT / "docs/site/list_indent.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.for_site(textwrap.dedent(text)))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("1. one\n   more\n2. two", "1. one\n    more\n2. two"),
        (
            "1. one\n\n       code\n\n   text\n2. two",
            "1. one\n\n        code\n\n    text\n\n2. two",
        ),
        ("- one\n  - inner\n    more\n- two", "- one\n    - inner\n        more\n- two"),
        ("text:\n- one\n- two", "text:\n\n- one\n- two"),
        ("- one\n\n- two\n\ntext", "- one\n\n- two\n\ntext"),
        ("```sh\n- no item\n   kept\n```\ntext", "```sh\n- no item\n   kept\n```\ntext"),
        ("a\n\n    - code, no item\n", "a\n\n    - code, no item\n"),
    ],
)
def test_what_belongs_to_an_item_is_indented_by_four(given, expected):
    assert for_site(given) == expected


@pytest.mark.parametrize(
    "page", sorted((CHECKOUT / "docs").rglob("*.md")), ids=lambda one: one.name
)
def test_no_word_of_a_page_is_lost(page):
    text = page.read_text()
    assert for_site(text).split() == text.split()
