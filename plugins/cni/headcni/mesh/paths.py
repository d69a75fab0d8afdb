"""The path to each peer that has pods: as tailscaled's status shows it, and by its own ping."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, Callable, NamedTuple, Optional

from ..errors import IO_FAILURE, CniError
from ..shared import paths
from ..shared.paths import Path
from .localapi import LocalApi

ANSWER_SECONDS = 2.0  # a scrape and `headcnictl status` wait for this
PING_SECONDS = 2.0
PINGS_AT_ONCE = 16
MOST_PINGS = 128
CONFIRMING_SECONDS = 1.5  # a scrape and `headcnictl status` wait for this too
MOST_CONFIRMED = 64  # all of them at once
KEPT_SECONDS = 10.0

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)\Z")


class PeerPath(NamedTuple):
    """A peer, or this node itself, and the path to it. Times are seconds since 1970; 0 is never."""

    id: str
    name: str
    addresses: tuple[str, ...]
    online: bool
    path: Path
    handshake: float
    received: int
    sent: int
    key_expires: float = 0.0


class Paths(NamedTuple):
    """What tailscaled says. `key_expires` is 0 if this node's key does not expire."""

    peers: tuple[PeerPath, ...]
    key_expires: float = 0.0
    problem: str = ""

    def counts(self) -> dict[str, int]:
        found = dict.fromkeys(paths.KINDS, 0)
        for peer in self.peers:
            found[peer.path.kind] += 1
        return found


def read(api: LocalApi, only: Optional[Collection[str]] = None) -> Paths:
    """The paths to all peers, or only to those with these ids."""
    now = time.time()
    found = api.read("paths", "status?peers=true", lambda one: _reduced(one, now))
    me = found.get("Self")
    peers = [one for one in (found.get("Peer") or {}).values() if isinstance(one, PeerPath)]
    return Paths(
        tuple(sorted(peer for peer in peers if only is None or peer.id in only)),
        me.key_expires if isinstance(me, PeerPath) else 0.0,
    )


def pinged(api: LocalApi, peers: Iterable[PeerPath]) -> tuple[PeerPath, ...]:
    """The same peers with what tailscaled's ping found: the latency, and the path of those that had
    none. Asks at most MOST_PINGS of them."""
    every = tuple(peers)
    asked = [peer for peer in every if peer.addresses][:MOST_PINGS]
    return _with_answers(every, _ping(api, asked, PING_SECONDS, PINGS_AT_ONCE))


def confirmed(
    api: LocalApi, peers: Iterable[PeerPath], before: Iterable[PeerPath] = ()
) -> tuple[PeerPath, ...]:
    """The same peers; those whose path may be a DERP region with what tailscaled's ping found,
    because its status names a region whether the peer answers there or not. A peer to which nothing
    was sent since `before` keeps that path: a ping would keep it active. Asks at most
    MOST_CONFIRMED of them."""
    every = tuple(peers)
    earlier = {
        (peer.id, peer.sent): peer.path
        for peer in before
        if peer.path.kind in (paths.DERP, paths.NONE)
    }
    doubtful = [peer for peer in every if peer.path.kind == paths.DERP and peer.addresses]
    known = {
        peer.id: peer._replace(path=earlier[peer.id, peer.sent])
        for peer in doubtful
        if (peer.id, peer.sent) in earlier
    }
    asked = [peer for peer in doubtful if peer.id not in known][:MOST_CONFIRMED]
    if asked:
        known.update(_ping(api, asked, CONFIRMING_SECONDS, MOST_CONFIRMED))
    return _with_answers(every, known)


def _with_answers(
    peers: Iterable[PeerPath], answers: Mapping[str, PeerPath]
) -> tuple[PeerPath, ...]:
    return tuple(answers.get(peer.id, peer) for peer in peers)


def _ping(
    api: LocalApi, peers: Collection[PeerPath], seconds: float, at_once: int
) -> dict[str, PeerPath]:
    """The peers by id, with the path of the ping's answer."""
    from concurrent.futures import ThreadPoolExecutor  # slow to import; mostly nobody pings

    client = LocalApi(api.socket_path, seconds)
    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip((peer.id for peer in peers), pool.map(_pinger(client), peers)))


def _pinger(api: LocalApi) -> Callable[[PeerPath], PeerPath]:
    def ping(peer: PeerPath) -> PeerPath:
        try:
            found = paths.of_ping(api.ping(peer.addresses[0]))
        except CniError:
            found = Path(paths.NONE)
        return peer._replace(path=found)

    return ping


class Watched:
    """The paths for metrics and the daemon's status: read when somebody asks, at most every
    KEPT_SECONDS."""

    def __init__(self, api: LocalApi, serving: Callable[[], Collection[str]]) -> None:
        """`serving` returns the ids of the peers that have pods."""
        self._api = LocalApi(api.socket_path, ANSWER_SECONDS, api.timed)
        self._serving = serving
        self._lock = threading.Lock()
        self._read_at = -KEPT_SECONDS
        self._found = Paths(())

    def now(self) -> Paths:
        with self._lock:
            if time.monotonic() - self._read_at >= KEPT_SECONDS:
                try:
                    found = read(self._api, self._serving())
                    peers = confirmed(self._api, found.peers, self._found.peers)
                    self._found = found._replace(peers=peers)
                except CniError as problem:
                    self._found = Paths((), 0.0, str(problem))
                self._read_at = time.monotonic()
            return self._found

    def counts(self) -> dict[tuple[str, ...], float]:
        """For the metric, which is left out while tailscaled does not answer."""
        found = self.now()
        if found.problem:
            raise CniError(IO_FAILURE, found.problem)
        return {(kind,): float(count) for kind, count in found.counts().items()}


def _reduced(found: dict[str, Any], now: float) -> Any:
    """The description of a peer, or of this node, reduced as soon as it has been decoded."""
    if "PublicKey" not in found or "TailscaleIPs" not in found:
        return found
    handshake = seconds(found.get("LastHandshake"))
    return PeerPath(
        id=str(found.get("ID") or found["PublicKey"]),
        name=str(found.get("DNSName") or "").partition(".")[0] or str(found.get("HostName") or ""),
        addresses=tuple(map(str, found["TailscaleIPs"] or ())),
        online=bool(found.get("Online")),
        path=paths.of_status(found, now - handshake if handshake else None),
        handshake=handshake,
        received=int(found.get("RxBytes") or 0),
        sent=int(found.get("TxBytes") or 0),
        key_expires=seconds(found.get("KeyExpiry")),
    )


def seconds(text: object) -> float:
    """A time as Go writes it, in seconds since 1970; 0 for the year 1, which means never."""
    matched = _TIME.match(str(text or ""))
    if matched is None:
        return 0.0
    offset = "+00:00" if matched[2] == "Z" else matched[2]
    return max(0.0, datetime.fromisoformat(matched[1] + offset).timestamp())
