"""Which peers' claims to a range of pods are accepted, and which are refused.

A claim is a prefix whose packets tailscaled sends to a peer. Any device may advertise a prefix, and
an approval at Headscale may be a mistake. A claim gets a route only if

- it comes from a peer with one of the mesh's tags,
- it is inside the cluster's range, and outside this node's own range and the service range,
- it has the length of a node's range (`network.podCIDR.perNode`, or the length of this node's own),
- it does not overlap the claim of another node.

Everything else is refused and reported. Nobody can take a range away from the node that has it:

- A node that is offline keeps its claim. Headscale withdraws a peer's routes within seconds of
  losing contact with it, and a short interruption must not cut pods off.
- The claims of nodes have the same length, so two of them overlap only if they are the same prefix.
  Then there is a single route for both, and Headscale's choice of a primary decides which node gets
  the packets: this is how a node changes its mode, and how a new machine replaces another. If
  `network.podCIDR.peerSizes` allows several lengths, the claim that already has a route wins, then
  the claim that Headscale names as primary, then the larger range.
- tailscaled chooses the peer by its own longest match, whatever our routes are. So a refused claim
  inside a node's range gets an unreachable route: its packets go nowhere instead of to the peer.
  The same happens to the range of an offline node while a refused claim covers it.

A node without any of the tags cannot require them of others (its tailscaled was joined without
them, or HeadCNI was configured with another tag). It accepts peers without a tag, and warns.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import AbstractSet, NamedTuple

from ..model import Network
from .kernel_routes import REMEMBERED
from .localapi import Status
from .prefix import Prefix

UNTAGGED, OWN_CIDR, SERVICE_RANGE, PREFIX_LENGTH, OVERLAP = (
    "untagged",
    "own-cidr",
    "service-range",
    "prefix-length",
    "overlap",
)
REASONS = (UNTAGGED, OWN_CIDR, SERVICE_RANGE, PREFIX_LENGTH, OVERLAP)
UNCHECKED, MORE = "tags-not-checked", "more"
USUAL_LENGTHS = {4: 24, 6: 64}  # of a node's range, if nothing else is configured
# Limits on alarms and unreachable routes, because a tailnet may be full of refused claims.
MOST_ALARMS = 50
MOST_BLOCKED = 4096

_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


@dataclass(frozen=True, eq=False)
class Rules:
    """What a claim must look like. `lengths` are the lengths of a node's range by address family.
    Without tags, every peer may have pods."""

    cluster: tuple[Prefix, ...]
    own: tuple[Prefix, ...]
    service: tuple[Prefix, ...]
    lengths: Mapping[int, tuple[int, ...]]
    tags: tuple[str, ...]


@lru_cache(maxsize=16)  # the same object for the same rules, so that the cache of _judged works
def rules_of(
    cluster: tuple[Network, ...],
    own: tuple[Network, ...],
    service: tuple[Network, ...] = (),
    sizes: tuple[tuple[int, int], ...] = (),
    tags: tuple[str, ...] = (),
) -> Rules:
    """`sizes` are pairs of IP version and prefix length, in addition to those of our own ranges."""
    allowed = {*sizes, *((cidr.version, cidr.prefixlen) for cidr in own)}
    lengths: dict[int, tuple[int, ...]] = {}
    for version, family in _FAMILIES.items():
        found = {length for of, length in allowed if of == version}
        lengths[family] = tuple(sorted(found)) or (USUAL_LENGTHS[version],)
    return Rules(
        tuple(prefixes(cluster)), tuple(prefixes(own)), tuple(prefixes(service)), lengths, tags
    )


class Claim(NamedTuple):
    """A prefix that a node serves, or served when it was last seen."""

    prefix: Prefix
    peer: str
    remembered: bool = False
    primary: bool = False  # Headscale has chosen this peer to serve it
    peer_id: str = ""


class Refusal(NamedTuple):
    """A claim that gets no route, the reason, and what it conflicts with."""

    prefix: Prefix
    peer: str
    reason: str
    other: str = ""
    peer_id: str = ""


class Alarm(NamedTuple):
    """Something that the operator should act on. Only an alarm that `holds_back` makes the node not
    ready: no foreign device may be able to cause that."""

    kind: str  # a reason, or one of the words below the reasons
    prefix: str
    claimants: tuple[str, ...]
    message: str
    holds_back: bool = False


@dataclass(frozen=True)
class Heard:
    """The claims of tailscaled's peers: the accepted ones by the peer's id, and the refused ones.
    `checked` says whether peers had to have a tag."""

    claims: Mapping[str, tuple[Claim, ...]] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    checked: bool = True


@dataclass(frozen=True)
class Plan:
    """Which prefixes get a route, and which get an unreachable route."""

    wanted: AbstractSet[Prefix] = frozenset()
    blocked: AbstractSet[Prefix] = frozenset()
    refusals: tuple[Refusal, ...] = ()
    alarms: tuple[Alarm, ...] = ()  # conflicts between nodes
    warnings: tuple[Alarm, ...] = ()  # refused claims that did no harm


def prefixes(networks: Iterable[Network]) -> list[Prefix]:
    return [Prefix.parse(str(network)) for network in networks]


def hear(status: Status, rules: Rules, before: Mapping[str, Sequence[Claim]]) -> Heard:
    """The claims of all peers to the cluster's range. `before` are those accepted the last time."""
    tags = frozenset(rules.tags)
    checked = not tags.isdisjoint(status.tags)
    claims: dict[str, tuple[Claim, ...]] = {}
    refusals: list[Refusal] = []
    for peer in status.peers:
        if peer.expired:
            continue
        trusted = not checked or not tags.isdisjoint(peer.tags)
        accepted, refused = _judged(peer.name, peer.id, peer.routes, peer.primary, trusted, rules)
        refusals += refused
        if not accepted and trusted and not peer.online:
            accepted = tuple(claim._replace(remembered=True) for claim in before.get(peer.id, ()))
        if accepted:
            claims[peer.id] = accepted
    return Heard(claims, tuple(refusals), checked)


