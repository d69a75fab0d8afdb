# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Measure the paths to other nodes by tailscaled's own ping: kind, latency and loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, NamedTuple

from . import pair_choice
from .shared import paths
from .shared.localapi import LocalAPIError

ALL_UP_TO = 50  # nodes; a node with more others measures a sample of them
PINGS = 5
MORE_PINGS = 10  # while the path is relayed: it often begins so and becomes direct
PAUSE_SECONDS = 0.4
AT_ONCE = 32
SECONDS = 25.0  # for all peers

Ping = Callable[[str], Mapping[str, Any]]


class Peer(NamedTuple):
    name: str
    address: str


def mesh_peers(status: Mapping[str, Any]) -> list[Peer]:
    """The peers that are nodes, as tailscaled's status tells: those with a tag of this node, or
    with a route. Others, such as a user's phone, are left out."""
    own = set((status.get("Self") or {}).get("Tags") or ())
    found = []
    for peer in (status.get("Peer") or {}).values():
        addresses = peer.get("TailscaleIPs") or ()
        is_node = own.intersection(peer.get("Tags") or ()) or peer.get("PrimaryRoutes")
        if addresses and is_node:
            found.append(Peer(name_of(peer), str(addresses[0])))
    return sorted(found)


def name_of(peer: Mapping[str, Any]) -> str:
    return str(peer.get("DNSName") or "").partition(".")[0] or str(peer.get("HostName") or "")


def choice(me: Peer, peers: Sequence[Peer]) -> list[Peer]:
    """The peers to measure. All nodes choose from the same list, so the sample has each of its
    pairs in both directions."""
    every = sorted({me, *peers})
    by_address = {peer.address: peer for peer in every}
    addresses = [peer.address for peer in every]
    others = pair_choice.chosen(addresses, every=len(every) <= ALL_UP_TO)[me.address]
    return [by_address[address] for address in others]


def measured(
    ping: Ping, peers: Sequence[Peer], pause: float = PAUSE_SECONDS
) -> list[dict[str, Any]]:
    """A peer for which no time was left has `sent` 0."""
    until = time.monotonic() + SECONDS
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda peer: _one(ping, peer, until, pause), peers))


def _one(ping: Ping, peer: Peer, until: float, pause: float) -> dict[str, Any]:
    sent, path, taken = 0, paths.Path(paths.NONE), []
    while time.monotonic() < until:
        if sent >= (MORE_PINGS if path.kind in paths.RELAYED else PINGS):
            break
        if sent:
            time.sleep(pause)
        sent += 1
        answer = _answer(ping, peer.address)
        if answer is not None:
            path = answer
            taken.append(answer.latency_ms)
    known = [latency for latency in taken if latency is not None]
    return {
        "name": peer.name,
        "address": peer.address,
        "path": path.kind,
        "through": path.in_words,
        "sent": sent,
        "lost": sent - len(taken),
        "latency_ms": round(median(known), 1) if known else None,
    }


def _answer(ping: Ping, address: str) -> paths.Path | None:
    try:
        found = paths.of_ping(ping(address))
    except LocalAPIError:
        return None
    return found if found.kind != paths.NONE else None
