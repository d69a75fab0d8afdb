# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which routes are to be approved for which node: from data to data, before anything is asked for.

Two nodes that serve the same range become a pair of which only one gets traffic, and which one is
Headscale's choice. So a range that overlaps another node's is refused, whether the other one has it
already or is to get it now. The exception is one machine with two identities, as it has while it
changes from one tailscaled to another: then `same_machine_as` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, Optional, Union

from ansible_collections.headcni.mesh.plugins.module_utils.headscale import (
    NOT_FOUND,
    OPTION,
    REFUSED,
    HeadscaleError,
    find_node,
)
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_objects import Node

Network = Union[IPv4Network, IPv6Network]
MOST_SHOWN = 10


@dataclass(frozen=True)
class Wanted:
    """What is asked for one node. `label` is what messages call it."""

    label: str
    selector: Mapping[str, str]
    routes: tuple[str, ...]
    same_machine_as: tuple[str, ...] = ()


@dataclass(frozen=True)
class Approval:
    """What one node has, and is to have. `routes` are those that were asked for."""

    wanted: Wanted
    node: Node
    before: tuple[str, ...]
    after: tuple[str, ...]
    machine: frozenset[str]  # the ids of all identities of its machine

    @property
    def changed(self) -> bool:
        return self.before != self.after

    @property
    def unknown(self) -> tuple[str, ...]:
        """What a server of 0.23 to 0.25 cannot approve yet, as the node never advertised it."""
        if self.node.switches is None:
            return ()
        return tuple(route for route in self.after if route not in self.node.switches)


@dataclass(frozen=True)
class Plan:
    approvals: tuple[Approval, ...]
    coming: tuple[Wanted, ...] = ()  # in check mode, what may be about to join


def parse(nodes: Sequence[Mapping[str, Any]]) -> list[Wanted]:
    """What a module's option `nodes` asks for; every mistake in it is named at once."""
    wanted: list[Wanted] = []
    mistakes: list[str] = []
    labels: set[str] = set()
    for at, given in enumerate(nodes):
        place = f"nodes[{at}]"
        selector = {
            key: str(given[key]).strip()
            for key in ("node_key", "id", "name")
            if given.get(key) not in (None, "")
        }
        label = str(given.get("label") or next(iter(selector.values()), place))
        if label in labels:
            mistakes.append(f"{place} ({label}): named twice: give all its routes at once")
        labels.add(label)
        if len(selector) != 1:
            mistakes.append(f"{place} ({label}): give one of node_key, id and name")
        elif "node_key" in selector and not selector["node_key"].startswith("nodekey:"):
            mistakes.append(
                f"{place}.node_key: {selector['node_key']!r}, expected nodekey: and 64 digits, "
                "as `tailscale status --json` has it in Self.PublicKey"
            )
        routes = []
        for number, text in enumerate(given.get("routes") or ()):
            try:
                routes.append(_parse_route(str(text).strip()))
            except ValueError as wrong:
                mistakes.append(f"{place}.routes[{number}] ({label}): {wrong}")
        wanted.append(
            Wanted(
                label,
                selector,
                tuple(dict.fromkeys(routes)),
                tuple(str(one).strip() for one in given.get("same_machine_as") or ()),
            )
        )
    if mistakes:
        raise HeadscaleError(OPTION, "; ".join(mistakes))
    return wanted


def plan(
    held: Sequence[Node],
    wanted: Sequence[Wanted],
    *,
    absent: bool = False,
    purge: bool = False,
    may_miss: bool = False,
) -> Plan:
    """What each node is to have. With `may_miss`, nodes that are not there are no error: in check
    mode they may be about to join. Nor are they if `absent`: who is gone has no routes."""
    found, missing = _resolve(held, wanted, may_miss or absent)
    machines = _machines(held, found)
    approvals = []
    for one, node in found:
        before = _sorted(node.approved)
        if absent:
            after = _without(before, one.routes)
        else:
            kept = () if purge else before
            # As the server spells them, where it has them.
            held_already = _without(before, _without(before, one.routes))
            after = _sorted((*kept, *held_already, *_without(one.routes, held_already)))
        approvals.append(Approval(one, node, before, after, machines[node.id]))
    if absent:
        return Plan(tuple(approvals))
    _refuse_clashes(held, approvals, missing)
    return Plan(tuple(approvals), tuple(one for one in missing if one.routes))


def unserved(held: Iterable[Node], approvals: Iterable[Approval]) -> list[str]:
    """What was asked for and is not served, each with what stands in its way."""
    nodes = {node.id: node for node in held}
    left = []
    for approval in approvals:
        node = nodes.get(approval.node.id)
        if node is None:
            left.append(f"{approval.wanted.label}: the node is gone")
            continue
        served = {r for i in approval.machine if i in nodes for r in map(_network, nodes[i].served)}
        for route in approval.wanted.routes:
            if _network(route) in served:
                continue
            if not node.online:
                why = "the node is offline"
            elif _network(route) not in set(map(_network, node.available)):
                why = "the node does not advertise it"
            else:
                others = [n.label for n in nodes.values() if route in n.served and n.id != node.id]
                why = f"{others[0]} serves it" if others else "Headscale does not say why"
            left.append(f"{approval.wanted.label}: {route} is not served: {why}")
    return left


