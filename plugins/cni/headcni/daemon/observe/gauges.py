"""The gauges of the daemon, which are read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable, Tuple

from ...condition import Condition
from ...ipam.allocate import Ipam
from ...mesh.claims import REASONS, Refusal
from ...store import Store
from .metrics import Metrics


def measure(
    metrics: Metrics,
    store: Callable[[], Store],
    calls: Callable[[], int],
    conditions: Callable[[], Iterable[Condition]],
    refusals: Callable[[], Iterable[Refusal]],
    peers: Callable[[], dict[Tuple[str, ...], float]],
) -> None:
    metrics.conditions(lambda: ((condition.name, condition.ok) for condition in conditions()))
    metrics.gauge("cni_calls", "Calls at work or waiting.", lambda: float(calls()))
    metrics.gauge(
        "attachments",
        "Pod interfaces.",
        lambda: float(sum(store().attachment_counts().values())),
    )
    metrics.gauge(
        "links_to_delete",
        "Links of deleted pods that are still there.",
        lambda: float(len(store().tombstones())),
    )
    metrics.gauge("ip_pool_addresses", "Addresses.", lambda: _pools(store()), ("network", "state"))
    metrics.gauge(
        "refused_claims",
        "Pod ranges that peers serve and that get no route, by the reason.",
        lambda: _by_reason(refusals()),
        ("reason",),
    )
    metrics.gauge("peers", "Peers with pods, by the path to them.", peers, ("path",))


def _by_reason(refusals: Iterable[Refusal]) -> dict[Tuple[str, ...], float]:
    found: dict[Tuple[str, ...], float] = {(reason,): 0.0 for reason in REASONS}
    for refusal in refusals:
        found[(refusal.reason,)] += 1
    return found


def _pools(store: Store) -> dict[Tuple[str, ...], float]:
    found: dict[Tuple[str, ...], float] = {}
    ipam = Ipam(store)
    for network in store.attachment_counts():
        for usage in ipam.usage(network):
            for state, count in (("leased", usage.leased), ("free", usage.free)):
                key = (network, state)
                found[key] = found.get(key, 0.0) + count
    return found
