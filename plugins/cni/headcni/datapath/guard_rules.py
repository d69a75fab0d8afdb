"""The rules that check what a pod sends. Whoever changes them raises guard.VERSION.

A rule that reads beyond the end of a packet does not match. Registers are filled in each rule: the
kernel does not let a rule use what another one has read.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import nft_messages as nft
from .netlink import Request

PRIORITY = -300  # before connection tracking, and before br_netfilter
LINK_PREFIX = b"hc"  # of the host's ends of all pods' links
_IPV4, _ARP, _IPV6 = b"\x08\x00", b"\x08\x06", b"\x86\xdd"
_ICMPV6 = b"\x3a"
_SOLICITATION, _ADVERTISEMENT = b"\x87", b"\x88"
_FROM_ROUTERS = b"\x86", b"\x89"  # router advertisement, redirect
_MULTICAST_REPORTS = b"\x83", b"\x84", b"\x8f"

# How nft shows a part of a key, and how many bytes it has there.
_IFNAME, _ETHER, _IP4, _IP6 = (41, 16), (9, 8), (7, 4), (8, 16)
_SETS = {
    "stations": (_IFNAME, _ETHER),
    "own4": (_IFNAME, _ETHER, _IP4),
    "own6": (_IFNAME, _ETHER, _IP6),
    "guarded": (_IFNAME,),
}

_HOST = nft.meta(nft.META_IIFNAME)
_MAC_AT, _ADDRESS_AT = nft.FIRST_REGISTER + 4, nft.FIRST_REGISTER + 6
_SOURCE_MAC = nft.payload(nft.LINK, 6, 6, _MAC_AT)
_REFUSED = (nft.counter(), nft.verdict(nft.DROP))
_ACCEPTED = (nft.verdict(nft.ACCEPT),)


def _is_kind(kind: bytes) -> tuple[bytes, ...]:
    """The frame's own type: of a tagged one, unlike meta protocol, that of the tag."""
    return nft.payload(nft.LINK, 12, 2), nft.equals(kind)


def _is_icmp(kind: bytes) -> tuple[bytes, ...]:
    return nft.payload(nft.TRANSPORT, 0, 1), nft.equals(kind)


def _option_is(kind: int, negated: bool = False) -> tuple[bytes, ...]:
    """The first option of neighbour discovery; a message without one does not match."""
    return nft.payload(nft.TRANSPORT, 24, 1), nft.equals(bytes([kind]), negated)


_FROM_NOWHERE = nft.payload(nft.NETWORK, 8, 16), nft.equals(bytes(16))
_SOURCE4 = nft.payload(nft.NETWORK, 12, 4, _ADDRESS_AT)
_SOURCE6 = nft.payload(nft.NETWORK, 8, 16, _ADDRESS_AT)
_ARP_MAC = nft.payload(nft.NETWORK, 8, 6, _MAC_AT)
_ARP_SENDER = nft.payload(nft.NETWORK, 14, 4, _ADDRESS_AT)
_ARP_PROBE = nft.payload(nft.NETWORK, 14, 4), nft.equals(bytes(4))
_OPTION_MAC = nft.payload(nft.TRANSPORT, 26, 6, _MAC_AT)
_TARGET = nft.payload(nft.TRANSPORT, 8, 16, _ADDRESS_AT)


