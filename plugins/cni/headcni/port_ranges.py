"""Ports as an operator writes them: 22, 6443/tcp, 30000-32767."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .model import PortRange
from .record import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Tuple, TypeAlias, Union

PATTERN = r"\d{1,5}(-\d{1,5})?"
EXPECTED = "a port or a range of ports, with or without a protocol: 22, 10250/tcp, 30000-32767"
MOST_ANSWERED = 64  # entries of a list; firewalld needs about a second for each
ANSWERED_PROTOCOLS = ("tcp", "udp")
# Ports of the node that tailnet peers reach: all, none, or those of a list.
Answered: TypeAlias = "Union[bool, Tuple[PortRange, ...]]"


def parse(item: Any, protocols: Tuple[str, ...] = PortRange.protocols) -> PortRange:
    """ValueError says what was expected."""
    text = str(item) if isinstance(item, (int, str)) and not isinstance(item, bool) else ""
    match = re.match(rf"(\d{{1,5}})(?:-(\d{{1,5}}))?(?:/({'|'.join(protocols)}))?\Z", text)
    first = int(match[1]) if match else 0
    last = int(match[2] or first) if match else 0
    if match is None or not 0 < first <= last < 65536:
        raise ValueError(EXPECTED)
    return PortRange(first, last, (match[3],) if match[3] else protocols)


def intervals(ranges: Iterable[PortRange], protocol: str) -> list[str]:
    """The ports of one protocol, as nft has them, without overlaps: 22, 30000-32767."""
    merged: list[list[int]] = []
    for one in sorted((one.first, one.last) for one in ranges if protocol in one.protocols):
        if merged and one[0] <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], one[1])
        else:
            merged.append(list(one))
    return [str(first) if first == last else f"{first}-{last}" for first, last in merged]
