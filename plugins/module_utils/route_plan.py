# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which routes to approve for which node: pure computation, before anything is written.

If two nodes serve the same range, Headscale treats them as a pair, and only one of them gets
traffic. So a range that overlaps another node's is refused, whether the other node already has it
or gets it now. The exception is a machine with two identities, while it moves from one tailscaled
to another: `same_machine_as` names them.

A mistake concerns only its own node (Problem). The caller decides whether the others continue.
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
    """What is wrong with one node, named by `label`. Several problems may have the same advice."""

    label: str
    kind: str  # as a HeadscaleError has it
    what: str
    advice: str = ""


@dataclass(frozen=True)
class Wanted:
    """The routes wanted for one node. `label` is its name in messages."""

    label: str
    selector: Mapping[str, str]
    routes: tuple[str, ...]
    same_machine_as: tuple[str, ...] = ()


@dataclass(frozen=True)
class Approval:
    """The routes that a node has and should have. `routes` are those that were given."""

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
        """The routes that Headscale 0.23 to 0.25 cannot approve yet, because the node has never
        advertised them."""
        if self.node.switches is None:
            return ()
        return tuple(route for route in self.after if route not in self.node.switches)


@dataclass(frozen=True)
class Plan:
    approvals: tuple[Approval, ...]
    coming: tuple[Wanted, ...] = ()  # in check mode: nodes that may be about to join
    problems: tuple[Problem, ...] = ()  # whose nodes are in neither of these


def told(problems: Iterable[Problem]) -> str:
    """All problems in one line. Each advice appears once, after the problems that it solves."""
    whats: dict[str, dict[str, None]] = {}
    for one in problems:
        whats.setdefault(one.advice, {})[one.what] = None
    parts = []
    for advice, found in whats.items():
        more = f"; and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
        parts.append("; ".join([*found][:MOST_SHOWN]) + more + (f"; {advice}" if advice else ""))
    return ". ".join(parts)


def by_label(problems: Sequence[Problem]) -> dict[str, str]:
    """The problems by the label of their node."""
    of: dict[str, list[Problem]] = {}
    for one in problems:
        of.setdefault(one.label, []).append(one)
    return {label: told(those) for label, those in of.items()}


def refuse(problems: Sequence[Problem]) -> None:
    """Raise the problems, if there are any."""
    if problems:
        kinds = [one.kind for one in problems]
        kind = NOT_FOUND if NOT_FOUND in kinds else kinds[0]
        raise HeadscaleError(kind, ("" if kind == OPTION else "nodes: ") + told(problems))


def parse(nodes: Sequence[Mapping[str, Any]]) -> tuple[list[Wanted], list[Problem]]:
    """The wanted routes of a module's option `nodes`, and every mistake in it. Nodes with a
    mistake are not among the wanted."""
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
    """The approvals of each node. With `may_miss`, missing nodes are not an error: in check mode
    they may be about to join. With `absent` they are not an error either: a missing node has no
    routes."""
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
            # In the server's spelling, if the server has them.
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
    """The wanted routes that are not served, each with the reason."""
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
    """The node for each entry, the entries without a node, and the ambiguous ones."""
    found: list[tuple[Wanted, Node]] = []
    missing: list[Wanted] = []
    problems: list[Problem] = []
    taken: dict[str, str] = {}
    called: dict[str, list[Node]] = {}  # by key, id, name and host name
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
    """The identities of each machine, by the id of each node. Identities that no longer exist
    are ignored."""
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
    """A problem for each node that wants a range that another node has or wants."""
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
    """Without default routes: those of exit nodes overlap everything, and do no harm here."""
    claims = []
    for text in dict.fromkeys(routes):
        # Routes that somebody else approved may have host bits set.
        network = _network(text, strict=False)
        if network is not None and network.prefixlen:
            first, last = int(network.network_address), int(network.broadcast_address)
            claims.append(_Claim(network.version, first, last, text, machine, asked, owner, label))
    return claims


def _clashes(claims: Iterable[_Claim]) -> list[tuple[_Claim, _Claim]]:
    """Each pair of overlapping ranges of two machines of which at least one is wanted; the wanted
    one comes first.

    Ranges are nested or disjoint. So in order of their first address, the wider first, the ranges
    around the current one form a stack.
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