def _rules() -> list[tuple[str, tuple[bytes, ...]]]:
    """Each with its chain, in order."""
    own = nft.within
    foreign = nft.within("own6", negated=True)
    is_icmpv6 = nft.meta(nft.META_L4PROTO), nft.equals(_ICMPV6)
    is_not_icmpv6 = nft.meta(nft.META_L4PROTO), nft.equals(_ICMPV6, negated=True)
    return [
        ("incoming", (_HOST, nft.equals(LINK_PREFIX, negated=True), *_ACCEPTED)),
        # Nearly all packets end here, after one look-up. Only links in `guarded` are in the sets.
        ("incoming", (*_is_kind(_IPV4), _HOST, _SOURCE_MAC, _SOURCE4, own("own4"), *_ACCEPTED)),
        (
            "incoming",
            (
                *(*_is_kind(_IPV6), *is_not_icmpv6),
                *(_HOST, _SOURCE_MAC, _SOURCE6, own("own6"), *_ACCEPTED),
            ),
        ),
        ("incoming", (_HOST, own("guarded"), nft.verdict(nft.GOTO, "pod"))),
        ("pod", (*_is_kind(_IPV6), nft.verdict(nft.GOTO, "ipv6"))),
        ("pod", (*_is_kind(_ARP), nft.verdict(nft.GOTO, "arp"))),
        ("pod", _REFUSED),
        ("ipv6", (*is_icmpv6, nft.verdict(nft.JUMP, "icmpv6"))),
        ("ipv6", (_HOST, _SOURCE_MAC, _SOURCE6, own("own6"), *_ACCEPTED)),
        ("ipv6", _REFUSED),
        # A pod is not a router for its neighbours.
        *(("icmpv6", (*_is_icmp(kind), *_REFUSED)) for kind in _FROM_ROUTERS),
        # An advertisement is about an address of the pod, and says the pod's MAC.
        (
            "icmpv6",
            (*_is_icmp(_ADVERTISEMENT), _HOST, _SOURCE_MAC, _TARGET, foreign, *_REFUSED),
        ),
        ("icmpv6", (*_is_icmp(_ADVERTISEMENT), *_option_is(2, negated=True), *_REFUSED)),
        (
            "icmpv6",
            (*_is_icmp(_ADVERTISEMENT), _OPTION_MAC, _HOST, _TARGET, foreign, *_REFUSED),
        ),
        # Duplicate address detection, and reports of groups: the pod has no address yet.
        (
            "icmpv6",
            (
                *(*_is_icmp(_SOLICITATION), *_FROM_NOWHERE),
                *(_HOST, _SOURCE_MAC, _TARGET, own("own6"), *_ACCEPTED),
            ),
        ),
        *(
            (
                "icmpv6",
                (*_is_icmp(kind), *_FROM_NOWHERE, _HOST, _SOURCE_MAC, own("stations"), *_ACCEPTED),
            )
            for kind in _MULTICAST_REPORTS
        ),
        # Whoever is asked learns the MAC that the question says.
        ("icmpv6", (*_is_icmp(_SOLICITATION), *_option_is(1, negated=True), *_REFUSED)),
        (
            "icmpv6",
            (
                *(*_is_icmp(_SOLICITATION), *_option_is(1)),
                *(_HOST, _OPTION_MAC, _SOURCE6, foreign, *_REFUSED),
            ),
        ),
        ("arp", (_HOST, _SOURCE_MAC, nft.within("stations", negated=True), *_REFUSED)),
        ("arp", (_HOST, _ARP_MAC, _ARP_SENDER, own("own4"), *_ACCEPTED)),
        ("arp", (*_ARP_PROBE, _HOST, _ARP_MAC, own("stations"), *_ACCEPTED)),
        ("arp", _REFUSED),
    ]


_CHAINS = ("incoming", "pod", "ipv6", "icmpv6", "arp")


RULES = _rules()
COUNT = len(RULES)


def structure(family: int, table: str, comment: str) -> Iterator[Request]:
    """A whole table, without any pods in it."""
    yield nft.new_table(family, table, comment)
    for number, (name, parts) in enumerate(_SETS.items(), 1):
        shown = 0
        for kind, _unused in parts:
            shown = shown << 6 | kind
        yield nft.new_set(family, table, name, number, shown, sum(size for _unused, size in parts))
    for name in _CHAINS:
        priority = PRIORITY if name == "incoming" else None
        yield nft.new_chain(family, table, name, priority)
    for chain, expressions in RULES:
        yield nft.new_rule(family, table, chain, expressions)