def _resolve(
    held: Sequence[Node], wanted: Sequence[Wanted], may_miss: bool
) -> tuple[list[tuple[Wanted, Node]], list[Wanted]]:
    found: list[tuple[Wanted, Node]] = []
    missing: list[Wanted] = []
    problems: list[str] = []
    taken: dict[str, str] = {}
    called: dict[str, list[Node]] = {}  # by whatever a node may be called
    for node in held:
        words = {node.id, node.key, node.name, node.hostname}
        for word in words:
            called.setdefault(word, []).append(node)
    for one in wanted:
        (word,) = one.selector.values()
        try:
            meant = find_node(called.get(word, ()), **one.selector)
        except HeadscaleError as problem:
            problems.append(str(problem))
            continue
        if meant is None:
            missing.append(one)
        elif meant.id in taken:
            problems.append(
                f"nodes: {taken[meant.id]} and {one.label} are both node {meant.label}: "
                "name it once, with all its routes"
            )
        else:
            taken[meant.id] = one.label
            found.append((one, meant))
    if missing and not may_miss:
        problems.append(
            "nodes: Headscale does not know "
            + ", ".join(_described(one) for one in missing)
            + "; see that each has joined this very server"
        )
    if problems:
        raise HeadscaleError(NOT_FOUND if missing else REFUSED, "; ".join(problems))
    return found, missing


def _described(one: Wanted) -> str:
    ((kind, value),) = one.selector.items()
    return one.label if one.label == value else f"{one.label} ({kind} {value})"


def _machines(
    held: Sequence[Node], found: Sequence[tuple[Wanted, Node]]
) -> dict[str, frozenset[str]]:
    """The identities of each machine, by the id of each node. What is no node (any more) clashes
    with nobody, and is passed over."""
    groups = {node.id: {node.id} for node in held}
    for one, node in found:
        for other in held if one.same_machine_as else ():
            names = (other.id, other.key, other.name, other.hostname)
            if set(one.same_machine_as).intersection(names):
                together = groups[node.id] | groups[other.id]
                for member in together:
                    groups[member] = together
    return {number: frozenset(group) for number, group in groups.items()}


@dataclass(frozen=True)
class _Claim:
    network: Network
    text: str
    machine: frozenset[str]
    asked: bool  # for in this call, not held already
    owner: str


def _refuse_clashes(
    held: Sequence[Node], approvals: Sequence[Approval], missing: Sequence[Wanted]
) -> None:
    claims = []
    planned = {approval.node.id for approval in approvals}
    for approval in approvals:
        asked = set(map(_network, approval.wanted.routes))
        for route in approval.after:
            new = _network(route) in asked
            claims += _claims((route,), approval.machine, new, approval.wanted.label)
    machines = {i: approval.machine for approval in approvals for i in approval.machine}
    for one in missing:
        claims += _claims(one.routes, frozenset({f"missing {one.label}"}), True, one.label)
    for node in held:
        if node.id not in planned:
            state = "online" if node.online else "offline"
            owner = f"node {node.label}, {state}, which has it at Headscale"
            machine = machines.get(node.id, frozenset({node.id}))
            claims += _claims((*node.approved, *node.served), machine, False, owner)
    found = [
        f"{one.text} for {one.owner} overlaps {other.text} of {other.owner}"
        for one, other in _clashes(claims)
    ]
    if found:
        more = f"; and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
        raise HeadscaleError(
            REFUSED,
            "nodes: "
            + "; ".join(found[:MOST_SHOWN])
            + more
            + ". Give each node a range of its own; a node that is no more is removed by "
            "headscale_node state=absent; two identities of one machine need same_machine_as",
        )


def _claims(
    routes: Iterable[str], machine: frozenset[str], asked: bool, owner: str
) -> list[_Claim]:
    """Default routes aside: those of an exit node overlap everything, and harm nothing here."""
    claims = []
    for text in dict.fromkeys(routes):
        # What somebody else approved may well have host bits set.
        network = _network(text, strict=False)
        if network is not None and network.prefixlen:
            claims.append(_Claim(network, text, machine, asked, owner))
    return claims


def _clashes(claims: Iterable[_Claim]) -> list[tuple[_Claim, _Claim]]:
    """Each pair that overlaps, of two machines, with one that was asked for: that one first.

    Ranges are within one another or apart; so in order of their beginnings, the wider first, those
    around the present one are a stack.
    """
    found = []
    around: list[_Claim] = []
    for claim in sorted(
        claims,
        key=lambda c: (c.network.version, int(c.network.network_address), c.network.prefixlen),
    ):
        while around and not around[-1].network.overlaps(claim.network):
            around.pop()
        for other in around:
            if (claim.asked or other.asked) and not claim.machine & other.machine:
                found.append((claim, other) if claim.asked else (other, claim))
        around.append(claim)
    return found


def _parse_route(text: str) -> str:
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        raise ValueError(f"{text!r}, expected a CIDR such as 10.244.1.0/24") from None
    if "/" not in text:
        raise ValueError(f"{text!r} has no prefix length: did you mean {network}?")
    if not network.prefixlen:
        raise ValueError(f"{text!r} would make it an exit node, which is not done here")
    try:
        ip_network(text)
    except ValueError:
        raise ValueError(f"{text!r} has host bits set: did you mean {network}?") from None
    return str(network)


def _network(text: str, strict: bool = True) -> Optional[Network]:
    try:
        return ip_network(text, strict)
    except ValueError:
        return None


def _sorted(routes: Iterable[str]) -> tuple[str, ...]:
    def order(text: str) -> tuple[int, int, int, str]:
        network = _network(text)
        if network is None:
            return (9, 0, 0, text)
        return (network.version, int(network.network_address), network.prefixlen, text)

    return tuple(sorted(set(routes), key=order))


def _without(routes: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    gone = {_network(other) for other in others}
    return tuple(
        route for route in routes if _network(route) is None or _network(route) not in gone
    )
