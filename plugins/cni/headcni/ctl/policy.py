"""``headcnictl policy``: the network policies of this node's pods, and who reaches whom by them."""

from __future__ import annotations

import argparse
import re
import time
from typing import Any, Dict, List

from ..errors import CniError
from ..settings import control_path
from . import node
from .daemon_client import asked
from .main import NO, OK, CannotTell, show
from .terminal import table

PROTOCOLS = ("tcp", "udp", "sctp")
_PORT = r"[a-z0-9-]{1,15}\Z"  # a number or a name


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="explain SRC DST PORT[/PROTOCOL]",
        help="whether SRC reaches DST: each is a pod as namespace/name, an address, or `node` for "
        "this node; the port is a number, or DST's name for it; the protocol is tcp (default), udp "
        "or sctp. Without it, list this node's pods and their policies",
    )
    node.with_config(parser)
    parser.set_defaults(refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    words = list(args.words)
    if not words:
        return _list(args, _ask(args, "policy"))
    if words[0] != "explain" or len(words) != 4:
        args.refuse(f"{' '.join(words)[:80]!r}: expected explain SRC DST PORT[/PROTOCOL]")
    if any(word.split() != [word] for word in words):
        args.refuse("expected names and addresses without blanks")
    _unused, source, destination, given = words
    port = _port(given)
    if not port:
        protocols = ", ".join(PROTOCOLS)
        args.refuse(f"{given[:80]!r}: expected a port or its name, then / and one of {protocols}")
    answer = _ask(args, f"policy explain {source} {destination} {port}")
    show(answer if args.json else "\n".join(answer["lines"]), args.json)
    return OK if answer["allowed"] else NO


def _port(text: str) -> str:
    """With its protocol; empty if it is none. The daemon knows which ports a pod has named."""
    port, sign, protocol = text.partition("/")
    protocol = protocol.lower() if sign else PROTOCOLS[0]
    return f"{port}/{protocol}" if re.match(_PORT, port) and protocol in PROTOCOLS else ""


def _ask(args: argparse.Namespace, question: str) -> Dict[str, Any]:
    path = control_path(node.load(args))
    try:
        with asked(question, path) as answers:
            answer = next(answers, None)
    except CniError as problem:
        raise CannotTell(str(problem)) from None
    if answer is None:
        raise CannotTell("headcni-daemon ended while it was asked")
    return answer


def _list(args: argparse.Namespace, answer: Dict[str, Any]) -> int:
    show(answer if args.json else _in_words(answer), args.json)
    return NO if answer["problems"] else OK


def _in_words(answer: Dict[str, Any]) -> str:
    since = "not in force yet"
    if answer["since"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(answer["since"]))
        since = f"in force since {when}"
    lines = [f"{answer['policies']} network policies from {answer['source']}, {since}"]
    rows = [
        (
            f"{pod['namespace']}/{pod['pod']}",
            ",".join(pod["addresses"]),
            _policies(pod, "ingress", answer["unknown"]),
            _policies(pod, "egress", answer["unknown"]),
        )
        for pod in sorted(answer["pods"], key=lambda pod: (pod["namespace"], pod["pod"]))
    ]
    lines.append(table(rows, ("POD", "ADDRESSES", "INGRESS", "EGRESS")))
    denied = [
        (_denier(entry), entry["direction"] or "-", str(entry["packets"]))
        for entry in answer["denied"]
        if entry["packets"]
    ]
    if denied:
        lines += ["denied packets:", table(denied, ("POLICY", "DIRECTION", "PACKETS"))]
        if answer["more_denied"]:
            lines.append(f"and {answer['more_denied']} more")
    lines += [f"WARNING: {problem}" for problem in answer["problems"]]
    return "\n".join(lines)


def _denier(entry: Dict[str, Any]) -> str:
    """What belongs to no policy are packets of pods that were not known yet."""
    return f"{entry['namespace']}/{entry['policy']}" if entry["namespace"] else "pods not known yet"


def _policies(pod: Dict[str, Any], direction: str, unknown: str) -> str:
    if not pod["known"]:
        return f"not known: {unknown}"
    names: List[str] = pod[direction]
    return ",".join(names) or "open"
