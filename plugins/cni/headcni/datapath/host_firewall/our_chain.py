"""A chain of ours among somebody else's, and how to see that it is still what we wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from .chains import Table

NOTE = "HeadCNI"  # begins the comments of our rules


class OurChain(NamedTuple):
    """Its rules, as the firewall's own language has them, and a digest of them. The chain's first
    rule does nothing but carry the digest in its comment."""

    name: str
    rules: tuple[str, ...]
    digest: str

    @classmethod
    def of(cls, name: str, rules: Iterable[str]) -> OurChain:
        lines = tuple(rules)
        return cls(name, lines, hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16])

    @property
    def comment(self) -> str:
        return f"{NOTE}:{self.digest}"

    def is_in(self, table: Table) -> bool:
        have = table.rules.get(self.name, ())
        marked = bool(have) and self.comment.encode() in have[0].note
        return marked and len(have) == len(self.rules) + 1
