"""The answer to `headcnictl policy explain`: bounded, and with what makes it doubtful."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Dict, List, Optional

from ...errors import BAD_ENVIRONMENT, CniError, shortened
from ...policy.explain import End, LeftOut, end_of, explain, number_of
from ...policy.objects import PROTOCOLS, Key, Pod, World

MOST_NAMED = 50  # policies of a decision
LONGEST_WORDS = 2000


def explained(
    world: World,
    node_name: str,
    protected: Collection[Key],
    words: Sequence[str],
    left_out: Optional[LeftOut] = None,
) -> Dict[str, Any]:
    """`words` are source, destination and port/protocol. `protected` are the pods of this node
    whose networks have policies. CniError if the question is not understood."""
    if len(words) != 3:
        raise _wrong(" ".join(words), "SRC DST PORT/PROTOCOL")
    source, destination = (end_of(world, word) for word in words[:2])
    port, protocol = _port(words[2], destination)
    found = explain(world, source, destination, port, protocol, left_out)
    notes = [
        note
        for end in (source, destination)
        if isinstance(end, Pod)
        for note in _notes(end, node_name, protected)
    ]
    said = [shortened(one.words, LONGEST_WORDS) for one in found.decisions]
    lines = said or ["neither end is a pod with policies"]
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


def _notes(pod: Pod, node_name: str, protected: Collection[Key]) -> List[str]:
    name = "/".join(pod.key)
    if not pod.counts:
        return []
    if pod.node and pod.node != node_name:
        return [f"the policies of {name} are enforced by its own node, {pod.node}"]
    if pod.key not in protected:
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
