"""``headcnictl routes``: the route to each node's pods, as it should be and as the kernel has
it."""

from __future__ import annotations

import argparse
import socket
from contextlib import closing
from typing import Any, Dict, List, Optional, Set

from .. import settings as configuration
from ..errors import CniError
from ..mesh.claims import Heard, hear, plan, rules_of
from ..mesh.kernel_routes import RTN_UNREACHABLE, Route
from ..mesh.localapi import LocalApi
from ..mesh.mesh import PRIORITY, TABLE
from ..mesh.prefix import Prefix
from ..mesh.route_socket import RouteSocket
from ..mesh.settings import cluster_cidrs
from . import node
from .main import NO, OK, CannotTell, show
from .terminal import table

MOST_REFUSALS = 100  # shown; the metric headcni_refused_claims counts them all


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)


def run(args: argparse.Namespace) -> int:
    config = node.load(args)
    own = configuration.pod_cidrs(config).cidrs
    cluster = cluster_cidrs(config, own)
    try:
        status = LocalApi(config.tailscale.socket_path).status()
    except CniError as problem:
        raise CannotTell(f"tailscaled cannot be asked about the other nodes: {problem}") from None
    rules = rules_of(
        cluster,
        tuple(own),
        config.network.service_cidr,
        configuration.node_sizes(config),
        config.tailscale.peer_tags,
    )
    heard = hear(status, rules, {})
    with closing(RouteSocket()) as kernel:
        have = {route.dst: route for route in kernel.routes(TABLE)}
        used = [str(rule) for rule in kernel.rules() if rule.priority in (PRIORITY - 1, PRIORITY)]
        numbers = {route.link for route in have.values() if not _is_block(route)}
        links = {number: kernel.link(index=number) for number in numbers}
    should = plan(heard, rules, [dst for dst, route in have.items() if not _is_block(route)])
    served = _served(heard)
    found: List[Dict[str, Any]] = []
    for dst in sorted({*should.wanted, *should.blocked, *have}):
        route = have.get(dst)
        link = links.get(route.link) if route and not _is_block(route) else None
        found.append(
            {
                "dst": str(dst),
                "node": ",".join(sorted(served.get(dst, ()))),
                "via": _gateway(route),
                "dev": link.name if link else "",
                "state": _state(route, dst in should.wanted),
            }
        )
    answer = {
        "table": TABLE,
        "routes": found,
        "rules": used,
        "alarms": [alarm.message for alarm in should.alarms],
        "warnings": [warning.message for warning in should.warnings],
        "refused": [
            {"dst": str(refusal.prefix), "node": refusal.peer, "reason": refusal.reason}
            for refusal in sorted(should.refusals)[:MOST_REFUSALS]
        ],
    }
    show(answer if args.json else _in_words(answer), args.json)
    well = all(route["state"] in ("ok", "blocked") for route in found)
    return OK if well and used and not should.alarms else NO


def _state(route: Optional[Route], wanted: bool) -> str:
    if route is None:
        return "missing"
    if _is_block(route):
        return "stale" if wanted else "blocked"
    return "ok" if wanted else "stale"


def _is_block(route: Optional[Route]) -> bool:
    return route is not None and route.kind == RTN_UNREACHABLE


def _served(heard: Heard) -> Dict[Prefix, Set[str]]:
    """The peers that serve each accepted prefix."""
    found: Dict[Prefix, Set[str]] = {}
    for claims in heard.claims.values():
        for claim in claims:
            found.setdefault(claim.prefix, set()).add(claim.peer)
    return found


def _gateway(route: Any) -> str:
    if not isinstance(route, Route) or not route.gateway:
        return ""
    return socket.inet_ntop(route.dst.family, route.gateway)


def _in_words(answer: Dict[str, Any]) -> str:
    head = ("PODS", "NODE", "VIA", "DEV", "STATE")
    rows = [
        (
            route["dst"],
            route["node"] or "-",
            route["via"] or "-",
            route["dev"] or "-",
            route["state"],
        )
        for route in answer["routes"]
    ]
    lines = [table(rows, head), f"table {answer['table']}, by:"]
    lines += [f"  {rule}" for rule in answer["rules"]] or ["  no rule: the routes are not used"]
    if answer["refused"]:
        refused = [(claim["dst"], claim["node"], claim["reason"]) for claim in answer["refused"]]
        lines += ["refused:", table(refused, ("PODS", "NODE", "REASON"))]
    lines += [f"ALARM: {alarm}" for alarm in answer["alarms"]]
    lines += [f"WARNING: {warning}" for warning in answer["warnings"]]
    return "\n".join(lines)
