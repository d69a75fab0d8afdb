"""docs/security.md names a test for each claim: all of them exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENT = CHECKOUT / "docs/security.md"
NAMED = sorted(set(re.findall(r"`([\w/]+\.py(?:::\w+)*)`", DOCUMENT.read_text())))


def test_the_document_names_many_tests():
    assert len(NAMED) >= 12


@pytest.mark.parametrize("named", NAMED)
def test_a_test_that_the_document_names_exists(named):
    path, *names = named.removeprefix("tests/").split("::")
    tree = ast.parse((CHECKOUT / "tests" / path).read_text())
    defined = {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    assert set(names) <= defined
    assert any(name.startswith("test_") for name in names or defined)


def test_every_claim_of_what_somebody_cannot_do_names_a_test():
    rows = [line for line in DOCUMENT.read_text().splitlines() if re.match(r"\| \w", line)]
    claims = [row for row in rows if "cannot |" not in row and row.count("|") == 3]
    assert len(claims) >= 12
    assert [row for row in claims if ".py" not in row] == []
