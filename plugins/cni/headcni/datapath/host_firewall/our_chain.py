"""A chain of ours among somebody else's, and how to see that it is still what we wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .chains import JUMP, Rule, Table

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


def is_ours(table: Table, name: str) -> bool:
    """Whether a chain by a name of ours is ours, and not somebody else's by chance."""
    have = table.rules.get(name, ())
    return name in table.chains and (not have or f"{NOTE}:".encode() in have[0].note)


def our_jumps(rules: Sequence[Rule], target: str) -> list[int]:
    """Where in a chain our own jumps to a chain of ours are."""
    return [at for at, rule in enumerate(rules) if _leads_to(rule, target) and _is_marked(rule)]


def has_other_jumps(table: Table, target: str) -> bool:
    """Whether somebody else's rules lead to a chain of ours, which keep it from being deleted."""
    return any(
        rule.target == target and not (_leads_to(rule, target) and _is_marked(rule))
        for rules in table.rules.values()
        for rule in rules
    )


def _leads_to(rule: Rule, target: str) -> bool:
    return rule.verdict == JUMP and rule.target == target and not rule.conditional


def _is_marked(rule: Rule) -> bool:
    return NOTE.encode() in rule.note
