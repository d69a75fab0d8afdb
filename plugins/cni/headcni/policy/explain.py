"""Why a connection is allowed or denied, in words.

It reads the policies themselves and not what was compiled from them, so it can also show where the
two differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from ipaddress import ip_address
from typing import NamedTuple, Optional, Tuple, Union

from ..errors import BAD_ENVIRONMENT, CniError
from ..model import Address
from .objects import (
    EGRESS,
    INGRESS,
    PROTOCOLS,
    Key,
    Peer,
    Pod,
    Policy,
    Port,
    Rule,
    World,
    selected,
)

NODE = "node"  # the node that the pod is on
End = Union[Pod, Address, str]
# By pod and direction: policies that are too large for its rules, so that they allow nothing.
LeftOut = Mapping[Tuple[Key, str], Collection[Key]]


class Decision(NamedTuple):
    """On one direction of one pod."""

    direction: str  # Ingress or Egress
    pod: Key
    allowed: bool
    isolated_by: Tuple[Key, ...]  # the policies that select the pod; none: it is open
    rule: str  # the path of the rule that allows it, such as "shop/web ingress[0]", or empty
    words: str


class Explanation(NamedTuple):
    allowed: bool
    decisions: Tuple[Decision, ...]

    @property
    def words(self) -> str:
        lines = [one.words for one in self.decisions]
        if not lines:
            lines = ["no pod with policies is concerned"]
        return "\n".join([*lines, "allowed" if self.allowed else "denied"])


def end_of(world: World, text: str) -> End:
    """What an operator calls one end: namespace/name of a pod, an address, or `node`."""
    if text == NODE:
        return NODE
    namespace, slash, name = text.partition("/")
    if slash and (namespace, name) in world.pods:
        return world.pods[namespace, name]
    try:
        address = ip_address(text)
    except ValueError:
        raise CniError(
            BAD_ENVIRONMENT,
            f"{text!r} is no pod that is known and no address",
            f"expected namespace/name of a pod, an IP address, or {NODE}",
        ) from None
    return pod_with(world, address) or address


def pod_with(world: World, address: Address) -> Optional[Pod]:
    holders = (one for one in world.pods.values() if one.counts and address in one.addresses)
    return next(holders, None)


def number_of(end: End, name: str, protocol: int) -> Optional[int]:
    """The port that a pod calls so."""
    if not isinstance(end, Pod):
        return None
    named = (one for one in end.ports if (one.name, one.protocol) == (name, protocol))
    return next((one.number for one in named), None)


def explain(
    world: World,
    source: End,
    destination: End,
    port: int,
    protocol: int = PROTOCOLS["TCP"],
    left_out: Optional[LeftOut] = None,
) -> Explanation:
    """Of a new connection. Services do not matter: the destination is the pod behind them. If the
    answer depends on the IP version, it is that of the version which is denied."""
    found = {
        version: explain_version(world, source, destination, port, protocol, version, left_out)
        for version in _versions(source, destination)
    }
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    version, denied = next((each, one) for each, one in found.items() if not one.allowed)
    said = (one._replace(words=f"over IPv{version}, {one.words}") for one in denied.decisions)
    return Explanation(False, tuple(said))


def explain_version(
    world: World,
    source: End,
    destination: End,
    port: int,
    protocol: int,
    version: int,
    left_out: Optional[LeftOut] = None,
) -> Explanation:
    """The same over one IP version: an ipBlock may have addresses of the other one only."""
    if isinstance(source, Pod) and isinstance(destination, Pod) and source.key == destination.key:
        decision = _open(EGRESS, source, "a pod always reaches itself")
        return Explanation(True, (decision,))
    decisions = []
    over = port, protocol, version, left_out or {}
    if isinstance(source, Pod):
        decisions.append(_decide(world, EGRESS, source, destination, *over))
    if isinstance(destination, Pod):
        decisions.append(_decide(world, INGRESS, destination, source, *over))
    return Explanation(all(one.allowed for one in decisions), tuple(decisions))


def _versions(source: End, destination: End) -> list[int]:
    """Those that both ends have; all if nothing is known of their addresses."""
    found = [4, 6]
    for end in (source, destination):
        addresses = end.addresses if isinstance(end, Pod) else (end,)
        have = {one.version for one in addresses if not isinstance(one, str)}
        if have & {*found}:
            found = [version for version in found if version in have]
    return found


def _decide(
    world: World,
    direction: str,
    pod: Pod,
    other: End,
    port: int,
    protocol: int,
    version: int,
    left_out: LeftOut,
) -> Decision:
    name = "/".join(pod.key)
    if not pod.counts:
        reason = "is on the host's network" if pod.host_network else "has ended"
        return _open(direction, pod, f"{direction} of {name}: it {reason}, so no policy applies")
    if direction == INGRESS and (other == NODE or _is_on_host_of(pod, other)):
        words = f"{direction} of {name}: a node always reaches its own pods"
        return _open(direction, pod, words)
    isolating = [
        world.policies[key]
        for key in sorted(world.policies)
        if _isolates(world.policies[key], direction, pod)
    ]
    if not isolating:
        return _open(direction, pod, f"{direction} of {name}: no policy selects it, so it is open")
    keys = tuple(policy.key for policy in isolating)
    too_large = left_out.get((pod.key, direction), ())
    for policy in isolating:
        if policy.key in too_large:
            continue
        for at, rule in enumerate(policy.rules(direction) or ()):
            because = _allows(world, policy, rule, pod, direction, other, port, protocol, version)
            if because:
                path = f"{policy} {direction.lower()}[{at}]"
                words = f"{direction} of {name}: {path} allows it: {because}"
                return Decision(direction, pod.key, True, keys, path, words)
    listed = ", ".join(map(str, isolating))
    lacking = "none of them has a" if len(isolating) > 1 else "it has no"
    words = f"{direction} of {name}: denied by {listed}: {lacking} rule that allows it"
    if too_large:
        words += f"; {_named(too_large)} too large, and what only they allow is denied"
    return Decision(direction, pod.key, False, keys, "", words)


def _is_on_host_of(pod: Pod, other: End) -> bool:
    """Whether the pod's node sees no difference between the other end and itself."""
    return (
        isinstance(other, Pod)
        and other.host_network
        and bool(pod.node)
        and (other.node == pod.node)
    )


