"""``headcnictl ipam``: a picture of this node's pools, and who has which address."""

from __future__ import annotations

import argparse
import json
import sqlite3
import time
from contextlib import suppress
from ipaddress import ip_address, ip_interface, ip_network
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from .. import repair
from ..errors import CniError
from ..ipam.config import ANNOTATIONS, IP_ANNOTATION
from ..ipam.space import FREE, USABLE
from ..model import Address
from ..shared.node_status import span
from ..store import Store
from . import node
from .main import NO, OK, CannotTell, show
from .terminal import BAD, DOUBTFUL, FAINT, GOOD, paint, table, wrapped

# From the most important kind on: a mark that stands for several addresses shows that one.
LEAKED, HELD, UNATTACHED = "leaked", "held-back", "unattached"
STATIC, LEASED, LEAVING = "static", "leased", "leaving"
MARKS = {LEAKED: "!", HELD: "?", UNATTACHED: "o", STATIC: "S", LEASED: "#", LEAVING: "-"}
FREE_MARK = "."
COLOURS = {
    LEAKED: BAD,
    HELD: DOUBTFUL,
    UNATTACHED: DOUBTFUL,
    STATIC: GOOD,
    LEASED: GOOD,
    LEAVING: FAINT,
}
MEANINGS = {
    LEAKED: "leaked: the pod's network namespace is gone",
    HELD: "held back: in use by something else",
    UNATTACHED: "held, but by no pod of HeadCNI",
    STATIC: "asked for by the pod",
    LEASED: "in use",
    LEAVING: "of a deleted pod, until its link is gone",
}
CELLS, WIDTH = 512, 64  # a pool's picture has at most so many cells, in lines of this width
MOST_LISTED = 200
YOUNG_SECONDS = 60.0  # an ADD or a DEL may still be at work


class Held(NamedTuple):
    address: int
    kind: str
    pod: str
    network: str
    container: str
    created: float


class Pool(NamedTuple):
    """A range of a network. Addresses are numbers; both ends of an interval belong to it."""

    network: str
    subnet: str
    first: int
    last: int
    usable: Tuple[Tuple[int, int], ...]
    free: Tuple[Tuple[int, int], ...]
    width: int  # bytes of an address


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)
    parser.add_argument("--list", action="store_true", help="also list who has which address")


def run(args: argparse.Namespace) -> int:
    config = node.load(args)
    try:
        with Store.in_directory(config.daemon.data_dir) as store:
            pools, held = store.read(lambda db: (_pools(db), _held(db)))
    except CniError as problem:
        raise CannotTell(str(problem)) from None
    answer = [_as_dict(pool, held) for pool in pools]
    leaked = sum(pool["counts"][LEAKED] for pool in answer)
    if args.json:
        show({"pools": answer, "leaked": leaked}, as_json=True)
    elif not pools:
        show("no pod has had an address here since the node booted", as_json=False)
    else:
        parts = [_picture(pool, held, known) for pool, known in zip(pools, answer)]
        if args.list or leaked:
            parts += [_listed(pool, held, args.list) for pool in pools]
        if leaked:
            parts.append(
                wrapped(
                    "The daemon releases leaked addresses every ipam.gcInterval, and so does the "
                    "runtime's GC. Now: systemctl restart headcni-daemon"
                )
            )
        show("\n\n".join(filter(None, parts)), as_json=False)
    return NO if leaked else OK


def _pools(db: sqlite3.Connection) -> List[Pool]:
    found = []
    rows = db.execute(
        "SELECT id, network, subnet, first, last FROM pool ORDER BY network, set_index, range_index"
    ).fetchall()
    for id_, network, subnet, first, last in rows:
        spans: Dict[str, List[Tuple[int, int]]] = {USABLE: [], FREE: []}
        for kind, low, high in db.execute(
            "SELECT kind, first, last FROM span WHERE pool = ? ORDER BY last", (id_,)
        ):
            spans.setdefault(kind, []).append((_number(low), _number(high)))
        if spans[USABLE]:  # none before the first allocation of this boot
            found.append(
                Pool(
                    *(network, subnet, _number(first), _number(last)),
                    *(tuple(spans[USABLE]), tuple(spans[FREE]), len(first)),
                )
            )
    return found


def _held(db: sqlite3.Connection) -> List[Tuple[int, Held]]:
    """Everybody who holds an address, with the address's width."""
    attached: Dict[Tuple[str, str, str], Tuple[str, str]] = {
        (network, container, ifname): (netns, config)
        for network, container, ifname, netns, config in db.execute(
            "SELECT network, container_id, ifname, netns, config FROM attachment"
        )
    }
    buried = set(db.execute("SELECT network, container_id, ifname FROM tombstone"))
    found = []
    for packed, network, container, ifname, pod, created in db.execute(
        "SELECT address, network, container_id, ifname, pod, created FROM allocation"
    ):
        owner = (network, container, ifname)
        young = time.time() - created < YOUNG_SECONDS
        kind = LEAVING if owner in buried else _kind(attached.get(owner), young, packed)
        found.append((len(packed), Held(_number(packed), kind, pod, network, container, created)))
    for (packed,) in db.execute("SELECT address FROM conflict"):
        found.append((len(packed), Held(_number(packed), HELD, "", "", "", 0.0)))
    return found


