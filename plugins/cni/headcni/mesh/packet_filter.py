"""What Headscale's policy lets into this node, as tailscaled applies it.

tailscaled drops what arrives and no rule allows. It applies only the rules for what this node
receives, so whether another node accepts a packet is known only there.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from ..model import Network
from .localapi import LocalApi
from .prefix import Prefix

MOST_RULES = 100_000


ICMP, TCP, UDP, ICMP6 = "icmp", "tcp", "udp", "ipv6-icmp"
_NAMES = {"1": ICMP, "6": TCP, "17": UDP, "58": ICMP6}


class Prefixes:
    """Prefixes by their length: a rule of a large tailnet has one for each address of each node,
    and the daemon asks for many networks every minute."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._known: dict[tuple[int, int], set[Prefix]] = {}
        for text in texts:
            with suppress(OSError, ValueError):
                prefix = Prefix.parse(text)
                if not 0 <= prefix.length <= len(prefix.address) * 8:
                    continue
                known = self._known.setdefault((prefix.family, prefix.length), set())
                known.add(prefix.shortened(prefix.length))

    def cover(self, network: Network) -> bool:
        wanted = Prefix.parse(str(network))
        return any(
            wanted.shortened(length) in known
            for (family, length), known in self._known.items()
            if family == wanted.family and length <= wanted.length
        )


class Allowed(NamedTuple):
    """A rule. Destinations are prefixes, each with a range of ports."""

    sources: Prefixes
    destinations: tuple[tuple[str, int, int], ...]
    protocols: tuple[str, ...]


def read(api: LocalApi) -> tuple[Allowed, ...]:
    """Needs root."""
    found = api.read_list("packet-filter", "debug-packet-filter-matches")
    sources: dict[tuple[str, ...], Prefixes] = {}  # most rules have the sources of another one
    return tuple(_rule(rule, sources) for rule in found[:MOST_RULES] if isinstance(rule, dict))


def _rule(found: dict[str, Any], sources: dict[tuple[str, ...], Prefixes]) -> Allowed:
    texts = tuple(map(str, found.get("Srcs") or ()))
    if texts not in sources:
        sources[texts] = Prefixes(texts)
    return Allowed(
        sources[texts],
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
        and any(
            _covers(prefix, dst) and (not port or low <= port <= high)
            for prefix, low, high in rule.destinations
        )
        and rule.sources.cover(src)
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
