"""The gauges of the daemon, which are read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Callable, Tuple

from ...condition import Condition
from ...ipam.allocate import Ipam
from ...mesh.claims import REASONS, Refusal
from ...store import Store
from .metrics import Metrics

if TYPE_CHECKING:
    from ..faults import Faults
    from ..policies.policies import Policies


def measure(
    metrics: Metrics,
    store: Callable[[], Store],
    calls: Callable[[], int],
    conditions: Callable[[], Iterable[Condition]],
    refusals: Callable[[], Iterable[Refusal]],
    peers: Callable[[], dict[Tuple[str, ...], float]],
    faults: Faults,
) -> None:
    metrics.conditions(lambda: ((condition.name, condition.ok) for condition in conditions()))
    metrics.gauge(
        "cni_calls",
        "Calls of the plugin that are being served or are waiting. Normal: 0; more for a moment.",
        lambda: float(calls()),
    )
    metrics.gauge(
        "attachments",
        "Pod interfaces of this node. Normal: one for each pod that does not use the host network.",
        lambda: float(sum(store().attachment_counts().values())),
    )
    metrics.gauge(
        "links_to_delete",
        "Network links of deleted pods that await their deletion. Normal: 0; more for a moment.",
        lambda: float(len(store().tombstones())),
    )
    metrics.gauge(
        "ip_pool_addresses",
        "Addresses of this node's pools, by their state. Normal: more than a tenth is free.",
        lambda: _pools(store()),
        ("network", "state"),
    )
    metrics.gauge(
        "refused_claims",
        "Pod ranges that peers advertise and that this node refuses, by reason. Normal: 0.",
        lambda: _by_reason(refusals()),
        ("reason",),
    )
    metrics.gauge(
        "peers",
        "Peers with pods, by the path to them. Normal: direct, and idle without traffic.",
        peers,
        ("path",),
    )
    metrics.gauge(
        "fault",
        "Faults that the daemon has found since its start, by their id in headcnictl diagnose:"
        " 1 for those that are still there. Normal: 0, or none.",
        faults.counts,
        ("fault",),
    )
    metrics.gauge(
        "faults_looked_timestamp_seconds",
        "When the daemon last looked for faults. Normal: a minute ago, or less.",
        lambda: faults.looked_at,
    )


def measure_policies(metrics: Metrics, policies: Policies) -> None:
    """Only on a node that enforces network policies."""

    def report(field: str) -> Callable[[], float]:
        return lambda: float(getattr(policies.enforcer.report(), field))

    metrics.gauge(
        "policies",
        "Network policies of the cluster. Normal: as many as Kubernetes or the files have.",
        report("policies"),
    )
    metrics.gauge(
        "policy_chains",
        "Different combinations of network policies that select pods of this node."
        " Normal: far below the number of pods.",
        report("profiles"),
    )
    metrics.gauge(
        "policy_set_elements",
        "Elements of all sets and maps of the rules for network policies."
        " Normal: grows with the pods that policies select.",
        report("elements"),
    )
    metrics.gauge(
        "policy_unknown_pods",
        "Pods of this node whose labels are not known yet. Normal: 0, or more for moments.",
        lambda: float(sum(not pod.known for pod in policies.enforcer.report().pods)),
    )
    metrics.gauge(
        "policy_warnings",
        "What keeps network policies from being enforced as written, as headcnictl shows it."
        " Normal: 0.",
        lambda: float(len(policies.warnings())),
    )
    metrics.gauge(
        "policy_too_large",
        "Network policies that are too large for the rules of a pod of this node, so that what only"
        " they allow is denied. Normal: 0.",
        lambda: float(len(policies.too_large())),
    )
    metrics.counted(
        "policy_repairs",
        "Times that somebody had changed the rules for network policies. Normal: 0.",
        report("repairs"),
    )
    metrics.counted(
        "policy_denied_packets",
        "Packets that network policies denied to and from pods of this node."
        " Normal: depends on the policies; sudden growth means a missing rule or an attack.",
        policies.denied_packets,
        ("namespace", "policy", "direction"),
    )


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
