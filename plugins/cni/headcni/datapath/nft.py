"""nftables: libnftables in this process to change rules; netlink to ask whose a table is and to
change elements of its maps, for which libnftables would read the whole ruleset first."""

from __future__ import annotations

import struct
from _thread import allocate_lock
from collections.abc import Iterable, Sequence
from ipaddress import ip_address, ip_network, summarize_address_range

from ..errors import KERNEL, KERNEL_LACKS, CniError
from ..record import TYPE_CHECKING, NamedTuple
from .netlink import (
    NETLINK_NETFILTER,
    NLM_F_CREATE,
    KernelError,
    Netlink,
    Request,
    attribute,
    attributes,
    nested,
    netfilter,
    text,
)

if TYPE_CHECKING:
    from typing import Any, Optional, Union

POLICIES = "headcni-policy"  # the table of network policies
LIBRARY = "libnftables.so.1"
NFNL_SUBSYS_NFTABLES = 10
NFT_MSG_GETTABLE, NFT_MSG_NEWSETELEM, NFT_MSG_DELSETELEM = 1, 12, 14
NFPROTO_INET = 1
NFTA_TABLE_NAME, NFTA_TABLE_USERDATA = 1, 6
NFTA_SET_ELEM_LIST_TABLE, NFTA_SET_ELEM_LIST_SET, NFTA_SET_ELEM_LIST_ELEMENTS = 1, 2, 3
NFTA_LIST_ELEM, NFTA_SET_ELEM_KEY, NFTA_SET_ELEM_DATA, NFTA_DATA_VALUE = 1, 1, 2, 1
ELEMENTS_AT_ONCE = 200  # in one message, whose attributes hold 64 KiB at the most
UDATA_COMMENT = 0
OUTPUT_JSON, OUTPUT_NUMERIC_PROTO = 1 << 4, 1 << 7
# Shown by number, since a node without /etc/protocols could not show them otherwise.
PROTOCOLS = {6: "tcp", 17: "udp", 132: "sctp"}
_GENERAL = struct.pack("=BBH", NFPROTO_INET, 0, 0)  # what each message begins with

_lock = allocate_lock()  # libnftables keeps state of its own between calls
_context: Optional[tuple[Any, Any]] = None


def run(commands: str) -> None:
    """All of the commands in one transaction: the kernel takes them all or none."""
    with _lock:
        library, context = _open()
        if library.nft_run_cmd_from_buffer(context, commands.encode()) != 0:
            said = library.nft_ctx_get_error_buffer(context).decode(errors="replace")
            raise CniError(KERNEL, "nftables refused a change", " ".join(said.split())[:500])


class Element(NamedTuple):
    """Of a map. Key and value are as the kernel has them: each part of a concatenation in words
    of four bytes."""

    map: str
    key: bytes
    value: bytes


def words(*parts: bytes) -> bytes:
    """A concatenation."""
    return b"".join(part + b"\0" * (-len(part) % 4) for part in parts)


def add_elements(table: str, elements: Sequence[Element]) -> None:
    """All of them or none; one that is there already with another value is refused."""
    _change(NFT_MSG_NEWSETELEM, table, elements, "add")


def delete_elements(table: str, elements: Sequence[Element]) -> None:
    """All of them or none; one that is not there is refused."""
    _change(NFT_MSG_DELSETELEM, table, elements, "delete")


def _change(message: int, table: str, elements: Sequence[Element], verb: str) -> None:
    requests = []
    for name in dict.fromkeys(one.map for one in elements):
        items = [_item(one, message) for one in elements if one.map == name]
        for start in range(0, len(items), ELEMENTS_AT_ONCE):
            body = (
                _GENERAL
                + text(NFTA_SET_ELEM_LIST_TABLE, table)
                + text(NFTA_SET_ELEM_LIST_SET, name)
                + nested(NFTA_SET_ELEM_LIST_ELEMENTS, *items[start : start + ELEMENTS_AT_ONCE])
            )
            kind = NFNL_SUBSYS_NFTABLES << 8 | message
            flags = NLM_F_CREATE if message == NFT_MSG_NEWSETELEM else 0
            requests.append(Request(kind, flags, body, f"{verb} elements of {name}"))
    with netfilter() as kernel:
        kernel.commit(NFNL_SUBSYS_NFTABLES, requests)


def _item(element: Element, message: int) -> bytes:
    parts = [nested(NFTA_SET_ELEM_KEY, attribute(NFTA_DATA_VALUE, element.key))]
    if message == NFT_MSG_NEWSETELEM:
        parts.append(nested(NFTA_SET_ELEM_DATA, attribute(NFTA_DATA_VALUE, element.value)))
    return nested(NFTA_LIST_ELEM, *parts)


class Contents(NamedTuple):
    """What a table holds: its rules as (chain, comment), the ranges in its sets, and (map, key) →
    value of its maps, spelt as `add element` would take them."""

    rules: tuple[tuple[str, str], ...]
    sets: dict[str, tuple[str, ...]]
    elements: dict[tuple[str, str], str]


NOTHING = Contents((), {}, {})


