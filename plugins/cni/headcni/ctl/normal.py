"""Which values of the daemon's metrics are outside of what is normal.

The help of a metric says which values are normal, in words. These rules are what of that can be
checked on one node at one moment. A metric that has no such rule is listed with ``anything``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

WEEK = 7 * 86400.0
MOST_DESCRIPTORS = 100
MOST_MEMORY = 256 << 20  # half of what the unit allows
SPARE = 0.1  # of a pool


class Series(NamedTuple):
    """A time series. A histogram's value is its count; the mean and the time within which 99 % of
    the observations were are in seconds."""

    labels: Mapping[str, str]
    value: float
    mean: Optional[float] = None
    p99: Optional[float] = None


# The series outside of what is normal, each with the reason.
Rule = Callable[[Sequence[Series]], List[Tuple[Series, str]]]


def duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def anything(_series: Sequence[Series]) -> List[Tuple[Series, str]]:
    """It depends on the node, the pods or the time."""
    return []


def at_most(limit: float, reason: str) -> Rule:
    return lambda series: [(one, reason) for one in series if one.value > limit]


def at_least(limit: float, reason: str) -> Rule:
    return lambda series: [(one, reason) for one in series if one.value < limit]


def none_of(label: str, *values: str) -> Rule:
    """No series with this label may have counted anything."""
    return lambda series: [
        (one, f"{label} {one.labels[label]}")
        for one in series
        if one.value and one.labels.get(label) in values
    ]


def within(seconds: float, *apart: str) -> Rule:
    """The mean time is below this, and no outcome is an error. Operations ``apart`` may wait."""

    def rule(series: Sequence[Series]) -> List[Tuple[Series, str]]:
        failed = none_of("outcome", "error")(series)
        slow = [
            (one, f"{duration(one.mean)} on average, and {duration(seconds)} is normal")
            for one in series
            if one.mean is not None
            and one.mean > seconds
            and one.labels.get("operation") not in apart
            and one.labels.get("outcome") != "error"
        ]
        return failed + slow

    return rule


def _pools(series: Sequence[Series]) -> List[Tuple[Series, str]]:
    total: Dict[str, float] = {}
    for one in series:
        network = one.labels.get("network", "")
        total[network] = total.get(network, 0.0) + one.value
    return [
        (one, "less than a tenth is free")
        for one in series
        if one.labels.get("state") == "free"
        and one.value <= SPARE * total[one.labels.get("network", "")]
    ]


def _expiry(series: Sequence[Series]) -> List[Tuple[Series, str]]:
    soon = time.time() + WEEK
    return [(one, "less than a week from now") for one in series if 0 < one.value < soon]


_never = at_most(0, "0 is normal")
_faults = at_most(0, "the fault is there: headcnictl diagnose")

RULES: Dict[str, Rule] = {
    "headcni_attachments": anything,
    "headcni_build_info": anything,
    "headcni_cni_calls": anything,
    "headcni_condition": at_least(1, "the condition does not hold: headcnictl status"),
    "headcni_daemon_response_duration_seconds": within(1.0),
    "headcni_dns_setup_duration_seconds": within(0.001),
    "headcni_events_total": none_of(
        "type", "pod-failed", "pod-leaked", "pod-missing", "pod-repaired"
    ),
    "headcni_fault": _faults,
    "headcni_faults_looked_timestamp_seconds": anything,
    "headcni_headscale_request_duration_seconds": within(1.0),
    "headcni_interface_creations_total": none_of("outcome", "error"),
    "headcni_ip_allocation_duration_seconds": within(0.002),
    "headcni_ip_allocation_failures_total": _never,
    "headcni_ip_allocations_total": anything,
    "headcni_ip_pool_addresses": _pools,
    "headcni_kubernetes_request_duration_seconds": within(1.0, "watch"),
    "headcni_kubernetes_token_expiry_timestamp_seconds": _expiry,
    "headcni_links_to_delete": anything,
    "headcni_network_errors_total": _never,
    "headcni_peers": none_of("path", "peer-relay", "derp", "none"),
    "headcni_phase_duration_seconds": anything,
    "headcni_plugin_duration_seconds": within(math.inf),
    "headcni_pod_network_setup_duration_seconds": anything,
    "headcni_pod_queue": anything,
    "headcni_pods": anything,
    "headcni_policies": anything,
    "headcni_policy_apply_duration_seconds": within(2.0),
    "headcni_policy_chains": anything,
    "headcni_policy_denied_packets_total": anything,
    "headcni_policy_repairs_total": _never,
    "headcni_policy_set_elements": anything,
    "headcni_policy_too_large": _never,
    "headcni_policy_unknown_pods": anything,
    "headcni_policy_warnings": _never,
    "headcni_reconcile_changes_total": anything,
    "headcni_reconcile_duration_seconds": within(1.0),
    "headcni_refused_claims": _never,
    "headcni_scrape_errors_total": _never,
    "headcni_tailscale_request_duration_seconds": within(0.1, "ping", "patch-prefs"),
    "process_cpu_seconds_total": anything,
    "process_max_fds": anything,
    "process_open_fds": at_most(MOST_DESCRIPTORS, f"below {MOST_DESCRIPTORS} is normal"),
    "process_resident_memory_bytes": at_most(MOST_MEMORY, "more than half of what is allowed"),
    "process_start_time_seconds": anything,
    "process_virtual_memory_bytes": anything,
    "python_gc_collections_total": anything,
    "python_gc_objects_collected_total": anything,
    "python_gc_objects_uncollectable_total": anything,
}
