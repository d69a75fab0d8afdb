"""A condition that should hold: what the daemon reports in its status, /ready and its metrics."""

from __future__ import annotations

from typing import NamedTuple


class Condition(NamedTuple):
    """`message` says what is wrong. If the condition holds, it is empty or a remark."""

    name: str
    ok: bool
    message: str = ""
