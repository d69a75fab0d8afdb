"""The answer to `headcnictl policy explain`: bounded, and with what makes it doubtful."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Dict, List, NamedTuple

from ...errors import BAD_ENVIRONMENT, CniError, shortened
from ...model import Address
from ...policy.explain import NODE, End, Explanation, LeftOut, end_of, explain, number_of
from ...policy.objects import PROTOCOLS, Key, Pod, World

_CLOSED = "its labels are not known yet, so it is closed (network.unknownPolicy)"
MOST_NAMED = 50  # policies of a decision
LONGEST_WORDS = 2000


class Here(NamedTuple):
    """What this node knows beside the policies."""

    node: str  # its name
    protected: Collection[Key]  # its pods whose networks have policies
    left_out: LeftOut = MappingProxyType({})
    addresses: Collection[Address] = ()  # its own
    closed: Mapping[Address, Key] = MappingProxyType(
        {}
    )  # pods that are not known, and therefore closed


def explained(world: World, here: Here, words: Sequence[str]) -> Dict[str, Any]:
    """`words` are source, destination and port/protocol. CniError if the question is not
    understood."""
    if len(words) != 3:
        raise _wrong(" ".join(words), "SRC DST PORT/PROTOCOL")
    source, destination = (end_of(world, word) for word in words[:2])
    port, protocol = _port(words[2], destination)
    notes = []
    if not isinstance(source, (Pod, str)) and source in here.addresses:
        notes.append(f"{source} is an address of this node")
        source = NODE
    if source == NODE and isinstance(destination, Pod) and destination.node not in ("", here.node):
        name = "/".join(destination.key)
        raise _wrong(NODE, f"an address of this node: {name} is on {destination.node}")
    found = explain(world, source, destination, port, protocol, here.left_out)
    for end in (source, destination):
        if isinstance(end, Pod):
            notes += _notes(end, here)
    if destination == NODE and not found.allowed:
        notes.append("an ipBlock may allow an address of this node: ask with the address")
    said = [shortened(one.words, LONGEST_WORDS) for one in found.decisions]
    lines = said or ["neither end is a pod with policies"]
    closed = [one for one in (source, destination) if not isinstance(one, (Pod, str))]
    if unknown := [one for one in closed if one in here.closed]:
        found = Explanation(False, found.decisions)
        lines = [f"{one} belongs to {'/'.join(here.closed[one])}: {_CLOSED}" for one in unknown]
    verdict = "allowed" if found.allowed else "denied"
    return {
        "allowed": found.allowed,
        "port": port,
        "protocol": next(name for name, number in PROTOCOLS.items() if number == protocol),
        "decisions": [
            {
                "direction": one.direction,
                "pod": "/".join(one.pod),
                "allowed": one.allowed,
                "isolated_by": ["/".join(key) for key in one.isolated_by[:MOST_NAMED]],
                "policies": len(one.isolated_by),
                "rule": one.rule,
                "words": words,
            }
            for one, words in zip(found.decisions, said)
        ],
        "notes": notes,
        "lines": [*lines, *(f"NOTE: {note}" for note in notes), verdict],
    }


def _notes(pod: Pod, here: Here) -> List[str]:
    name = "/".join(pod.key)
    if pod.host_network and pod.node != here.node:
        return [f"{name} is on the host's network of {pod.node}: ask with an address of that node"]
    if not pod.counts:
        return []
    if pod.node and pod.node != here.node:
        return [f"the policies of {name} are enforced by its own node, {pod.node}"]
    if pod.key not in here.protected:
        return [f"{name} has no interface with network policies on this node: they do not apply"]
    return []


def _port(text: str, destination: End) -> tuple[int, int]:
    """A number, or the name that the destination has for it."""
    name, slash, protocol_name = text.partition("/")
    protocol = PROTOCOLS.get(protocol_name.upper() if slash else "TCP", 0)
    number = int(name[:9]) if name.isdecimal() else number_of(destination, name, protocol) or 0
    if not protocol or not 0 < number < 65536:
        protocols = ", ".join(one.lower() for one in PROTOCOLS)
        raise _wrong(text, f"a port from 1 to 65535 or its name at DST, with / and {protocols}")
    return number, protocol


def _wrong(given: str, expected: str) -> CniError:
    return CniError(BAD_ENVIRONMENT, f"{shortened(given, 200)!r} is not understood", expected)
