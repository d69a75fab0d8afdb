"""A lab of the tests' own, beside whatever lab the developer has up."""

from __future__ import annotations

import os
from typing import Iterator

import pytest
from hypothesis import settings
from lab_command import LabCommand
from leftovers import assert_nothing_left

# CI repeats the same examples, so that a change is judged by what it changed; at home they differ.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def lab() -> Iterator[LabCommand]:
    """Two nodes and control, bare. After the last test nothing of it may be left."""
    command = LabCommand("pytest")
    command("down")
    before = command.listing()
    command("up", "--nodes", "2")
    yield command
    command("down")
    assert_nothing_left(before, command.listing())
