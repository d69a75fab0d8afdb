"""Tables, chains, rules, sets and counters of nftables as netlink messages.

libnftables reads the whole ruleset before it changes anything, which takes longer than ADD may. It
also has one socket for each context, and a table may belong to a socket (see `new_table`). So what
changes often, and what nobody else may change, is written by these messages.

Every rule here is one that `nft` could have written, so that it lists them and reads its own list.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple, Optional, Tuple, Union

from .netlink import NLM_F_CREATE, Request, attribute, attributes, nested, text

SUBSYSTEM = 10  # nf_tables
_INET = 1  # NFPROTO_INET
_GENERAL = struct.pack("=BBH", _INET, 0, 0)  # what each message begins with
NEWTABLE, GETTABLE, DELTABLE, NEWCHAIN, GETCHAIN, DELCHAIN = range(6)
NEWRULE, GETRULE, DELRULE, NEWSET, GETSET, DELSET = range(6, 12)
NEWSETELEM, GETSETELEM, DELSETELEM = range(12, 15)
NEWGEN = 15
NEWOBJ, GETOBJ, DELOBJ = range(18, 21)
OWNER, PERSIST = 2, 4  # flags of a table
_APPEND = 0x800  # NLM_F_APPEND: a rule at the end of its chain
_COUNTER = 1
_MAP, _INTERVAL, _CONCATENATION = 8, 4, 0x80  # flags of a set
_INTERVAL_END = 1  # flag of an element
_VERDICT_TYPE = 0xFFFFFF00
_COMMENT_OF_SET = 7  # in the user data of a set; that of others has 0
_HOST_ORDER = struct.pack("=BBI", 0, 4, 1)  # the same: how the keys are kept
_ROOM = 48 << 10  # bytes of elements in one message, whose attributes hold 64 KiB at the most
LONGEST_COMMENT = 120

# The types of keys: nft's number and the length in bytes.
TYPES = {
    "ipv4_addr": (7, 4),
    "ipv6_addr": (8, 16),
    "inet_service": (13, 2),
    "ifname": (41, 16),
}
HOOKS = {"input": 1, "forward": 2}
_CODES = {"drop": 0, "accept": 1, "jump": -3, "goto": -4, "return": -5}

# An element's key; of a set of intervals its first and last value.
Key = Union[bytes, Tuple[bytes, bytes]]


class Verdict(NamedTuple):
    code: str
    chain: str = ""  # of jump and goto


ACCEPT, DROP = Verdict("accept"), Verdict("drop")
Elements = Mapping[Key, Optional[Verdict]]


class Set(NamedTuple):
    """A set, or a verdict map."""

    name: str
    key: Tuple[str, ...]  # the types of its parts
    is_map: bool = False
    interval: bool = False
    comment: str = ""


class Hook(NamedTuple):
    name: str
    priority: int


class Chain(NamedTuple):
    """Each rule is the expressions of NFTA_RULE_EXPRESSIONS."""

    name: str
    rules: Tuple[bytes, ...]
    hook: Optional[Hook] = None  # policy accept
    comment: str = ""


def _message(kind: int, flags: int, body: bytes, what: str, fine: tuple[int, ...] = ()) -> Request:
    return Request(SUBSYSTEM << 8 | kind, flags, _GENERAL + body, what, fine)


def _be32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("!I", value & 0xFFFFFFFF))


def _be64(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("!Q", value))


def _comment(kind: int, words: str) -> bytes:
    said = words.encode()[:LONGEST_COMMENT] + b"\0"
    return bytes([kind, len(said)]) + said


# Tables


def new_table(name: str, comment: str, flags: int = 0) -> Request:
    """With OWNER | PERSIST (Linux 6.9) the table belongs to the socket that this is sent by: until
    that is closed nobody else can change it, not even by `flush ruleset`; then it stays as any
    other table does. A table that has been left like that can be owned again."""
    body = text(1, name) + _be32(2, flags) + attribute(6, _comment(0, comment))
    return _message(NEWTABLE, NLM_F_CREATE, body, f"create the nft table inet {name}")


def delete_table(name: str) -> Request:
    return _message(DELTABLE, 0, text(1, name), f"delete the nft table inet {name}")


def get_table(name: str) -> Request:
    return _message(GETTABLE, 0, text(1, name), f"look at the nft table inet {name}")


class TableSeen(NamedTuple):
    comment: str
    flags: int
    owner: int  # the port of the socket that owns it


def table_seen(answer: bytes) -> TableSeen:
    comment, flags, owner = "", 0, 0
    for kind, value in attributes(answer[4:]):
        if kind == 2:
            (flags,) = struct.unpack("!I", value)
        elif kind == 6 and value[:1] == b"\0":
            comment = value[2 : 2 + value[1]].rstrip(b"\0").decode(errors="replace")
        elif kind == 7:
            (owner,) = struct.unpack("!I", value)
    return TableSeen(comment, flags, owner)


# Chains and rules


def new_chain(table: str, chain: Chain) -> list[Request]:
    """The chain alone. Its rules may lead to chains that come later."""
    body = text(1, table) + text(3, chain.name)
    if chain.hook is not None:
        hook = _be32(1, HOOKS[chain.hook.name]) + _be32(2, chain.hook.priority)
        body += nested(4, hook) + _be32(5, _CODES["accept"]) + text(7, "filter")
    if chain.comment:
        body += attribute(12, _comment(0, chain.comment))
    return [_message(NEWCHAIN, NLM_F_CREATE, body, f"create the nft chain {chain.name}")]


def new_rules(table: str, chain: Chain) -> list[Request]:
    head = text(1, table) + text(2, chain.name)
    what = f"write a rule of the nft chain {chain.name}"
    flags = NLM_F_CREATE | _APPEND
    return [_message(NEWRULE, flags, head + nested(4, rule), what) for rule in chain.rules]


def flush_chain(table: str, name: str) -> Request:
    body = text(1, table) + text(2, name)
    return _message(DELRULE, 0, body, f"empty the nft chain {name}")


def delete_chain(table: str, name: str) -> Request:
    body = text(1, table) + text(3, name)
    return _message(DELCHAIN, 0, body, f"delete the nft chain {name}")


def list_chains() -> Request:
    return _message(GETCHAIN, 0, b"", "list the nft chains")


def list_rules(table: str) -> Request:
    return _message(GETRULE, 0, text(1, table), f"list the rules of the nft table {table}")


def chain_seen(body: bytes) -> tuple[str, str]:
    """The table and the name of a listed chain."""
    have = dict(attributes(body[4:]))
    return _name(have.get(1)), _name(have.get(3))


def rule_seen(body: bytes) -> tuple[str, str, tuple[str, ...]]:
    """The table and the chain of a listed rule, and the names of its expressions."""
    have = dict(attributes(body[4:]))
    names = [_name(dict(attributes(one)).get(1)) for _unused, one in attributes(have.get(4, b""))]
    return _name(have.get(1)), _name(have.get(2)), tuple(names)


def expression_names(rule: bytes) -> tuple[str, ...]:
    """Those of a rule as we wrote it."""
    return tuple(_name(dict(attributes(one)).get(1)) for _unused, one in attributes(rule))


def _name(value: Optional[bytes]) -> str:
    return (value or b"").rstrip(b"\0").decode(errors="replace")


# Sets


def new_set(table: str, one: Set, number: int) -> Request:
    """`number` is its own in the transaction."""
    kind = length = 0
    for part in one.key:
        of, size = TYPES[part]
        kind = kind << 6 | of
        length += size + 3 & ~3 if len(one.key) > 1 else size
    flags = (_MAP if one.is_map else 0) | (_INTERVAL if one.interval else 0)
    body = text(1, table) + text(2, one.name) + _be32(3, flags) + _be32(4, kind)
    body += _be32(5, length)
    if one.is_map:
        body += _be32(6, _VERDICT_TYPE) + _be32(7, 16)
    body += _be32(10, number)
    notes = _HOST_ORDER if one.key == ("ifname",) else b""  # so that nft can list it
    if one.comment:
        notes += _comment(_COMMENT_OF_SET, one.comment)
    if notes:
        body += attribute(13, notes)
    return _message(NEWSET, NLM_F_CREATE, body, f"create the nft set {one.name}")


def delete_set(table: str, name: str) -> Request:
    body = text(1, table) + text(2, name)
    return _message(DELSET, 0, body, f"delete the nft set {name}")


def list_sets(table: str) -> Request:
    return _message(GETSET, 0, text(1, table), f"list the sets of the nft table {table}")


def set_seen(body: bytes) -> tuple[str, str]:
    """The table and the name of a listed set."""
    have = dict(attributes(body[4:]))
    return _name(have.get(1)), _name(have.get(2))


def add_elements(table: str, name: str, elements: Elements) -> list[Request]:
    """An element that is there already is fine if it leads to the same."""
    items = _items(elements, with_data=True)
    return _elements(NEWSETELEM, NLM_F_CREATE, table, name, items, f"add to the nft set {name}")


def remove_elements(table: str, name: str, keys: Iterable[Key]) -> list[Request]:
    """One that is not there fails the transaction."""
    items = _items(dict.fromkeys(keys), with_data=False)
    return _elements(DELSETELEM, 0, table, name, items, f"take out of the nft set {name}")


def get_element(table: str, name: str, key: bytes) -> Request:
    body = text(1, table) + text(2, name) + nested(3, _item(key))
    return _message(GETSETELEM, 0, body, f"look an element of the nft set {name} up")


def list_elements(table: str, name: str) -> Request:
    body = text(1, table) + text(2, name)
    return _message(GETSETELEM, 0, body, f"list the nft set {name}")


def elements_seen(bodies: Iterable[bytes], interval: bool) -> dict[Key, Optional[Verdict]]:
    """What `add_elements` has written, from the answers to `list_elements`."""
    listed: list[tuple[bytes, bool, Optional[Verdict]]] = []
    for body in bodies:
        for kind, value in attributes(body[4:]):
            if kind == 3:
                listed += [_element_seen(item) for _unused, item in attributes(value)]
    if not interval:
        return {key: verdict for key, _unused, verdict in listed}
    return dict(_intervals_seen(listed))


def _element_seen(item: bytes) -> tuple[bytes, bool, Optional[Verdict]]:
    key, flags, verdict = b"", 0, None
    for kind, value in attributes(item):
        if kind == 1:
            key = next(inner for which, inner in attributes(value) if which == 1)
        elif kind == 2:
            verdict = _verdict_seen(value)
        elif kind == 3:
            (flags,) = struct.unpack("!I", value)
    return key, bool(flags & _INTERVAL_END), verdict


def _verdict_seen(data: bytes) -> Optional[Verdict]:
    have = dict(attributes(dict(attributes(data)).get(2, b"")))
    if 1 not in have:
        return None
    (code,) = struct.unpack("!i", have[1])
    name = next((name for name, number in _CODES.items() if number == code), str(code))
    return Verdict(name, _name(have.get(2)))


def _intervals_seen(
    listed: list[tuple[bytes, bool, Optional[Verdict]]],
) -> Iterator[tuple[Key, Optional[Verdict]]]:
    """At one value an interval may end and the next may begin."""
    first: Optional[bytes] = None
    leads_to: Optional[Verdict] = None
    size = len(listed[0][0]) if listed else 0
    for key, is_end, verdict in sorted(listed, key=lambda one: (one[0], not one[1])):
        if first is not None:
            yield (first, _before(key)), leads_to
            first = None
        if not is_end:
            first, leads_to = key, verdict
    if first is not None:
        yield (first, b"\xff" * size), leads_to


def _before(key: bytes) -> bytes:
    return (int.from_bytes(key, "big") - 1).to_bytes(len(key), "big")


def _items(elements: Elements, with_data: bool) -> Iterator[bytes]:
    keys: Iterable[Key] = elements
    if isinstance(next(iter(elements), None), tuple):  # then all of them are
        keys = sorted(elements)
    for key in keys:
        verdict = elements[key]
        data = _data(verdict) if with_data and verdict is not None else b""
        if isinstance(key, bytes):
            yield _item(key, data)
            continue
        first, last = key
        yield _item(first, data)
        if last != b"\xff" * len(last):
            end = (int.from_bytes(last, "big") + 1).to_bytes(len(last), "big")
            yield _item(end, _be32(3, _INTERVAL_END))


def _item(key: bytes, more: bytes = b"") -> bytes:
    return nested(1, nested(1, attribute(1, key)) + more)


@lru_cache(maxsize=4096)
def _head(table: str, name: str) -> bytes:
    return text(1, table) + text(2, name)


@lru_cache(maxsize=4096)
def _data(verdict: Verdict) -> bytes:
    return nested(2, _verdict(verdict))


def _verdict(verdict: Verdict) -> bytes:
    body = _be32(1, _CODES[verdict.code])
    if verdict.chain:
        body += text(2, verdict.chain)
    return nested(2, body)


def _elements(
    kind: int, flags: int, table: str, name: str, items: Iterable[bytes], what: str
) -> list[Request]:
    head = _head(table, name)
    requests, together, size = [], list[bytes](), 0
    for item in items:
        together.append(item)
        size += len(item)
        if size >= _ROOM:
            requests.append(_message(kind, flags, head + nested(3, *together), what))
            together, size = [], 0
    if together:
        requests.append(_message(kind, flags, head + nested(3, *together), what))
    return requests


# Counters


def new_counter(table: str, name: str) -> Request:
    body = text(1, table) + text(2, name) + _be32(3, _COUNTER)
    body += nested(4, _be64(1, 0), _be64(2, 0))
    return _message(NEWOBJ, NLM_F_CREATE, body, f"create the nft counter {name}")


def delete_counter(table: str, name: str) -> Request:
    body = text(1, table) + text(2, name) + _be32(3, _COUNTER)
    return _message(DELOBJ, 0, body, f"delete the nft counter {name}")


def list_counters(table: str) -> Request:
    body = text(1, table) + _be32(3, _COUNTER)
    return _message(GETOBJ, 0, body, f"list the counters of the nft table {table}")


def counter_seen(body: bytes) -> tuple[str, str, int]:
    """The table and the name of a listed counter, and its packets."""
    have = dict(attributes(body[4:]))
    counted = dict(attributes(have.get(4, b"")))
    (packets,) = struct.unpack("!Q", counted.get(2, bytes(8)))
    return _name(have.get(1)), _name(have.get(2)), packets


# Expressions, of which a rule consists

_ESTABLISHED_OR_RELATED = 2 | 4
_META = {"nfproto": (15, 1), "l4proto": (16, 1), "iifname": (6, 16), "oifname": (7, 16)}
_META["pkttype"] = 19, 1
_NFPROTO = {4: 2, 6: 10}
_FIELDS = {
    (4, "saddr"): (12, 4),
    (4, "daddr"): (16, 4),
    (6, "saddr"): (8, 16),
    (6, "daddr"): (24, 16),
}
_WORDS = 8  # the number of the first register of four bytes
_NETWORK, _TRANSPORT = 1, 2
_EQUAL, _AT_MOST, _AT_LEAST = 0, 3, 5


def _expression(name: str, *parts: bytes) -> bytes:
    return nested(1, text(1, name), nested(2, *parts))


def _load_meta(which: str) -> bytes:
    return _expression("meta", _be32(2, _META[which][0]), _be32(1, 1))


def _compare(value: bytes, how: int = _EQUAL) -> bytes:
    return _expression("cmp", _be32(1, 1), _be32(2, how), nested(3, attribute(1, value)))


def _load(base: int, offset: int, length: int, register: int = 1) -> bytes:
    where = _be32(1, register), _be32(2, base), _be32(3, offset), _be32(4, length)
    return _expression("payload", *where)


def _look_up(name: str, register: int = 1, inverted: bool = False) -> bytes:
    parts = [text(1, name), _be32(2, register)]
    return _expression("lookup", *parts, *([_be32(5, 1)] if inverted else []))


def _look_verdict_up(name: str) -> bytes:
    return _expression("lookup", text(1, name), _be32(2, 1), _be32(3, 0))


def verdict(which: Verdict) -> bytes:
    return _expression("immediate", _be32(1, 0), nested(2, _verdict(which)))


def meta_is(which: str, value: int) -> bytes:
    return _load_meta(which) + _compare(bytes([value]))


def link_not_in(which: str, name: str) -> bytes:
    """`which` is iifname or oifname."""
    return _load_meta(which) + _look_up(name, inverted=True)


def established() -> bytes:
    """Of a connection that was let pass, or an error about one."""
    mask = struct.pack("=I", _ESTABLISHED_OR_RELATED)
    masked = _be32(1, 1), _be32(2, 1), _be32(3, 4), nested(4, attribute(1, mask))
    return (
        _expression("ct", _be32(2, 0), _be32(1, 1))
        + _expression("bitwise", *masked, nested(5, attribute(1, bytes(4))))
        + _expression("cmp", _be32(1, 1), _be32(2, 1), nested(3, attribute(1, bytes(4))))
    )


def icmpv6_type(first: int, last: int) -> bytes:
    return (
        meta_is("l4proto", 58)
        + _load(_TRANSPORT, 0, 1)
        + _compare(bytes([first]), _AT_LEAST)
        + _compare(bytes([last]), _AT_MOST)
    )


def neighbour_discovery(first: int, last: int) -> bytes:
    """ICMPv6 of these types from a neighbour: a router would have lowered the hop limit."""
    from_the_link = meta_is("nfproto", _NFPROTO[6]) + _load(_NETWORK, 7, 1) + _compare(b"\xff")
    return from_the_link + icmpv6_type(first, last)


def to_a_group(version: int) -> bytes:
    """Multicast and broadcast, by the address."""
    first, how = (b"\xe0\0\0\0", _AT_LEAST) if version == 4 else (b"\xff", _EQUAL)
    offset, _length = _FIELDS[version, "daddr"]
    where = _load(_NETWORK, offset, len(first))
    return meta_is("nfproto", _NFPROTO[version]) + where + _compare(first, how)


def address_in(version: int, field: str, name: str) -> bytes:
    """`field` is saddr or daddr."""
    where = _load(_NETWORK, *_FIELDS[version, field])
    return meta_is("nfproto", _NFPROTO[version]) + where + _look_up(name)


def address_verdict(version: int, field: str, name: str) -> bytes:
    where = _load(_NETWORK, *_FIELDS[version, field])
    return meta_is("nfproto", _NFPROTO[version]) + where + _look_verdict_up(name)


def both_addresses_in(version: int, name: str) -> bytes:
    offset, length = _FIELDS[version, "saddr"]
    second = _FIELDS[version, "daddr"]
    return (
        meta_is("nfproto", _NFPROTO[version])
        + _load(_NETWORK, offset, length, _WORDS)
        + _load(_NETWORK, *second, _WORDS + length // 4)
        + _look_up(name, _WORDS)
    )


def port_verdict(protocol: int, name: str) -> bytes:
    return meta_is("l4proto", protocol) + _load(_TRANSPORT, 2, 2) + _look_verdict_up(name)


def count(name: str) -> bytes:
    return _expression("objref", _be32(1, _COUNTER), text(2, name))


def limit(packets: int) -> bytes:
    """At most so many in a second."""
    return _expression("limit", _be64(1, packets), _be64(2, 1), _be32(3, 5), _be32(4, 0))


def log(prefix: str) -> bytes:
    return _expression("log", text(2, prefix))
