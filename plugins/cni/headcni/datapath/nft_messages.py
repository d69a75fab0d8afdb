"""Elements of nft sets as netlink messages.

libnftables reads the whole ruleset before it changes anything. These messages do not need it, so
they are fast enough for ADD.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from .netlink import NLM_F_CREATE, Request, attribute, nested, text

_INET = 1  # NFPROTO_INET
_NEWSETELEM, _DELSETELEM = 10 << 8 | 12, 10 << 8 | 14
_AT_ONCE = 200  # elements in one message, whose attributes hold 64 KiB at the most


def new_elements(table: str, name: str, keys: Sequence[bytes]) -> list[Request]:
    """Elements that are there already are fine."""
    what = f"add to the set {name} of the nft table inet {table}"
    return _elements(_NEWSETELEM, NLM_F_CREATE, table, name, keys, what)


def delete_elements(table: str, name: str, keys: Sequence[bytes]) -> list[Request]:
    """An element that is not there fails the transaction."""
    what = f"take out of the set {name} of the nft table inet {table}"
    return _elements(_DELSETELEM, 0, table, name, keys, what)


def _elements(
    kind: int, flags: int, table: str, name: str, keys: Sequence[bytes], what: str
) -> list[Request]:
    head = struct.pack("=BBH", _INET, 0, 0) + text(1, table) + text(2, name)
    items = [nested(1, nested(1, attribute(1, key))) for key in keys]
    return [
        Request(kind, flags, head + nested(3, *items[start : start + _AT_ONCE]), what)
        for start in range(0, len(items), _AT_ONCE)
    ]
