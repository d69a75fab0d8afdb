"""``headcnictl routes``: the route to each node's pods as it should be, as the kernel has it, as
tailscaled has it and as Headscale approved it; and the path to each node."""

from __future__ import annotations

import argparse
import socket
import time
from contextlib import closing, suppress
from typing import Any, Dict, List, Optional, Set

from .. import settings as configuration
from ..errors import CniError
from ..mesh import paths
from ..mesh.claims import Heard, Plan, Rules, hear, plan, rules_of
from ..mesh.kernel_routes import RTN_UNREACHABLE, Link, Route
from ..mesh.localapi import LocalApi, Status
from ..mesh.mesh import PRIORITY, TABLE
from ..mesh.prefix import Prefix
from ..mesh.route_socket import RouteSocket
from ..mesh.settings import cluster_cidrs
from ..settings import DaemonConfig
from ..shared.node_status import span
from ..shared.paths import DIRECT, IDLE, NONE
from . import node
from .main import NO, OK, CannotTell, show
from .terminal import BAD, DOUBTFUL, FAINT, GOOD, paint, table

MOST_REFUSALS = 100  # shown; the metric headcni_refused_claims counts them all
FINE = ("ok", "blocked", "kept")
COLOURS = {"ok": GOOD, "blocked": FAINT, "kept": DOUBTFUL, "missing": BAD, "stale": BAD}


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)
    parser.add_argument(
        "--no-ping",
        action="store_true",
        help="do not have tailscaled ping the nodes: no latency, and no path to idle nodes",
    )


def run(args: argparse.Namespace) -> int:
    config = node.load(args)
    api = LocalApi(config.tailscale.socket_path)
    try:
        status = api.status()
        advertised = tuple(map(str, api.prefs().get("AdvertiseRoutes") or ()))
    except CniError as problem:
        raise CannotTell(f"tailscaled cannot be asked about the other nodes: {problem}") from None
    rules = claim_rules(config)
    heard = hear(status, rules, {})
    with closing(RouteSocket()) as kernel:
        have = {route.dst: route for route in kernel.routes(TABLE)}
        used = [str(rule) for rule in kernel.rules() if rule.priority in (PRIORITY - 1, PRIORITY)]
        numbers = {route.link for route in have.values() if not is_block(route)}
        links = {number: kernel.link(index=number) for number in numbers}
    should = plan(heard, rules, [dst for dst, route in have.items() if not is_block(route)])
    answer: Dict[str, Any] = {
        "table": TABLE,
        "routes": _compared(status, heard, rules, should, have, links),
        "own": [
            {
                "dst": str(own),
                "advertised": str(own) in advertised,
                "approved": str(own) in status.served,
            }
            for own in rules.own
        ],
        "peers": _peers(api, heard, args.no_ping),
        "rules": used,
        "alarms": [alarm.message for alarm in should.alarms],
        "warnings": [warning.message for warning in should.warnings],
        "refused": [
            {"dst": str(refusal.prefix), "node": refusal.peer, "reason": refusal.reason}
            for refusal in sorted(should.refusals)[:MOST_REFUSALS]
        ],
    }
    show(answer if args.json else _in_words(answer), args.json)
    well = all(route["state"] in FINE for route in answer["routes"])
    return OK if well and used and not should.alarms else NO


def claim_rules(config: DaemonConfig) -> Rules:
    """Which claims of peers this node's daemon accepts."""
    own = configuration.pod_cidrs(config).cidrs
    return rules_of(
        cluster_cidrs(config, own),
        tuple(own),
        config.network.service_cidr,
        configuration.node_sizes(config),
        config.tailscale.peer_tags,
    )


def is_block(route: Optional[Route]) -> bool:
    return route is not None and route.kind == RTN_UNREACHABLE


def _compared(
    status: Status,
    heard: Heard,
    rules: Rules,
    should: Plan,
    have: Dict[Prefix, Route],
    links: Dict[int, Optional[Link]],
) -> List[Dict[str, Any]]:
    served, forwarded = _served(heard), _forwarded(status)
    away = _away(status, heard, rules)
    found = []
    for dst in sorted({*should.wanted, *should.blocked, *have}):
        route = have.get(dst)
        link = links.get(route.link) if route is not None and not is_block(route) else None
        state = _state(route, dst in should.wanted)
        found.append(
            {
                "dst": str(dst),
                "node": ",".join(sorted(served.get(dst, ()))),
                "desired": "route" if dst in should.wanted else "none",
                "via": _gateway(route),
                "dev": link.name if link else "",
                "tailscaled": sorted(forwarded.get(str(dst), ())),
                "approved": sorted(peer.name for peer in status.peers if str(dst) in peer.primary),
                "state": "kept" if state == "stale" and away and not is_block(route) else state,
            }
        )
        if dst in should.blocked:
            found[-1]["desired"] = "unreachable"
    return found