def _named(keys: Collection[Key]) -> str:
    return ", ".join("/".join(key) for key in keys) + (" is" if len(keys) == 1 else " are")


def _open(direction: str, pod: Pod, words: str) -> Decision:
    return Decision(direction, pod.key, True, (), "", words)


def _isolates(policy: Policy, direction: str, pod: Pod) -> bool:
    return (
        policy.namespace == pod.namespace
        and policy.rules(direction) is not None
        and policy.pods.matches(pod.labels)
    )


def _allows(
    world: World,
    policy: Policy,
    rule: Rule,
    pod: Pod,
    direction: str,
    other: End,
    port: int,
    protocol: int,
    version: int,
) -> str:
    """Why the rule does, in words; empty if it does not."""
    matching: list[Optional[Peer]] = [None]
    if rule.peers is not None:
        matching = [one for one in rule.peers if _is_peer(world, policy, one, other, version)]
    for peer in matching:
        who = "everyone" if peer is None else str(peer)
        if rule.ports is None:
            return f"{who}, on every port"
        target = pod if direction == INGRESS else _named_by(peer, other)
        for one in rule.ports:
            if one.protocol == protocol and _has_port(one, target, port):
                return f"{who}, on {one}"
    return ""


def _named_by(peer: Optional[Peer], other: End) -> End:
    """Whose names of ports a rule for egress means: those of pods, but not of an ipBlock's
    addresses, even if a pod has one of them."""
    is_pod = isinstance(other, Pod) and other.counts and (peer is None or peer.block is None)
    return other if is_pod else ""


def _is_peer(world: World, policy: Policy, peer: Peer, other: End, version: int) -> bool:
    if peer.block is not None:
        if isinstance(other, Pod):
            own = (one for one in other.addresses if one.version == version)
            return any(peer.block.contains(address) for address in own)
        return not isinstance(other, str) and peer.block.contains(other)
    return isinstance(other, Pod) and selected(peer, policy.namespace, other, world)


def _has_port(one: Port, target: End, port: int) -> bool:
    if one.port is None:
        return True
    if isinstance(one.port, int):
        return one.port <= port <= (one.end or one.port)
    return isinstance(target, Pod) and any(
        (named.name, named.protocol, named.number) == (one.port, one.protocol, port)
        for named in target.ports
    )
