"""Run a module of the collection as Ansible would, within this process."""

from __future__ import annotations

import importlib
import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

MODULES = "ansible_collections.headcni.mesh.plugins.modules"


class Failed(Exception):
    """The module failed; `result` is what it said."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result.get("msg"))
        self.result = result


def run(name: str, check: bool = False, /, **arguments: Any) -> dict[str, Any]:
    module = importlib.import_module(f"{MODULES}.{name}")
    said = io.StringIO()
    given = {**arguments, "_ansible_check_mode": check, "_ansible_diff": True}
    with patch_module_args(given), redirect_stdout(said), pytest.raises(SystemExit):
        module.main()
    result: dict[str, Any] = json.loads(said.getvalue().strip().splitlines()[-1])
    if result.get("failed"):
        raise Failed(result)
    return result