def _away(status: Status, heard: Heard, rules: Rules) -> bool:
    """Whether a node is offline whose routes Headscale has withdrawn: the daemon, which remembers
    them, keeps them."""
    return any(
        not peer.online
        and not peer.expired
        and peer.id not in heard.claims
        and (not heard.checked or not set(rules.tags).isdisjoint(peer.tags))
        for peer in status.peers
    )


def _state(route: Optional[Route], wanted: bool) -> str:
    if route is None:
        return "missing"
    if is_block(route):
        return "stale" if wanted else "blocked"
    return "ok" if wanted else "stale"


def _served(heard: Heard) -> Dict[Prefix, Set[str]]:
    """The peers that serve each accepted prefix."""
    found: Dict[Prefix, Set[str]] = {}
    for claims in heard.claims.values():
        for claim in claims:
            found.setdefault(claim.prefix, set()).add(claim.peer)
    return found


def _forwarded(status: Status) -> Dict[str, Set[str]]:
    """The peers to which tailscaled sends each prefix."""
    found: Dict[str, Set[str]] = {}
    for peer in status.peers:
        for prefix in peer.routes:
            found.setdefault(prefix, set()).add(peer.name)
    return found


def _peers(api: LocalApi, heard: Heard, quiet: bool) -> List[Dict[str, Any]]:
    found = paths.read(api, heard.claims).peers
    if not quiet:
        found = paths.pinged(api, found)
    return [
        {
            "node": peer.name,
            "online": peer.online,
            "path": peer.path.kind,
            "through": peer.path.in_words,
            "last_handshake": peer.handshake,
            "latency_ms": peer.path.latency_ms,
            "received_bytes": peer.received,
            "sent_bytes": peer.sent,
        }
        for peer in found
    ]


def _gateway(route: Optional[Route]) -> str:
    if route is None or not route.gateway:
        return ""
    with suppress(OSError, ValueError):
        return socket.inet_ntop(route.dst.family, route.gateway)
    return ""


def _in_words(answer: Dict[str, Any]) -> str:
    head = ("PODS", "NODE", "DESIRED", "KERNEL", "TAILSCALED", "HEADSCALE", "STATE")
    rows = [
        (
            route["dst"],
            route["node"] or "-",
            route["desired"],
            _kernel(route),
            ",".join(route["tailscaled"]) or "-",
            ",".join(route["approved"]) or "-",
            paint(route["state"], COLOURS[route["state"]]),
        )
        for route in answer["routes"]
    ]
    lines = [table(rows, head)]
    for own in answer["own"]:
        said = "advertised" if own["advertised"] else paint("NOT advertised", BAD)
        said += ", " + ("approved" if own["approved"] else paint("NOT approved", BAD))
        late = "" if own["approved"] else " (Headscale may tell this node minutes late)"
        lines.append(f"own: {own['dst']}: {said}{late}")
    lines.append(f"table {answer['table']}, by:")
    lines += [f"  {rule}" for rule in answer["rules"]] or [
        paint("  no rule: the routes are not used", BAD)
    ]
    if answer["peers"]:
        lines.append(_peer_table(answer["peers"]))
    if answer["refused"]:
        refused = [(claim["dst"], claim["node"], claim["reason"]) for claim in answer["refused"]]
        lines += ["refused:", table(refused, ("PODS", "NODE", "REASON"))]
    lines += [paint(f"ALARM: {alarm}", BAD) for alarm in answer["alarms"]]
    lines += [paint(f"WARNING: {warning}", DOUBTFUL) for warning in answer["warnings"]]
    return "\n".join(lines)


def _kernel(route: Dict[str, Any]) -> str:
    if route["state"] == "missing":
        return "-"
    if not route["dev"]:
        return "unreachable"
    return route["dev"] if not route["via"] else f"{route['dev']} {route['via']}"


def _peer_table(peers: List[Dict[str, Any]]) -> str:
    head = ("NODE", "PATH", "THROUGH", "HANDSHAKE", "LATENCY", "RECEIVED", "SENT")
    now = time.time()
    rows = [
        (
            peer["node"],
            paint(peer["path"], _COLOUR_OF.get(peer["path"], DOUBTFUL)),
            peer["through"] or "-",
            f"{span(now - peer['last_handshake'])} ago" if peer["last_handshake"] else "never",
            f"{peer['latency_ms']:.1f} ms" if peer["latency_ms"] is not None else "-",
            amount(peer["received_bytes"]),
            amount(peer["sent_bytes"]),
        )
        for peer in peers
    ]
    return table(rows, head)


_COLOUR_OF = {DIRECT: GOOD, IDLE: FAINT, NONE: BAD}


def amount(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
