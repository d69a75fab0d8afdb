# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which routes are to be approved for which node: from data to data, before anything is asked for.

Two nodes that serve the same range become a pair of which only one gets traffic, and which one is
Headscale's choice. So a range that overlaps another node's is refused, whether the other one has it
already or is to get it now. The exception is one machine with two identities, as it has while it
changes from one tailscaled to another: then `same_machine_as` says so.

What is wrong with one node is a Problem of that node alone; whether the others go on is for those
to say who asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, NamedTuple, Optional, Union

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
JOIN = "see that it has joined this very server"
GIVE_WAY = (
    "give each node a range of its own; a node that is no more is removed by "
    "headscale_node state=absent; two identities of one machine need same_machine_as"
)
UNEXPLAINED = (
    "Headscale does not say why; before 0.29 it keeps the routes of a node that was removed while "
    "it served them, until Headscale is restarted"
)


@dataclass(frozen=True)
class Problem:
    """What stands in one node's way. `label` is the node's; several may have the same advice."""

    label: str
    kind: str  # as a HeadscaleError has it
    what: str
    advice: str = ""


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
    problems: tuple[Problem, ...] = ()  # whose nodes are in neither of these


def told(problems: Iterable[Problem]) -> str:
    """All of them in one line, each advice once, after what it is for."""
    whats: dict[str, dict[str, None]] = {}
    for one in problems:
        whats.setdefault(one.advice, {})[one.what] = None
    parts = []
    for advice, found in whats.items():
        more = f"; and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
        parts.append("; ".join([*found][:MOST_SHOWN]) + more + (f"; {advice}" if advice else ""))
    return ". ".join(parts)


def by_label(problems: Sequence[Problem]) -> dict[str, str]:
    """What there is to say of each node that has any."""
    of: dict[str, list[Problem]] = {}
    for one in problems:
        of.setdefault(one.label, []).append(one)
    return {label: told(those) for label, those in of.items()}


def refuse(problems: Sequence[Problem]) -> None:
    """Raise them, if there are any."""
    if problems:
        kinds = [one.kind for one in problems]
        kind = NOT_FOUND if NOT_FOUND in kinds else kinds[0]
        raise HeadscaleError(kind, ("" if kind == OPTION else "nodes: ") + told(problems))


def parse(nodes: Sequence[Mapping[str, Any]]) -> tuple[list[Wanted], list[Problem]]:
    """What a module's option `nodes` asks for, and every mistake in it. Nodes with one are left
    out of the former."""
    wanted: list[Wanted] = []
    mistakes: list[Problem] = []
    labels: set[str] = set()

    def wrong(label: str, what: str) -> None:
        mistakes.append(Problem(label, OPTION, what))

    for at, given in enumerate(nodes):
        place = f"nodes[{at}]"
        selector = {
            key: str(given[key]).strip()
            for key in ("node_key", "id", "name")
            if given.get(key) not in (None, "")
        }
        label = str(given.get("label") or next(iter(selector.values()), place))
        if label in labels:
            wrong(label, f"{place} ({label}): named twice: give all its routes at once")
        labels.add(label)
        if len(selector) != 1:
            wrong(label, f"{place} ({label}): give one of node_key, id and name")
        elif "node_key" in selector and not selector["node_key"].startswith("nodekey:"):
            wrong(
                label,
                f"{place}.node_key: {selector['node_key']!r}, expected nodekey: and 64 digits, "
                "as `tailscale status --json` has it in Self.PublicKey",
            )
        routes = []
        for number, text in enumerate(given.get("routes") or ()):
            try:
                routes.append(_parse_route(str(text).strip()))
            except ValueError as mistake:
                wrong(label, f"{place}.routes[{number}] ({label}): {mistake}")
        wanted.append(
            Wanted(
                label,
                selector,
                tuple(dict.fromkeys(routes)),
                tuple(str(one).strip() for one in given.get("same_machine_as") or ()),
            )
        )
    bad = {mistake.label for mistake in mistakes}
    return [one for one in wanted if one.label not in bad], mistakes


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
    found, missing, problems = _resolve(held, wanted)
    if not (may_miss or absent):
        problems += [Problem(one.label, NOT_FOUND, _unknown(one), JOIN) for one in missing]
    machines = _machines(held, found)
    approvals = []
    for one, node in found:
        before = _sorted(node.approved)
        if absent:
            after = _without(before, one.routes)
        elif set(one.routes) <= set(before) and not purge:
            after = before
        else:
            kept = () if purge else before
            # As the server spells them, where it has them.
            held_already = _without(before, _without(before, one.routes))
            after = _sorted((*kept, *held_already, *_without(one.routes, held_already)))
        approvals.append(Approval(one, node, before, after, machines[node.id]))
    if absent:
        return Plan(tuple(approvals), (), tuple(problems))
    clashes = _find_clashes(held, approvals, missing, machines)
    while clashes:
        problems += clashes
        bad = {clash.label for clash in clashes}
        approvals = [approval for approval in approvals if approval.wanted.label not in bad]
        # Who is refused keeps what it has, also what `purge` was to make room with for another.
        clashes = _find_clashes(held, approvals, (), machines)
    bad = {problem.label for problem in problems}
    coming = tuple(one for one in missing if one.routes and one.label not in bad)
    return Plan(tuple(approvals), coming, tuple(problems))


