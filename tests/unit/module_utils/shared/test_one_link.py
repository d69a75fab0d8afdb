"""The collection's modules and the runtime share one folder, by one link."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[4]
RUNTIME = CHECKOUT / "plugins/cni/headcni"
SHARED = CHECKOUT / "plugins/module_utils/shared"


def test_the_runtime_has_exactly_one_link_and_it_leads_to_the_shared_folder():
    links = [
        Path(folder, name)
        for folder, folders, names in os.walk(RUNTIME)
        for name in (*folders, *names)
        if Path(folder, name).is_symlink()
    ]
    assert links == [RUNTIME / "shared"]
    assert os.readlink(RUNTIME / "shared") == "../../module_utils/shared"


def test_the_package_file_is_empty_as_ansible_wants_it():
    assert (SHARED / "__init__.py").read_bytes() == b""


@pytest.mark.parametrize("path", sorted(SHARED.glob("*.py")), ids=lambda path: path.stem)
def test_shared_code_imports_the_standard_library_and_shared_code_only(path):
    """It has two homes with different names, and runs on nodes without other libraries."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {name.name.partition(".")[0] for name in node.names} <= sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert str(node.module).partition(".")[0] in sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom):
            named = [node.module] if node.module else [name.name for name in node.names]
            assert node.level == 1
            assert all((SHARED / f"{name}.py").is_file() for name in named)
