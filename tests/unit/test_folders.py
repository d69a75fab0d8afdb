"""tests/unit has the same folders as the code, so that a file's tests are found by its name."""

from __future__ import annotations

import pytest
from lab_command import CHECKOUT

UNIT = CHECKOUT / "tests/unit"
# Where the code of tests/unit/NAME may be.
PLACES = ("plugins/{}", "plugins/cni/headcni/{}", "{}")
FOLDERS = sorted({path.parent.relative_to(UNIT).as_posix() for path in UNIT.glob("*/**/test_*.py")})


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_of_unit_tests_has_its_folder_of_code(folder):
    places = [place.format(folder) for place in PLACES]
    assert any((CHECKOUT / place).is_dir() for place in places), (
        f"tests/unit/{folder} has no code: none of {', '.join(places)} is a folder"
    )