@lru_cache(maxsize=REMEMBERED)
def _judged(
    peer: str,
    peer_id: str,
    routes: tuple[str, ...],
    primary: tuple[str, ...],
    trusted: bool,
    rules: Rules,
) -> tuple[tuple[Claim, ...], tuple[Refusal, ...]]:
    """The claims of a single peer. Prefixes outside the cluster's and the services' range are
    ignored, because other subnet routers and exit nodes serve them. So is the whole range of
    services if a node of the mesh advertises it."""
    claims, refusals = [], []
    for route in dict.fromkeys(routes):
        with contextlib.suppress(ValueError, OSError):
            parsed = Prefix.parse(route)
            prefix = parsed.shortened(parsed.length)
            in_cluster = any(known.covers(prefix) for known in rules.cluster)
            if not in_cluster and not any(known.covers(prefix) for known in rules.service):
                continue
            if trusted and prefix in rules.service:
                continue  # the operator offers services to the tailnet: playbooks/names.yml
            reason, other = _objection(prefix, trusted, rules)
            if reason:
                refusals.append(Refusal(prefix, peer, reason, other, peer_id))
            else:
                claims.append(Claim(prefix, peer, False, route in primary, peer_id))
    return tuple(claims), tuple(refusals)


def _objection(prefix: Prefix, trusted: bool, rules: Rules) -> tuple[str, str]:
    """The reason to refuse a claim and what it conflicts with; both empty if it is accepted."""
    if not trusted:
        return UNTAGGED, ""
    for reason, ranges in ((OWN_CIDR, rules.own), (SERVICE_RANGE, rules.service)):
        for known in ranges:
            if known.overlaps(prefix):
                return reason, str(known)
    lengths = rules.lengths[prefix.family]
    if prefix.length not in lengths:
        return PREFIX_LENGTH, " or ".join(f"/{length}" for length in lengths)
    return "", ""


def plan(heard: Heard, rules: Rules, established: Iterable[Prefix] = ()) -> Plan:
    """What follows from all claims. `established` are the prefixes that have a route now.

    Everything is kept in order: walking thousands of peers in the order of memory, without sorting
    them again, costs a quarter less.
    """
    chosen: dict[Prefix, Claim] = {}
    rivals: dict[Prefix, list[str]] = {}
    for claim in sorted(claim for claims in heard.claims.values() for claim in claims):
        other = chosen.setdefault(claim.prefix, claim)
        if other is claim or claim.remembered:
            continue
        if not other.remembered:
            rivals.setdefault(claim.prefix, [other.peer]).append(claim.peer)
        if other.remembered or (claim.primary and not other.primary):
            chosen[claim.prefix] = claim
    refusals = heard.refusals
    if any(len(lengths) > 1 for lengths in rules.lengths.values()):
        refusals += _drop_nested(chosen, rules, frozenset(established))
    blocked = _blocked(chosen, refusals, rules) if refusals else frozenset()
    wanted: AbstractSet[Prefix] = chosen.keys()
    if not blocked.isdisjoint(wanted):
        wanted = dict.fromkeys(prefix for prefix in wanted if prefix not in blocked).keys()
    alarms = [_rivalry(prefix, peers) for prefix, peers in rivals.items()]
    warnings = [_unchecked(rules)] if rules.tags and not heard.checked else []
    for those in _by_peer(refusals):
        (alarms if those[0].reason == OWN_CIDR else warnings).append(
            _refusal(those, heard.checked, rules)
        )
    return Plan(wanted, blocked, refusals, _few(alarms), _few(warnings))


