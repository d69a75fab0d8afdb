"""ipBlocks as ranges of addresses without overlaps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import List, Tuple

from ..model import Network
from .objects import Block

Ranges = Tuple[Tuple[bytes, bytes], ...]  # the first and the last address of each


def ranges(blocks: Iterable[Block], version: int) -> Ranges:
    """Of one IP version, together, in order; neighbours are merged."""
    size = 4 if version == 4 else 16
    found: List[Tuple[int, int]] = []
    for block in blocks:
        if block.network.version == version:
            found += _without_exceptions(block)
    return tuple(
        (first.to_bytes(size, "big"), last.to_bytes(size, "big")) for first, last in _merged(found)
    )


def _without_exceptions(block: Block) -> List[Tuple[int, int]]:
    at, last = _ends(block.network)
    left = []
    for first_out, last_out in _merged(_ends(one) for one in block.exceptions):
        if at < first_out:
            left.append((at, first_out - 1))
        at = max(at, last_out + 1)
    if at <= last:
        left.append((at, last))
    return left


def _ends(network: Network) -> Tuple[int, int]:
    return int(network[0]), int(network[-1])


def _merged(ranges: Iterable[Tuple[int, int]]) -> List[Tuple[int, int]]:
    found: List[Tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found
