"""nftables requests as netlink messages, for any family.

libnftables reads the whole ruleset before it changes anything, and old versions cannot spell every
rule. These messages need neither, so they are fit for ADD and for every node.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Optional

from .netlink import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    Netlink,
    Request,
    attribute,
    attributes,
    nested,
    text,
)

INET, ARP, BRIDGE = 1, 3, 7  # NFPROTO_*
FAMILY_NAMES = {INET: "inet", ARP: "arp", BRIDGE: "bridge"}
PREROUTING = 0  # the same number as the hook input of the family arp
LINK, NETWORK, TRANSPORT = 0, 1, 2  # the headers that a payload expression reads from
META_IIFNAME, META_L4PROTO = 6, 16
DROP, ACCEPT, GOTO, JUMP = 0, 1, -4, -3
FIRST_REGISTER = 8  # NFT_REG32_00; each holds four bytes

_NLM_F_APPEND = 0x800
_SUBSYSTEM = 10 << 8
_NEWTABLE, _GETTABLE, _DELTABLE, _NEWCHAIN, _NEWRULE, _GETRULE = 0, 1, 2, 3, 6, 7
_NEWSET, _NEWSETELEM, _GETSETELEM, _DELSETELEM = 9, 12, 13, 14
_ELEMENTS_AT_ONCE = 200  # in one message, whose attributes hold 64 KiB at the most
_HOST_BYTE_ORDER = struct.pack("=BBI", 0, 4, 1)  # of a key, as nft's user data says it
_COMMENT = 0  # the type of a comment in user data


def _be32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("!I", value & 0xFFFFFFFF))


def _request(kind: int, family: int, flags: int, body: bytes, what: str) -> Request:
    return Request(_SUBSYSTEM | kind, flags, struct.pack("=BBH", family, 0, 0) + body, what)


def _named(family: int, table: str) -> str:
    return f"the nft table {FAMILY_NAMES[family]} {table}"


def new_table(family: int, name: str, comment: str) -> Request:
    said = comment.encode() + b"\0"
    body = text(1, name) + attribute(6, bytes([_COMMENT, len(said)]) + said)
    flags = NLM_F_CREATE | NLM_F_EXCL
    return _request(_NEWTABLE, family, flags, body, f"create {_named(family, name)}")


def delete_table(family: int, name: str) -> Request:
    return _request(_DELTABLE, family, 0, text(1, name), f"delete {_named(family, name)}")


def new_chain(family: int, table: str, name: str, priority: Optional[int] = None) -> Request:
    """With a priority a base chain of prerouting."""
    body = text(1, table) + text(3, name)
    if priority is not None:
        body += nested(4, _be32(1, PREROUTING), _be32(2, priority)) + text(7, "filter")
    what = f"create the chain {name} of {_named(family, table)}"
    return _request(_NEWCHAIN, family, NLM_F_CREATE, body, what)


def new_set(
    family: int, table: str, name: str, number: int, key_type: int, key_length: int
) -> Request:
    """`key_type` and the user data only tell nft how to show the elements."""
    body = text(1, table) + text(2, name) + _be32(3, 0) + _be32(4, key_type)
    body += _be32(5, key_length) + _be32(10, number) + attribute(13, _HOST_BYTE_ORDER)
    what = f"create the set {name} of {_named(family, table)}"
    return _request(_NEWSET, family, NLM_F_CREATE, body, what)


def new_rule(family: int, table: str, chain: str, expressions: Iterable[bytes]) -> Request:
    body = text(1, table) + text(2, chain) + nested(4, *expressions)
    what = f"add a rule to {chain} of {_named(family, table)}"
    return _request(_NEWRULE, family, NLM_F_CREATE | _NLM_F_APPEND, body, what)


def new_elements(family: int, table: str, name: str, keys: Sequence[bytes]) -> list[Request]:
    """Elements that are there already are fine."""
    return _elements(_NEWSETELEM, NLM_F_CREATE, family, table, name, keys)


def delete_elements(family: int, table: str, name: str, keys: Sequence[bytes]) -> list[Request]:
    """An element that is not there fails the transaction."""
    return _elements(_DELSETELEM, 0, family, table, name, keys)


def _elements(
    kind: int, flags: int, family: int, table: str, name: str, keys: Sequence[bytes]
) -> list[Request]:
    verb = "add to" if kind == _NEWSETELEM else "delete from"
    what = f"{verb} the set {name} of {_named(family, table)}"
    head = text(1, table) + text(2, name)
    items = [nested(1, nested(1, attribute(1, key))) for key in keys]
    return [
        _request(
            kind, family, flags, head + nested(3, *items[start : start + _ELEMENTS_AT_ONCE]), what
        )
        for start in range(0, len(items), _ELEMENTS_AT_ONCE)
    ]


# Expressions of a rule.


def _expression(name: str, *options: bytes) -> bytes:
    return nested(1, text(1, name), nested(2, *options))


def meta(key: int, register: int = FIRST_REGISTER) -> bytes:
    return _expression("meta", _be32(1, register), _be32(2, key))


def payload(header: int, offset: int, length: int, register: int = FIRST_REGISTER) -> bytes:
    where = _be32(2, header), _be32(3, offset), _be32(4, length)
    return _expression("payload", _be32(1, register), *where)


def equals(value: bytes, negated: bool = False) -> bytes:
    compared = nested(3, attribute(1, value))
    return _expression("cmp", _be32(1, FIRST_REGISTER), _be32(2, int(negated)), compared)


def within(name: str, negated: bool = False) -> bytes:
    """The registers from the first on are an element of the set."""
    options = [text(1, name), _be32(2, FIRST_REGISTER)]
    return _expression("lookup", *options, *([_be32(5, 1)] if negated else []))


def counter() -> bytes:
    return _expression("counter")


def verdict(code: int, chain: str = "") -> bytes:
    said = nested(2, _be32(1, code), *([text(2, chain)] if chain else []))
    return _expression("immediate", _be32(1, 0), nested(2, said))


# Questions.


def table_comment(kernel: Netlink, family: int, name: str) -> Optional[str]:
    """None if there is no such table."""
    question = _request(_GETTABLE, family, 0, text(1, name), f"look at {_named(family, name)}")
    answer = kernel.ask(question)
    if answer is None:
        return None
    for kind, value in attributes(answer[4:]):
        if kind == 6 and value[:1] == bytes([_COMMENT]):
            return value[2 : 2 + value[1]].rstrip(b"\0").decode(errors="replace")
    return ""


def count_rules(kernel: Netlink, family: int, table: str) -> int:
    question = _request(
        _GETRULE, family, 0, text(1, table), f"list the rules of {_named(family, table)}"
    )
    return len(kernel.dump(question))


def keys_of(kernel: Netlink, family: int, table: str, name: str) -> set[bytes]:
    """The elements of a set; none if there is no such set."""
    what = f"list the set {name} of {_named(family, table)}"
    found = set()
    for body in kernel.dump(_request(_GETSETELEM, family, 0, text(1, table) + text(2, name), what)):
        for element in (value for kind, value in attributes(body[4:]) if kind == 3):
            for _unused, item in attributes(element):
                key = dict(attributes(item)).get(1, b"")
                found.add(dict(attributes(key)).get(1, b""))
    return found
