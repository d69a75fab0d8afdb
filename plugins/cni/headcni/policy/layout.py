"""The parts of the nft table that are always there, and the names in it.

A packet that a pod sends or gets passes a base chain for each direction. Established connections
leave it at the first rule. Otherwise the pod's address leads to its profile: the chain of exactly
the policies that isolate the pod, which accepts or drops. A pod that is not isolated is accepted,
and an address that is not known at all leads to `unknown`. So no packet passes more rules because
there are more pods or policies.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Dict, Tuple

from ..datapath import nft_objects as nft
from ..datapath.nft import POLICIES
from ..datapath.nft_objects import ACCEPT, DROP, Chain, Hook, Set, Verdict
from ..model import Address
from .objects import EGRESS, INGRESS

TABLE = POLICIES
COMMENT = "network policies of HeadCNI, layout 1"
LINKS = "links"  # bridges, and host's ends of routed pods: what leads to pods that have policies
UNKNOWN, GROUPS = "unknown", "groups"
PEERS = "pods_"  # begins the names of sets with the pods that a peer selects
VERSIONS = (4, 6)
ADDRESS_TYPES = {4: "ipv4_addr", 6: "ipv6_addr"}
PROTOCOL_NAMES = {6: "tcp", 17: "udp", 132: "sctp"}
# The field of a packet that has the pod's address, and the one with the other end's.
OWN_FIELD = {INGRESS: "daddr", EGRESS: "saddr"}
PEER_FIELD = {INGRESS: "saddr", EGRESS: "daddr"}
_JUST_BEFORE_FILTERS = -10
_ND_SOLICIT, _ND_ADVERT = 135, 136
_MULTICAST, _BROADCAST = 2, 1  # types of packets


def pods_map(direction: str, version: int) -> str:
    """From the address of a pod of this node to what is done with its packets."""
    return f"{direction.lower()}{version}"


def self_set(version: int) -> str:
    return f"self{version}"


def address_maps() -> list[tuple[str, int]]:
    """Each map with addresses of this node's pods, and its IP version."""
    return [(pods_map(way, version), version) for way in (EGRESS, INGRESS) for version in VERSIONS]


def sets() -> Dict[str, Set]:
    found = [Set(LINKS, ("ifname",), comment="lead to pods")]
    for version in VERSIONS:
        kind = ADDRESS_TYPES[version]
        found.append(Set(self_set(version), (kind, kind), comment="a pod reaches itself"))
        for way in (EGRESS, INGRESS):
            found.append(Set(pods_map(way, version), (kind,), is_map=True))
    return {one.name: one for one in found}


def chains(unknown: Verdict, groups: Verdict) -> Dict[str, Chain]:
    """`unknown` is the verdict on pods that are not known, and `groups` on packets to several pods
    at once, which are not part of Kubernetes' policies."""
    found = [
        _base("from_pods", "forward", EGRESS, 0),
        _base("from_pods_to_node", "input", EGRESS, 0),
        _base("to_pods", "forward", INGRESS, 1),
        unknown_chain(unknown),
        groups_chain(groups),
    ]
    return {one.name: one for one in found}


def unknown_chain(verdict: Verdict) -> Chain:
    rules = (nft.count(UNKNOWN) + nft.verdict(DROP),) if verdict == DROP else _just(verdict)
    return Chain(UNKNOWN, rules, comment="pods whose policies are not known")


def groups_chain(verdict: Verdict) -> Chain:
    return Chain(GROUPS, _just(verdict), comment="broadcast and multicast between pods")


def _just(verdict: Verdict) -> Tuple[bytes, ...]:
    return (nft.verdict(verdict),)


def _base(name: str, hook: str, direction: str, later: int) -> Chain:
    """`accept` ends the work of this chain only."""
    links = "iifname" if direction == EGRESS else "oifname"
    accept, field = nft.verdict(ACCEPT), OWN_FIELD[direction]
    rules = [
        nft.established() + accept,
        nft.link_not_in(links, LINKS) + accept,
        # Neighbour discovery is not a connection. Pods speak it with the node and, over a bridge,
        # with each other. Anything that came through a router only looks like it.
        nft.neighbour_discovery(_ND_SOLICIT, _ND_ADVERT) + accept,
    ]
    if hook == "forward":
        to_groups = nft.verdict(Verdict("goto", GROUPS))
        # A frame to one pod may carry an address of a group, and the other way round.
        rules += [nft.meta_is("pkttype", kind) + to_groups for kind in (_BROADCAST, _MULTICAST)]
        rules += [nft.to_a_group(one) + to_groups for one in VERSIONS]
        rules += [nft.both_addresses_in(one, self_set(one)) + accept for one in VERSIONS]
    rules += [nft.address_verdict(one, field, pods_map(direction, one)) for one in VERSIONS]
    rules.append(nft.verdict(Verdict("goto", UNKNOWN)))
    return Chain(name, tuple(rules), Hook(hook, _JUST_BEFORE_FILTERS + later))


def link_key(name: str) -> bytes:
    return struct.pack("16s", name.encode())


def self_key(address: Address) -> bytes:
    return address.packed * 2


def keys_of(addresses: Iterable[Address]) -> list[tuple[str, bytes]]:
    """Every element that a pod with these addresses may have in the parts that are always there."""
    found = []
    for address in addresses:
        version = address.version
        found.append((self_set(version), self_key(address)))
        found += [(pods_map(way, version), address.packed) for way in (EGRESS, INGRESS)]
    return found
