"""Pools as data: which addresses of a range are usable, and which free address comes next.

Free space is a list of intervals, so finding an address costs the same in an empty pool and in
one with a single address left, and a /64 is no larger than a /30.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ..model import Address, Network, Range
from ..record import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Callable, Optional, Protocol, TypeAlias

    class FreeSpace(Protocol):
        """The free addresses of one range: disjoint intervals that do not touch."""

        def at_or_after(self, point: int) -> Interval | None:
            """The interval that contains the point, or else the next one above it."""


# It includes both ends.
Interval: TypeAlias = "tuple[int, int]"
# A random number from 0 to n - 1, for n.
Below: TypeAlias = "Callable[[int], int]"

RANDOM_TRIES = 8

Strategy: TypeAlias = "Callable[[FreeSpace, Interval, Optional[int], Below], Optional[int]]"


def sequential(free: FreeSpace, bounds: Interval, last: int | None, _below: Below) -> int | None:
    """The next free address after the last one, and after the end from the start.

    So an address is reused as late as possible, as with host-local.
    """
    start = bounds[0] if last is None else last + 1
    found = free.at_or_after(start) or free.at_or_after(bounds[0])
    if found is None:
        return None
    return start if found[0] <= start <= found[1] else found[0]


def dense_pack(free: FreeSpace, bounds: Interval, _last: int | None, _below: Below) -> int | None:
    """The lowest free address, so that the addresses in use stay together at the bottom."""
    found = free.at_or_after(bounds[0])
    return found[0] if found else None


def scattered(free: FreeSpace, bounds: Interval, _last: int | None, below: Below) -> int | None:
    """A random free address. Each is equally likely while the range has room.

    It tries random addresses of the range, which is exactly uniform and nearly always succeeds
    after a few tries. In a range that is almost full it takes the first free interval above the
    last try. Then addresses after a long run of taken ones are more likely, which does no harm.
    """
    found = None
    for _unused in range(RANDOM_TRIES):
        dart = bounds[0] + below(bounds[1] - bounds[0] + 1)
        found = free.at_or_after(dart)
        if found and found[0] <= dart:
            return dart
    found = found or free.at_or_after(bounds[0])
    return found[0] + below(found[1] - found[0] + 1) if found else None


STRATEGIES: dict[str, Strategy] = {
    "sequential": sequential,
    "random": scattered,
    "dense-pack": dense_pack,
}


def system_below(n: int) -> int:
    """A number below n from the kernel's randomness (the random module costs 5 ms to import)."""
    return int.from_bytes(os.urandom(24), "big") % n


def usable(range_: Range, gateways: Iterable[Address] = ()) -> list[Interval]:
    """The usable addresses: without the gateways, and without excluded and reserved addresses."""
    version = range_.subnet.version
    holes = [(int(a), int(b)) for a, b in range_.exclude if a.version == version]
    points = [*gateways, *reserved(range_.subnet)]
    if range_.gateway is not None:
        points.append(range_.gateway)
    holes.extend((int(point), int(point)) for point in points if point.version == version)
    return cut((int(range_.start), int(range_.end)), holes)


def reserved(subnet: Network) -> list[Address]:
    """Addresses that no host may have: IPv4 network and broadcast, IPv6 subnet-router anycast
    (::0).

    A /31 (RFC 3021) and a /127 (RFC 6164) have none, and a /32 or /128 is a single host. So all of
    their addresses are usable. host-local refuses such subnets, but a routed data path needs them.
    """
    if subnet.prefixlen > subnet.max_prefixlen - 2:
        return []
    if subnet.version == 4:
        return [subnet.network_address, subnet.broadcast_address]
    return [subnet.network_address]


def cut(whole: Interval, holes: Iterable[Interval]) -> list[Interval]:
    """The interval without the holes, in order. Holes may overlap, and may be outside."""
    left = []
    start, end = whole
    for first, last in sorted(holes):
        if first > end:
            break
        if first > start:
            left.append((start, first - 1))
        start = max(start, last + 1)
    if start <= end:
        left.append((start, end))
    return left


def without(intervals: Sequence[Interval], points: Sequence[int]) -> list[Interval]:
    """Intervals without single points, both in order, in one pass."""
    left = []
    place = 0
    for first, last in intervals:
        while place < len(points) and points[place] < first:
            place += 1
        while place < len(points) and points[place] <= last:
            if points[place] > first:
                left.append((first, points[place] - 1))
            first = points[place] + 1
            place += 1
        if first <= last:
            left.append((first, last))
    return left


def size(intervals: Iterable[Interval]) -> int:
    return sum(last - first + 1 for first, last in intervals)


def gateways(range_sets: Iterable[Iterable[Range]]) -> list[Address]:
    return [r.gateway for ranges in range_sets for r in ranges if r.gateway is not None]


def describe(range_sets: Sequence[Sequence[Range]]) -> str:
    """A text that differs if the pools differ, so that they must be built again."""
    return " + ".join(", ".join(map(_describe_range, ranges)) for ranges in range_sets)


def _describe_range(range_: Range) -> str:
    text = f"{range_.subnet} [{range_.start}-{range_.end}] gateway {range_.gateway}"
    for first, last in range_.exclude:
        text += f" not {first}-{last}"
    return text
