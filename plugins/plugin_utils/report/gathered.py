# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Turn what the nodes and Headscale have answered into the record of a report.

A node may be broken or hostile, so nothing is taken as it comes: each value gets its type and each
list and text its limit. A part that is not as expected counts as not answered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.headcni.mesh.plugins.module_utils.shared import node_status, paths
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.record import (
    MOST_NODES,
    Approval,
    Condition,
    Finding,
    Firewall,
    Node,
    Path,
    Pool,
    Report,
    ReportError,
    Route,
    text,
)

MOST_OF_NODE = 100  # items of each list of a node
MOST_PATHS_OF_NODE = 2000
NO_SITE = "no site"
UNREACHABLE = "Ansible cannot connect to it"


def report(
    hosts: Sequence[str],
    surveys: Mapping[str, Any],
    sites: Mapping[str, Any],
    headscale: Mapping[str, Any],
    now: float,
) -> Report:
    """`surveys` are the results of headcni_survey, `headscale` is the result of headscale_info."""
    if len(hosts) > MOST_NODES:
        raise ReportError(f"{len(hosts)} nodes, expected at most {MOST_NODES}")
    servers = list(_mappings(headscale.get("nodes"), 5 * MOST_NODES))
    nodes = [
        _node(host, _mapping(surveys.get(host)), sites.get(host), servers, now) for host in hosts
    ]
    owners = {address: node.name for node in nodes for address in node.addresses}
    measured, strangers = [], set()
    for node in nodes:
        for raw in _mappings(_mapping(surveys.get(node.name)).get("paths"), MOST_PATHS_OF_NODE):
            target = owners.get(text(raw.get("address")))
            path = _path(node.name, target or "", raw)
            if target is None:
                strangers.add(text(raw.get("name"), 60))
            elif path.sent and target != node.name:
                measured.append(path)
    return Report(
        made_at=now,
        nodes=tuple(nodes),
        paths=tuple(measured),
        headscale=text(headscale.get("version"), 60),
        headscale_problem=_headscale_problem(headscale),
        strangers=tuple(sorted(strangers))[:MOST_OF_NODE],
    )


def _headscale_problem(answer: Mapping[str, Any]) -> str:
    if isinstance(answer.get("nodes"), list):
        return ""
    if answer.get("skipped") or not answer:
        return "headcni_headscale_url and headcni_headscale_api_key are not set"
    return text(answer.get("msg")) or "Headscale did not answer"


def _node(
    name: str, raw: Mapping[str, Any], site: Any, servers: Sequence[Mapping[str, Any]], now: float
) -> Node:
    tailnet, system = _mapping(raw.get("tailnet")), _mapping(raw.get("system"))
    status = _mapping(raw.get("status"))
    problems = {text(k, 40): text(v) for k, v in list(_mapping(raw.get("problems")).items())[:10]}
    known: dict[str, Any] = {
        "name": text(name, 253),
        "site": text(site, 60) or _relay_site(tailnet),
        "tailscaled": text(tailnet.get("version"), 40),
        "tailnet_name": text(tailnet.get("name"), 80),
        "addresses": _texts(tailnet.get("addresses")),
        "kernel": text(system.get("kernel"), 80),
        "distribution": text(system.get("distribution"), 80),
        "python": text(system.get("python"), 40),
        "pools": tuple(map(_pool, _mappings(raw.get("pools"), MOST_OF_NODE))),
        "findings": tuple(map(_finding, _mappings(raw.get("findings"), MOST_OF_NODE))),
        "wrong_routes": tuple(
            map(_route, _mappings(_mapping(raw.get("routes")).get("wrong"), MOST_OF_NODE))
        ),
    }
    if status:
        known |= _of_status(status, now)
    else:
        known["problem"] = problems.pop("status", "") or _why_silent(raw)
    known["unanswered"] = tuple(f"{part}: {why}" for part, why in problems.items())
    server = _at_headscale(servers, known)
    if server is not None:
        known["headscale_online"] = bool(server.get("online"))
        known["approvals"] = tuple(_approvals(known.get("pod_cidrs", ()), server))
    return Node(**known)


def _why_silent(raw: Mapping[str, Any]) -> str:
    if raw.get("unreachable") or not raw:
        return f"{UNREACHABLE}: {text(raw.get('msg'), 300)}" if raw.get("msg") else UNREACHABLE
    return text(raw.get("msg")) or "it gave no status"


def _relay_site(tailnet: Mapping[str, Any]) -> str:
    relay = text(tailnet.get("relay"), 40)
    return f"near relay {relay}" if relay else NO_SITE


