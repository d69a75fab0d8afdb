# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The path that tailscaled uses to a peer: direct, through a relay, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# `idle`: nothing was sent lately, so tailscaled keeps no path. `none`: the peer does not answer.
DIRECT, PEER_RELAY, DERP, IDLE, NONE = "direct", "peer-relay", "derp", "idle", "none"
KINDS = (DIRECT, PEER_RELAY, DERP, IDLE, NONE)
RELAYED = (PEER_RELAY, DERP)
HANDSHAKE_SECONDS = 190.0  # WireGuard ends a session that is older than 180 s


class Path(NamedTuple):
    """`through` is the peer's endpoint, the relay's address or the code of the DERP region."""

    kind: str
    through: str = ""
    latency_ms: float | None = None

    @property
    def in_words(self) -> str:
        if self.kind == DERP:
            return f"DERP region {self.through}" if self.through else "DERP"
        return f"peer relay {self.through}" if self.kind == PEER_RELAY else self.through


def of_ping(answer: Mapping[str, Any]) -> Path:
    """The path that the answer to tailscaled's own ping took."""
    latency = answer.get("LatencySeconds")
    latency_ms = round(latency * 1000, 1) if isinstance(latency, (int, float)) else None
    if answer.get("Endpoint"):
        return Path(DIRECT, str(answer["Endpoint"]), latency_ms)
    if answer.get("PeerRelay"):
        return Path(PEER_RELAY, str(answer["PeerRelay"]), latency_ms)
    if answer.get("DERPRegionID"):
        code, number = str(answer.get("DERPRegionCode") or ""), answer["DERPRegionID"]
        return Path(DERP, f"{code} ({number})" if code else str(number), latency_ms)
    return Path(NONE)


def of_status(peer: Mapping[str, Any], handshake_age: float | None) -> Path:
    """The path in use, from tailscaled's status of a peer. `handshake_age` is None if there was
    never a handshake.

    tailscaled names a direct path or a peer relay only while the peer answers there. It names a
    peer's DERP region whether anything arrives there or not, so the age of the handshake decides.
    """
    if peer.get("CurAddr"):
        return Path(DIRECT, str(peer["CurAddr"]))
    if peer.get("PeerRelay"):
        return Path(PEER_RELAY, str(peer["PeerRelay"]))
    if peer.get("Active"):
        alive = handshake_age is not None and handshake_age < HANDSHAKE_SECONDS
        return Path(DERP, str(peer["Relay"])) if alive and peer.get("Relay") else Path(NONE)
    return Path(IDLE) if peer.get("Online") else Path(NONE)
