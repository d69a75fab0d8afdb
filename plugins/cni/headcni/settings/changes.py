"""What differs between two configurations, and which of it SIGHUP applies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, NamedTuple, Tuple, TypeVar

from .keys import fields_of, shown, walk
from .sections import DaemonConfig

T = TypeVar("T")


class Change(NamedTuple):
    """A key whose value has changed."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {shown(self.old)} → {shown(self.new)}"


class Changes(NamedTuple):
    """What SIGHUP applies, and what needs a restart."""

    applied: Tuple[Change, ...]
    needs_restart: Tuple[Change, ...]


def changes(old: DaemonConfig, new: DaemonConfig) -> Changes:
    differing = [
        (Change(path, before, after), live)
        for (path, before, live), (_path, after, _live) in zip(_flat(old), _flat(new))
        if before != after
    ]
    return Changes(
        tuple(change for change, live in differing if live),
        tuple(change for change, live in differing if not live),
    )


def with_applied(old: DaemonConfig, new: DaemonConfig) -> DaemonConfig:
    """The old configuration with those changes that need no restart, as SIGHUP applies them."""
    return _merged(old, new)


def _flat(config: DaemonConfig) -> Iterator[Tuple[str, Any, bool]]:
    for path, declared, value in walk(config, ""):
        yield path, value, bool(declared.metadata["live"])


def _merged(old: T, new: T) -> T:
    values = {}
    for declared in fields_of(old):
        before, after = getattr(old, declared.name), getattr(new, declared.name)
        if is_dataclass(before):
            values[declared.name] = _merged(before, after)
        else:
            values[declared.name] = after if declared.metadata["live"] else before
    return type(old)(**values)