def contents(table: str) -> Contents:
    """Of an inet table; nothing if there is none."""
    with _lock:
        library, context = _open()
        library.nft_ctx_output_set_flags(context, OUTPUT_JSON | OUTPUT_NUMERIC_PROTO)
        try:
            found = library.nft_run_cmd_from_buffer(context, f"list table inet {table}".encode())
            listed = library.nft_ctx_get_output_buffer(context) if found == 0 else b"{}"
        finally:
            library.nft_ctx_output_set_flags(context, 0)
    return _contents(listed)


def contents_here(table: str) -> Contents:
    """The same, in the network namespace that the calling thread is in."""
    return _contents(run_here(f"list table inet {table}", as_json=True))


def _contents(listed: Union[str, bytes]) -> Contents:
    import json

    rules, sets, elements = [], {}, {}
    for item in json.loads(listed).get("nftables", ()):
        for kind, held in item.items():
            if kind == "rule":
                rules.append((held["chain"], held.get("comment", "")))
            elif kind == "set":
                sets[held["name"]] = ranges(map(_range, held.get("elem", ())))
            elif kind == "map":
                for key, value in held.get("elem", ()):
                    elements[held["name"], _key(key)] = str(value)
    return Contents(tuple(rules), sets, elements)


def _key(listed: Any) -> str:
    protocol, *rest = listed["concat"]
    return " . ".join(map(str, [PROTOCOLS.get(protocol, protocol), *rest]))


def _range(listed: Any) -> str:
    """An address, a prefix or a range, as JSON has it, in the notation of `add element`."""
    if isinstance(listed, dict) and "elem" in listed:  # it has a comment or a timeout
        listed = listed["elem"]["val"]
    if isinstance(listed, str):
        return listed
    if "prefix" in listed:
        return f"{listed['prefix']['addr']}/{listed['prefix']['len']}"
    return "-".join(listed["range"])


def ranges(listed: Iterable[str]) -> tuple[str, ...]:
    """Ranges of addresses in one order and notation, with neighbours merged as auto-merge does."""
    found: list[tuple[Any, Any]] = []
    for first, last in sorted(map(_ends, listed)):
        if found and int(first) <= int(found[-1][1]) + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(f"{first}-{last}" for first, last in found)


def networks(listed: Iterable[str]) -> list[str]:
    """Ranges of addresses as prefixes."""
    ends = map(_ends, listed)
    return [str(one) for first, last in ends for one in summarize_address_range(first, last)]


def _ends(text: str) -> tuple[Any, Any]:
    first, dash, last = text.partition("-")
    if dash:
        return ip_address(first), ip_address(last)
    network = ip_network(text)
    return network[0], network[-1]


def _open() -> tuple[Any, Any]:
    global _context
    if _context is None:
        library = _load()
        _context = (library, _new_context(library))
    return _context


def _load() -> Any:
    import ctypes  # an ordinary ADD changes no rules

    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        raise CniError(
            KERNEL_LACKS,
            f"{LIBRARY} is not on this node, and masquerading and host ports need it",
            "install the package nftables",
        ) from None
    library.nft_ctx_new.restype = ctypes.c_void_p
    library.nft_ctx_get_error_buffer.restype = ctypes.c_char_p
    library.nft_ctx_get_output_buffer.restype = ctypes.c_char_p
    for name in ("get_error_buffer", "get_output_buffer", "buffer_error", "buffer_output", "free"):
        getattr(library, f"nft_ctx_{name}").argtypes = [ctypes.c_void_p]
    library.nft_ctx_output_set_flags.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    return library


def _new_context(library: Any) -> Any:
    context = library.nft_ctx_new(0)
    library.nft_ctx_buffer_error(context)
    library.nft_ctx_buffer_output(context)
    return context


def table_comment(name: str, here_only: bool = False) -> Optional[str]:
    """The comment of an inet table; None if there is no such table. With `here_only` the socket is
    not kept: one that is kept would keep a network namespace that is to end."""
    kind = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETTABLE
    body = _GENERAL + text(NFTA_TABLE_NAME, name)
    try:
        with Netlink(NETLINK_NETFILTER) if here_only else netfilter() as kernel:
            answer = kernel.ask(Request(kind, 0, body, f"look at the nft table {name}"))
    except (KernelError, OSError) as problem:
        raise CniError(
            KERNEL_LACKS, "this kernel has no nftables", f"{problem}; HeadCNI needs nf_tables"
        ) from problem
    if answer is None:
        return None
    for which, value in attributes(answer[4:]):
        if which == NFTA_TABLE_USERDATA and value[:1] == bytes([UDATA_COMMENT]):
            return value[2 : 2 + value[1]].rstrip(b"\0").decode(errors="replace")
    return ""


def run_here(commands: str, as_json: bool = False) -> str:
    """Like `run`, in the network namespace that the calling thread is in, with nft's answer.

    A context's socket stays in the namespace that it was opened in, so this has one of its own.
    """
    with _lock:
        library = _load()
        context = _new_context(library)
        try:
            if as_json:
                library.nft_ctx_output_set_flags(context, OUTPUT_JSON | OUTPUT_NUMERIC_PROTO)
            if library.nft_run_cmd_from_buffer(context, commands.encode()) != 0:
                said = library.nft_ctx_get_error_buffer(context).decode(errors="replace")
                raise CniError(KERNEL, "nftables refused a change", " ".join(said.split())[:500])
            answer: bytes = library.nft_ctx_get_output_buffer(context)
            return answer.decode(errors="replace")
        finally:
            library.nft_ctx_free(context)