def _kind(attached: Optional[Tuple[str, str]], young: bool, packed: bytes) -> str:
    if attached is None:
        return LEASED if young else UNATTACHED
    netns, config = attached
    if netns and not young and repair.is_dead(netns, None):
        return LEAKED
    return STATIC if ip_address(packed) in asked_for(config) else LEASED


def asked_for(config: str) -> Set[Address]:
    """The addresses that a pod's stored configuration names, by the annotation or by `ips`."""
    try:
        given = json.loads(config)
        runtime, args = given.get("runtimeConfig") or {}, (given.get("args") or {}).get("cni") or {}
        annotation = str((runtime.get(ANNOTATIONS) or {}).get(IP_ANNOTATION) or "")
        texts = [*(runtime.get("ips") or ()), *(args.get("ips") or ()), *annotation.split(",")]
    except (ValueError, AttributeError, TypeError):
        return set()  # the store was damaged
    found: Set[Address] = set()
    for text in texts:
        with suppress(ValueError):
            found.add(ip_interface(str(text).strip()).ip)
    return found


def _within(pool: Pool, held: List[Tuple[int, Held]]) -> List[Held]:
    return sorted(
        one for width, one in held if width == pool.width and pool.first <= one.address <= pool.last
    )


def _as_dict(pool: Pool, held: List[Tuple[int, Held]]) -> Dict[str, Any]:
    within = _within(pool, held)
    counts = {kind: sum(one.kind == kind for one in within) for kind in MARKS}
    return {
        "network": pool.network,
        "subnet": pool.subnet,
        "first": _text(pool, pool.first),
        "last": _text(pool, pool.last),
        "total": sum(last - first + 1 for first, last in pool.usable),
        "free": sum(last - first + 1 for first, last in pool.free),
        "counts": counts,
        "held": [
            {
                "address": _text(pool, one.address),
                "kind": one.kind,
                "pod": one.pod,
                "network": one.network,
                "container_id": one.container,
                "created": one.created,
            }
            for one in within
        ],
    }


def _picture(pool: Pool, held: List[Tuple[int, Held]], known: Dict[str, Any]) -> str:
    size = ip_network(pool.subnet).num_addresses
    start = int(ip_network(pool.subnet).network_address)
    each = -(-size // CELLS)
    kinds: Dict[int, str] = {}
    for one in _within(pool, held):
        cell = (one.address - start) // each
        kinds[cell] = min(kinds.get(cell, one.kind), one.kind, key=list(MARKS).index)
    cells = [
        paint(MARKS[kinds[cell]], COLOURS[kinds[cell]])
        if cell in kinds
        else _empty(pool, low, each)
        for cell, low in enumerate(range(start, start + size, each))
    ]
    lines = [
        f"network {pool.network}: {pool.subnet}, {known['total'] - known['free']} of "
        f"{_large(known['total'])} addresses in use"
    ]
    for at in range(0, len(cells), WIDTH):
        label = _text(pool, start + at * each)
        shown = label if len(label) <= 15 else f"+{at}"
        lines.append(f"{shown:>15} {''.join(cells[at : at + WIDTH])}")
    present = [kind for kind in MARKS if known["counts"][kind]]
    key = [f"{MARKS[kind]} {MEANINGS[kind]} ({known['counts'][kind]})" for kind in present]
    key.append(f"{FREE_MARK} free ({_large(known['free'])})")
    lines.append(wrapped(", ".join(key), " " * 16, " " * 16))
    if each > 1:
        lines.append(f"{'':16}a mark stands for {_large(each)} addresses")
    return "\n".join(lines)


def _empty(pool: Pool, low: int, each: int) -> str:
    """A blank for addresses that are given to nobody, such as the gateway's."""
    usable = any(first <= low + each - 1 and low <= last for first, last in pool.usable)
    return paint(FREE_MARK, FAINT) if usable else " "


def _listed(pool: Pool, held: List[Tuple[int, Held]], everybody: bool) -> str:
    shown = [one for one in _within(pool, held) if everybody or one.kind == LEAKED]
    if not shown:
        return ""
    rows = [
        (
            _text(pool, one.address),
            paint(one.kind, COLOURS[one.kind]),
            one.pod or "-",
            one.container[:12] or "-",
            f"{span(time.time() - one.created)} ago" if one.created else "-",
        )
        for one in shown[:MOST_LISTED]
    ]
    more = len(shown) - MOST_LISTED
    lines = [table(rows, ("ADDRESS", "STATE", "POD", "CONTAINER", "SINCE"))]
    return "\n".join([*lines, *([f"{more} more: --json has all"] if more > 0 else [])])


def _large(count: int) -> str:
    if count < 1 << 20:
        return str(count)
    power = count.bit_length() - 1
    return f"2^{power}" if count == 1 << power else f"about 2^{power}"


def _number(packed: bytes) -> int:
    return int.from_bytes(packed, "big")


def _text(pool: Pool, number: int) -> str:
    return str(ip_address(number.to_bytes(pool.width, "big")))
