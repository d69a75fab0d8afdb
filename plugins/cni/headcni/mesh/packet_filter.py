"""What Headscale's policy lets into this node, as tailscaled applies it.

tailscaled drops what arrives and no rule allows. It applies only the rules for what this node
receives, so whether another node accepts a packet is known only there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..model import Network
from .localapi import LocalApi
from .prefix import Prefix

MOST_RULES = 100_000


ICMP, TCP, UDP, ICMP6 = "icmp", "tcp", "udp", "ipv6-icmp"
_NAMES = {"1": ICMP, "6": TCP, "17": UDP, "58": ICMP6}


class Allowed(NamedTuple):
    """A rule. Destinations are prefixes, each with a range of ports."""

    sources: tuple[str, ...]
    destinations: tuple[tuple[str, int, int], ...]
    protocols: tuple[str, ...]


def read(api: LocalApi) -> tuple[Allowed, ...]:
    """Needs root."""
    found = api.read_list("packet-filter", "debug-packet-filter-matches")
    return tuple(_rule(rule) for rule in found[:MOST_RULES] if isinstance(rule, dict))


def _rule(found: dict[str, Any]) -> Allowed:
    return Allowed(
        tuple(map(str, found.get("Srcs") or ())),
        tuple(
            (str(one.get("Net")), int(ports.get("First", 0)), int(ports.get("Last", 65535)))
            for one in found.get("Dsts") or ()
            for ports in [one.get("Ports") or {}]
        ),
        tuple(_NAMES.get(str(one), str(one)) for one in found.get("IPProto") or ()),
    )


def allows(
    rules: Iterable[Allowed], src: Network, dst: Network, protocol: str = TCP, port: int = 0
) -> bool:
    """Whether all packets of a protocol from one range to another pass. A port of 0 stands for any
    port that is allowed."""
    return any(
        protocol in rule.protocols
        and any(_covers(prefix, src) for prefix in rule.sources)
        and any(
            _covers(prefix, dst) and (not port or low <= port <= high)
            for prefix, low, high in rule.destinations
        )
        for rule in rules
    )


def leads_to(rules: Iterable[Allowed], dst: Network) -> bool:
    """Whether any rule lets anybody in to a range."""
    return any(_covers(prefix, dst) for rule in rules for prefix, _low, _high in rule.destinations)


def _covers(prefix: str, network: Network) -> bool:
    try:
        return Prefix.parse(prefix).covers(Prefix.parse(str(network)))
    except (OSError, ValueError):
        return False