def unserved(held: Iterable[Node], approvals: Iterable[Approval]) -> list[Problem]:
    """What was asked for and is not served, each with what stands in its way."""
    nodes = {node.id: node for node in held}
    left = []

    def wrong(label: str, what: str) -> None:
        left.append(Problem(label, REFUSED, f"{label}: {what}"))

    for approval in approvals:
        node = nodes.get(approval.node.id)
        if node is None:
            wrong(approval.wanted.label, "the node is gone")
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
                why = f"{others[0]} serves it" if others else UNEXPLAINED
            wrong(approval.wanted.label, f"{route} is not served: {why}")
    return left


def _resolve(
    held: Sequence[Node], wanted: Sequence[Wanted]
) -> tuple[list[tuple[Wanted, Node]], list[Wanted], list[Problem]]:
    """Who is meant by each, who is not there, and whom it cannot be said of."""
    found: list[tuple[Wanted, Node]] = []
    missing: list[Wanted] = []
    problems: list[Problem] = []
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
            problems.append(Problem(one.label, REFUSED, str(problem)))
            continue
        if meant is None:
            missing.append(one)
        elif meant.id in taken:
            what = f"{taken[meant.id]} and {one.label} are both node {meant.label}"
            for label in (taken[meant.id], one.label):
                problems.append(Problem(label, REFUSED, what, "name it once, with all its routes"))
        else:
            taken[meant.id] = one.label
            found.append((one, meant))
    bad = {problem.label for problem in problems}
    return [(one, node) for one, node in found if one.label not in bad], missing, problems


def _unknown(one: Wanted) -> str:
    ((kind, value),) = one.selector.items()
    which = one.label if one.label == value else f"{one.label} ({kind} {value})"
    return f"Headscale does not know {which}"


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


class _Claim(NamedTuple):
    version: int
    first: int
    last: int
    text: str
    machine: frozenset[str]
    asked: bool  # for in this call, not held already
    owner: str
    label: str = ""  # of a node of this call


def _find_clashes(
    held: Sequence[Node],
    approvals: Sequence[Approval],
    missing: Sequence[Wanted],
    machines: Mapping[str, frozenset[str]],
) -> list[Problem]:
    """One for each node that asks for what another has, or asks for as well."""
    claims = []
    planned = {approval.node.id for approval in approvals}
    for approval in approvals:
        asked = set(map(_network, approval.wanted.routes))
        label = approval.wanted.label
        for route in approval.after:
            claims += _claims((route,), approval.machine, _network(route) in asked, label, label)
    for one in missing:
        machine = frozenset({f"missing {one.label}"})
        claims += _claims(one.routes, machine, True, one.label, one.label)
    for node in held:
        if node.id not in planned:
            state = "online" if node.online else "offline"
            owner = f"node {node.label}, {state}, which has it at Headscale"
            claims += _claims((*node.approved, *node.served), machines[node.id], False, owner)
    found = []
    for asking, other in _clashes(claims):
        what = f"{asking.text} for {asking.owner} overlaps {other.text} of {other.owner}"
        for side in (asking, other):
            if side.asked:
                found.append(Problem(side.label, REFUSED, what, GIVE_WAY))
    return found


def _claims(
    routes: Iterable[str], machine: frozenset[str], asked: bool, owner: str, label: str = ""
) -> list[_Claim]:
    """Default routes aside: those of an exit node overlap everything, and harm nothing here."""
    claims = []
    for text in dict.fromkeys(routes):
        # What somebody else approved may well have host bits set.
        network = _network(text, strict=False)
        if network is not None and network.prefixlen:
            first, last = int(network.network_address), int(network.broadcast_address)
            claims.append(_Claim(network.version, first, last, text, machine, asked, owner, label))
    return claims


def _clashes(claims: Iterable[_Claim]) -> list[tuple[_Claim, _Claim]]:
    """Each pair that overlaps, of two machines, with one that was asked for: that one first.

    Ranges are within one another or apart; so in order of their beginnings, the wider first, those
    around the present one are a stack.
    """
    found = []
    around: list[_Claim] = []
    for claim in sorted(claims, key=lambda c: (c.version, c.first, -c.last)):
        while around and (around[-1].version, around[-1].last) < (claim.version, claim.first):
            around.pop()
        for other in around:
            if (claim.asked or other.asked) and not claim.machine & other.machine:
                found.append((claim, other) if claim.asked else (other, claim))
        around.append(claim)
    return found


def _parse_route(text: str) -> str:
    network = _network(text, strict=False)
    if network is None:
        raise ValueError(f"{text!r}, expected a CIDR such as 10.244.1.0/24")
    if "/" not in text:
        raise ValueError(f"{text!r} has no prefix length: did you mean {network}?")
    if not network.prefixlen:
        raise ValueError(f"{text!r} would make it an exit node, which is not done here")
    if _network(text) is None:
        raise ValueError(f"{text!r} has host bits set: did you mean {network}?")
    return str(network)


@lru_cache(maxsize=1 << 14)  # each is looked at some ten times, and it takes 20 µs
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