def _of_status(status: Mapping[str, Any], now: float) -> dict[str, Any]:
    conditions = tuple(
        Condition(text(one.get("name"), 60), one.get("ok") is True, text(one.get("reason")))
        for one in _mappings(status.get("conditions"), MOST_OF_NODE)
    )
    repaired = _mapping(_mapping(status.get("drift")).get("repaired")).values()
    return {
        "ready": status.get("ready") is True,
        "mode": text(status.get("mode"), 20),
        "version": text(status.get("version"), 40),
        "pods": _whole(status.get("attachments")),
        "pod_cidrs": _texts(status.get("pod_cidrs")),
        "key_expires": _number(status.get("key_expires")) or 0.0,
        "repaired": sum(map(_whole, list(repaired)[:MOST_OF_NODE])),
        "conditions": conditions,
        "firewalls": tuple(
            Firewall(text(one.get("name"), 40), one.get("ok") is True, text(one.get("summary")))
            for one in _mappings(status.get("firewalls"), MOST_OF_NODE)
        ),
        "warnings": tuple(_warnings(status, now)),
    }


def _warnings(status: Mapping[str, Any], now: float) -> Iterator[str]:
    """As headcnictl prints them, without what the report itself knows of paths and pools."""
    wanted: Mapping[str, Any] = {**status, "troubled_peers": (), "pools": ()}
    try:
        said = node_status.warnings(wanted, now)
    except (KeyError, TypeError, ValueError, AttributeError):
        said = ["its status cannot be understood: run site.yml, which upgrades the node"]
    yield from (text(line) for line in said[:MOST_OF_NODE])


def _at_headscale(
    servers: Sequence[Mapping[str, Any]], known: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """The node at Headscale, by its address. One that did not answer is found by its name."""
    own = set(known["addresses"])
    for server in servers:
        if own.intersection(_texts(server.get("addresses"))):
            return server
    if own:
        return None
    named = [s for s in servers if known["name"] in (s.get("name"), s.get("hostname"))]
    return named[0] if len(named) == 1 else None


def _approvals(cidrs: Sequence[str], server: Mapping[str, Any]) -> Iterator[Approval]:
    lists = {
        name: set(_texts(server.get(f"{name}_routes")))
        for name in ("available", "approved", "served")
    }
    for cidr in cidrs:
        available, approved, served = (cidr in lists[name] for name in lists)
        yield Approval(cidr, available, approved, served)


def _pool(raw: Mapping[str, Any]) -> Pool:
    total = _whole(raw.get("total"))
    return Pool(
        text(raw.get("network"), 60),
        text(raw.get("subnet"), 60),
        total,
        min(total, _whole(raw.get("free"))),
        _whole(_mapping(raw.get("counts")).get("leaked")),
    )


def _finding(raw: Mapping[str, Any]) -> Finding:
    return Finding(
        *(text(raw.get("id"), 60), text(raw.get("found")), text(raw.get("means"))),
        *(text(raw.get("run")), text(raw.get("where"), 20), raw.get("sure") is not False),
    )


def _route(raw: Mapping[str, Any]) -> Route:
    return Route(text(raw.get("dst"), 60), text(raw.get("node"), 120), text(raw.get("state"), 20))


def _path(source: str, target: str, raw: Mapping[str, Any]) -> Path:
    sent = min(_whole(raw.get("sent")), 1000)
    kind = raw.get("path") if raw.get("path") in paths.KINDS else paths.NONE
    return Path(
        source,
        target,
        str(kind),
        text(raw.get("through"), 80),
        sent,
        min(sent, _whole(raw.get("lost"))),
        _number(raw.get("latency_ms")),
    )


def _mapping(raw: Any) -> Mapping[str, Any]:
    return raw if isinstance(raw, Mapping) else {}


def _mappings(raw: Any, most: int) -> Iterator[Mapping[str, Any]]:
    if isinstance(raw, (list, tuple)):
        yield from (item for item in raw[:most] if isinstance(item, Mapping))


def _texts(raw: Any) -> tuple[str, ...]:
    return (
        tuple(text(item, 80) for item in raw[:MOST_OF_NODE])
        if isinstance(raw, (list, tuple))
        else ()
    )


def _number(raw: Any) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not math.isfinite(raw):
        return None
    return min(max(float(raw), 0.0), 1e12)


def _whole(raw: Any) -> int:
    # A pool of IPv6 has more addresses than a float can count.
    if isinstance(raw, int) and not isinstance(raw, bool):
        return min(max(raw, 0), 1 << 128)
    return int(_number(raw) or 0)
