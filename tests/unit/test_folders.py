"""tests/unit has the same folders as the code, so that a file's tests are found by its name."""

from __future__ import annotations

import re

import pytest
from lab_command import CHECKOUT

# The folders of tests/unit, and the folder of code that each one tests.
CODE = {
    "action": "plugins/action",
    "cni": "plugins/cni",
    "daemon": "plugins/cni/headcni/daemon",
    "docs": "docs",
    "filter": "plugins/filter",
    "lab": "lab",
    "module_utils": "plugins/module_utils",
    "modules": "plugins/modules",
    "plugin_utils": "plugins/plugin_utils",
    "roles": "roles",
}
UNIT = CHECKOUT / "tests/unit"


def test_each_folder_of_unit_tests_has_its_folder_of_code():
    folders = {path.parent.name for path in UNIT.glob("*/test_*.py")}
    assert folders == set(CODE), f"edit CODE in {__file__}: folder of tests -> folder of code"
    gone = [code for code in CODE.values() if not (CHECKOUT / code).is_dir()]
    assert gone == [], f"edit CODE in {__file__}: these folders have moved"


@pytest.mark.parametrize("folder", sorted(CODE))
def test_each_unit_test_mentions_a_file_of_its_folder_of_code(folder):
    code = CHECKOUT / CODE[folder]
    names = {path.stem for path in code.rglob("*") if path.is_file()}
    names |= {path.name for path in code.iterdir()}
    for test in sorted((UNIT / folder).glob("test_*.py")):
        words = set(re.findall(r"[\w.-]+", test.read_text()))
        words |= {part for word in words for part in word.split(".")}
        assert names & words, f"{test.relative_to(CHECKOUT)} tests nothing of {CODE[folder]}"
