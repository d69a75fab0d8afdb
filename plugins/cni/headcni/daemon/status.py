"""The daemon's status, which headcnictl shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .. import __version__
from .. import settings as configuration
from ..ipam.allocate import Ipam
from ..mesh import claims
from ..shared import paths
from .observe.monitor import ask
from .policies import disabled

if TYPE_CHECKING:
    from .daemon import Daemon

MOST_MISTAKES = 20  # the mistakes in annotations that are shown
MOST_PEERS = 50  # the relayed and unreachable peers that are named


def status_of(daemon: Daemon) -> dict[str, Any]:
    """All that headcnictl shows of the daemon."""
    conditions = ask(daemon.conditions)
    return {
        "node": os.uname().nodename,
        "config": daemon.path,
        "version": __version__,
        "pid": os.getpid(),
        "since": daemon.began,
        "mode": daemon.config.tailscale.mode,
        "interface": daemon.config.tailscale.interface,
        "answers": configuration.answered(daemon.config),
        "pod_cidrs": [str(cidr) for cidr in daemon.pod_cidrs],
        "cluster_cidrs": [str(cidr) for cidr in daemon.cluster_cidrs],
        "ready": all(condition.ok for condition in conditions),
        "conditions": [{"name": c.name, "ok": c.ok, "reason": c.message} for c in conditions],
        "firewalls": [
            {
                "name": firewall.name,
                "ok": not firewall.problem,
                "summary": firewall.in_words(),
            }
            for firewall in daemon.firewalls.found
        ],
        "tailnet_access": daemon.tailnet.status(),
        "policies": daemon.policies.status() if daemon.policies is not None else None,
        "alarms": [alarm._asdict() for alarm in daemon.conditions.report.alarms],
        "warnings": [warning._asdict() for warning in warnings_of(daemon)],
        "kubernetes_token_expires": daemon.token.expires if daemon.token is not None else 0.0,
        "attachments": sum(daemon.store.attachment_counts().values()),
        "pools": _pools(daemon),
        **_peers(daemon),
        **daemon.faults.status(),
        "drift": daemon.metrics.drift(),
        "calls": daemon.server.calls,
        "monitor": daemon.monitor.where if daemon.monitor is not None else "",
    }


def _pools(daemon: Daemon) -> list[dict[str, Any]]:
    """How full the pools of the networks that have pods are."""
    ipam = Ipam(daemon.store)
    return [
        {**usage._asdict(), "free": usage.free}
        for network in daemon.store.attachment_counts()
        for usage in ipam.usage(network)
    ]


def _peers(daemon: Daemon) -> dict[str, Any]:
    """The peers with pods by the path to them, and those whose path is relayed or missing. Without
    tailscaled's answer only the reason."""
    found = daemon.paths.now()
    if found.problem:
        return {"peers": None, "peers_problem": found.problem}
    troubled = [peer for peer in found.peers if peer.path.kind in (*paths.RELAYED, paths.NONE)]
    return {
        "peers": found.counts(),
        "troubled_peers": [
            {"name": peer.name, "path": peer.path.kind, "through": peer.path.in_words}
            for peer in troubled[:MOST_PEERS]
        ],
        "key_expires": found.key_expires,
    }


def warnings_of(daemon: Daemon) -> list[claims.Alarm]:
    found = list(daemon.conditions.report.warnings)
    if daemon.token is not None and (said := daemon.token.trouble()):
        found.append(claims.Alarm("kubernetes-token", "", (), said))
    found += [claims.Alarm("tailnet-access", "", (), limit) for limit in _doubtful_limits(daemon)]
    policies = daemon.policies
    found += [
        claims.Alarm("network-policy", "", (), warning)
        for warning in (
            policies.warnings()
            if policies is not None
            else disabled.promised(daemon.store, daemon.began)
        )
    ]
    return found


def _doubtful_limits(daemon: Daemon) -> Iterator[str]:
    """Why the limit of a namespace may differ from its annotation."""
    for name, mistake in list(daemon.tailnet.mistakes.items())[:MOST_MISTAKES]:
        yield f"namespace {name}: {mistake}"
    pods, annotations = daemon.pods, daemon.annotations
    if pods is None or annotations is None or pods.condition.message:
        return  # the problem of both is reported for pods
    if annotations.problem:
        yield f"annotations of namespaces cannot be watched: {annotations.problem}"
