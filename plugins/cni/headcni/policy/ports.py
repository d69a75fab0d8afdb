"""Which peers may use which ports, brought into a form that needs one look-up for each packet.

Rules overlap: one allows A on 80, another B on 1-1024. Here the ports are divided into spans, each
with all the peers that any rule allows on it: 1-79 B, 80 A and B, 81-1024 B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Dict, FrozenSet, Hashable, List, NamedTuple, Optional, Set, Tuple

LAST_PORT = 65535

Sources = FrozenSet[Hashable]


class Allowed(NamedTuple):
    """A source may use the ports from first to last of a protocol."""

    source: Hashable
    protocol: int
    first: int
    last: int


class Span(NamedTuple):
    first: int
    last: int
    sources: Sources


class TooMany(Exception):
    """Ranges overlap so much that their spans would be too large."""


def spans(
    allowed: Iterable[Allowed],
    most: Optional[int] = None,
    weight: Callable[[Hashable], int] = lambda _source: 1,
) -> Dict[int, Tuple[Span, ...]]:
    """By protocol, in order and without overlaps. TooMany if the different groups of sources weigh
    more than `most` together: n ranges that overlap pairwise have 2n groups of up to n sources."""
    edges: Dict[int, Dict[int, Tuple[List[Hashable], List[Hashable]]]] = {}
    for one in set(allowed):
        of = edges.setdefault(one.protocol, {})
        of.setdefault(one.first, ([], []))[0].append(one.source)
        of.setdefault(one.last + 1, ([], []))[1].append(one.source)
    limit = _Limit(most, weight)
    return {protocol: tuple(_sweep(edges[protocol], limit)) for protocol in sorted(edges)}


class _Limit:
    def __init__(self, most: Optional[int], weight: Callable[[Hashable], int]) -> None:
        self._left, self._weight = most, weight
        self._seen: Set[Sources] = set()

    def count(self, sources: Sources) -> None:
        if self._left is None or sources in self._seen:
            return
        self._seen.add(sources)
        self._left -= sum(map(self._weight, sources))
        if self._left < 0:
            raise TooMany


def _sweep(edges: Dict[int, Tuple[List[Hashable], List[Hashable]]], limit: _Limit) -> List[Span]:
    found: List[Span] = []
    active: Counter[Hashable] = Counter()
    first = 0
    for at in sorted(edges):
        sources = frozenset(active)
        limit.count(sources)
        if sources and at > first:
            if found and found[-1].last == first - 1 and found[-1].sources == sources:
                found[-1] = Span(found[-1].first, at - 1, sources)
            else:
                found.append(Span(first, at - 1, sources))
        begin, end = edges[at]
        active.update(begin)
        active.subtract(end)
        for source in end:
            if active[source] <= 0:
                del active[source]
        first = at
    return found