def _drop_nested(
    chosen: dict[Prefix, Claim], rules: Rules, established: AbstractSet[Prefix]
) -> tuple[Refusal, ...]:
    """If nodes' ranges may have several lengths, remove those that overlap another node's."""
    refusals = []
    kept: dict[Prefix, Claim] = {}
    around: dict[Prefix, Claim] = {}  # shorter prefixes, each with a kept claim inside it
    in_turn = sorted(
        chosen.values(),
        key=lambda claim: (claim.prefix not in established, not claim.primary, claim),
    )
    for claim in in_turn:
        prefix = claim.prefix
        shorter = [
            prefix.shortened(length)
            for length in rules.lengths[prefix.family]
            if length < prefix.length
        ]
        other = around.get(prefix) or next(
            (kept[outer] for outer in shorter if outer in kept), None
        )
        if other is None or other.peer_id == claim.peer_id:
            kept[prefix] = claim
            around.update(dict.fromkeys(shorter, claim))
            continue
        del chosen[prefix]
        if not claim.remembered:
            clash = f"{other.prefix} of {other.peer}"
            refusals.append(Refusal(prefix, claim.peer, OVERLAP, clash, claim.peer_id))
    return tuple(refusals)


def _blocked(
    chosen: Mapping[Prefix, Claim], refusals: Sequence[Refusal], rules: Rules
) -> frozenset[Prefix]:
    """Prefixes for which tailscaled would send a node's packets to a peer that was refused."""
    found: set[Prefix] = set()
    refused: dict[Prefix, set[str]] = {}
    for refusal in refusals:
        refused.setdefault(refusal.prefix, set()).add(refusal.peer_id)
    # The larger prefixes first, in case there are too many.
    for prefix in sorted(refused, key=lambda prefix: (prefix.length, prefix)):
        for length in rules.lengths[prefix.family]:
            node = chosen.get(prefix.shortened(length)) if length < prefix.length else None
            if node is not None and refused[prefix] != {node.peer_id}:
                found.add(prefix)
        if len(found) >= MOST_BLOCKED:
            break
    shapes = {(prefix.family, prefix.length) for prefix in refused}
    for prefix, claim in chosen.items():
        if claim.remembered and any(
            family == prefix.family
            and length <= prefix.length
            and refused.get(prefix.shortened(length), set()) - {claim.peer_id}
            for family, length in shapes
        ):
            found.add(prefix)
    return frozenset(found)


def _by_peer(refusals: Iterable[Refusal]) -> Iterable[list[Refusal]]:
    """The refusals grouped by peer and reason."""
    found: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in refusals:
        found.setdefault((refusal.peer_id, refusal.reason), []).append(refusal)
    return found.values()


def _few(alarms: list[Alarm]) -> tuple[Alarm, ...]:
    """At most MOST_ALARMS, and first those that make the node not ready."""
    alarms.sort(key=lambda alarm: not alarm.holds_back)
    if len(alarms) > MOST_ALARMS:
        more = len(alarms) - MOST_ALARMS
        said = (
            f"{more} more of this kind: see the routes at Headscale (headscale nodes list-routes)"
        )
        alarms[MOST_ALARMS:] = [Alarm(MORE, "", (), said)]
    return tuple(alarms)


def _rivalry(prefix: Prefix, peers: Sequence[str]) -> Alarm:
    others = f" and {len(peers) - 2} more" if len(peers) > 2 else ""
    return Alarm(
        OVERLAP,
        str(prefix),
        tuple(peers[:MOST_ALARMS]),
        f"{peers[0]} serves {prefix}, and {peers[1]} serves {prefix}{others}: "
        "pods of one of them cannot be reached; give each node a pod CIDR of its own",
    )


def _unchecked(rules: Rules) -> Alarm:
    wanted = " or ".join(rules.tags)
    return Alarm(
        UNCHECKED,
        "",
        ("this node",),
        f"this node has no tag {wanted}: it accepts pods' routes from peers without the tag, and "
        "nodes that have it refuse this node's; tag all nodes (headscale nodes tag), or set "
        "tailscale.peerTags to any",
    )


def _refusal(those: Sequence[Refusal], checked: bool, rules: Rules) -> Alarm:
    """A single alarm for everything that a peer is refused for the same reason."""
    first = min(those, key=lambda refusal: refusal.prefix not in rules.own)
    peer, prefix = first.peer, first.prefix
    more = f" and {len(those) - 1} more" if len(those) > 1 else ""
    claim = f"{peer} serves {prefix}{more}"
    back = f"take the approval of {prefix} from {peer}"
    if first.reason == OWN_CIDR:
        return Alarm(
            OWN_CIDR,
            str(prefix),
            ("this node", peer),
            f"{claim}, but {first.other} is this node's own: {back}, or give one of them another",
            holds_back=checked and prefix in rules.own,
        )
    tags = " or ".join(rules.tags)
    said = {
        UNTAGGED: f"{claim} but has no tag {tags}, so it gets no route: {back}, or tag {peer} "
        "(headscale nodes tag) if it is a node of this cluster",
        SERVICE_RANGE: f"{claim}, which overlaps the service range {first.other}, so it gets no "
        f"route: {back}",
        PREFIX_LENGTH: f"{claim}, but a node's range is a {first.other}, so it gets no route: "
        f"{back}, or list its length in network.podCIDR.peerSizes",
        OVERLAP: f"{claim}, which overlaps {first.other}, so it gets no route: give each node a "
        "pod CIDR of its own",
    }
    return Alarm(first.reason, str(prefix), (peer,), said[first.reason])
