"""``headcnictl routes``: the way to each node's pods, as it should be and as the kernel has it."""

from __future__ import annotations

import argparse
import socket
from contextlib import closing
from typing import Any, Dict, List

from ..daemon import config as configuration
from ..daemon.kernel_routes import Route, RouteSocket
from ..daemon.pod_traffic import cluster_cidrs
from ..daemon.routes import PRIORITY, TABLE, Claim, claims_of, plan, prefixes
from ..daemon.tailscale import LocalApi
from ..errors import CniError
from . import node
from .main import NO, OK, CannotTell, show


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)


def run(args: argparse.Namespace) -> int:
    config = node.load(args)
    own = configuration.pod_cidrs(config).cidrs
    cluster = cluster_cidrs(config, own)
    try:
        peers = LocalApi(config.tailscale.socket_path).status().peers
    except CniError as problem:
        raise CannotTell(f"tailscaled cannot be asked about the other nodes: {problem}") from None
    claims = [
        claim for those in claims_of(peers, prefixes(cluster), {}).values() for claim in those
    ]
    wanted, alarms = plan(claims, prefixes(own))
    with closing(RouteSocket()) as kernel:
        have = {route.dst: route for route in kernel.routes(TABLE)}
        rules = [str(rule) for rule in kernel.rules() if rule.priority in (PRIORITY - 1, PRIORITY)]
        links = {route.link: kernel.link(index=route.link) for route in have.values()}
    found: List[Dict[str, Any]] = []
    for dst in sorted(wanted | set(have)):
        route = have.get(dst)
        state = "ok" if route and dst in wanted else "missing" if dst in wanted else "stale"
        link = links.get(route.link) if route else None
        found.append(
            {
                "dst": str(dst),
                "node": ",".join(_who(dst, claims)),
                "via": _gateway(route),
                "dev": link.name if link else "",
                "state": state,
            }
        )
    answer = {
        "table": TABLE,
        "routes": found,
        "rules": rules,
        "alarms": [alarm.message for alarm in alarms],
    }
    show(answer if args.json else _in_words(answer), args.json)
    return OK if not alarms and all(one["state"] == "ok" for one in found) and rules else NO


def _who(dst: Any, claims: List[Claim]) -> List[str]:
    return sorted({claim.peer for claim in claims if claim.prefix == dst})


def _gateway(route: Any) -> str:
    if not isinstance(route, Route) or not route.gateway:
        return ""
    return socket.inet_ntop(route.dst.family, route.gateway)


def _in_words(answer: Dict[str, Any]) -> str:
    head = ("PODS", "NODE", "VIA", "DEV", "STATE")
    rows = [
        (one["dst"], one["node"] or "-", one["via"] or "-", one["dev"] or "-", one["state"])
        for one in answer["routes"]
    ]
    lines = [node.table(rows, head), f"table {answer['table']}, by:"]
    lines += [f"  {rule}" for rule in answer["rules"]] or ["  no rule: the routes are not used"]
    lines += [f"ALARM: {alarm}" for alarm in answer["alarms"]]
    return "\n".join(lines)
