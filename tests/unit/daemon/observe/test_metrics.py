"""Every measure has its name, moves when it should, and grows with nothing unbounded."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headcni import errors
from headcni.ctl.explanations import CODES
from headcni.daemon.observe.metrics import Metrics, error_type
from headcni.model import IpamConfig, NetworkConfig, PodRef

NETWORK = NetworkConfig("1.1.0", "pods", IpamConfig("headcni-ipam", strategy="random"))
POD = PodRef("shop", "web-0", "1")
PHASES = {"config": 0.0004, "ipam": 0.0007, "link": 0.004, "firewall": 0.001, "dns": 0.00001}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("1.2.3")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"headcni_{name}", labels)


def add(metrics: Metrics, code: int = 0, phases: dict[str, float] | None = None) -> None:
    metrics.call("ADD", NETWORK, POD, 0.008, code, PHASES if phases is None else phases)


def test_an_add_moves_every_measure_of_a_pods_set_up(metrics):
    add(metrics)
    assert value(metrics, "pod_network_setup_duration_seconds_count", namespace="shop") == 1
    assert value(metrics, "pod_network_setup_duration_seconds_sum", namespace="shop") == 0.008
    assert value(metrics, "ip_allocations_total", strategy="random") == 1
    assert value(metrics, "ip_allocation_duration_seconds_count", strategy="random") == 1
    assert value(metrics, "interface_creations_total", outcome="ok") == 1
    assert value(metrics, "dns_setup_duration_seconds_count") == 1
    assert value(metrics, "plugin_duration_seconds_count", verb="ADD", outcome="ok") == 1
    assert value(metrics, "phase_duration_seconds_count", phase="firewall") == 1


def test_milliseconds_fall_into_buckets_of_their_own(metrics):
    add(metrics)
    name = "pod_network_setup_duration_seconds_bucket"
    assert value(metrics, name, namespace="shop", le="0.0075") == 0
    assert value(metrics, name, namespace="shop", le="0.01") == 1


def test_an_allocation_that_fails_is_a_failure_of_ipam_and_of_nothing_else(metrics):
    add(metrics, errors.TRY_AGAIN, {"config": 0.001, "ipam": 0.002})
    failure = {"strategy": "random", "error_type": "try_again"}
    assert value(metrics, "ip_allocation_failures_total", **failure) == 1
    assert value(metrics, "ip_allocations_total", strategy="random") is None
    assert value(metrics, "network_errors_total", error_type="try_again") == 1
    assert value(metrics, "plugin_duration_seconds_count", verb="ADD", outcome="error") == 1
    assert value(metrics, "pod_network_setup_duration_seconds_count", namespace="shop") is None


def test_an_interface_that_cannot_be_made_leaves_the_allocation_a_success(metrics):
    add(metrics, errors.KERNEL, {"config": 0.001, "ipam": 0.002, "link": 0.003})
    assert value(metrics, "interface_creations_total", outcome="error") == 1
    assert value(metrics, "ip_allocations_total", strategy="random") == 1
    assert value(metrics, "network_errors_total", error_type="kernel") == 1


def test_a_repeated_add_allocates_nothing(metrics):
    add(metrics, phases={"config": 0.001})
    assert value(metrics, "ip_allocations_total", strategy="random") is None
    assert value(metrics, "pod_network_setup_duration_seconds_count", namespace="shop") == 1


def test_another_ipam_plugin_has_no_strategy_of_ours(metrics):
    other = NetworkConfig("1.1.0", "pods", IpamConfig("host-local", strategy="sequential"))
    metrics.call("ADD", other, POD, 0.008, 0, PHASES)
    assert value(metrics, "ip_allocations_total", strategy="delegated") == 1


def test_a_call_that_was_not_understood_is_counted_too(metrics):
    metrics.call("FETCH", None, PodRef(), 0.001, errors.BAD_ENVIRONMENT, {})
    metrics.call("ADD", None, PodRef(), 0.001, 999, {"config": 0.001})
    assert value(metrics, "plugin_duration_seconds_count", verb="other", outcome="error") == 1
    assert value(metrics, "network_errors_total", error_type="bad_environment") == 1
    assert value(metrics, "network_errors_total", error_type="other") == 1


def test_every_code_of_ours_has_a_type_of_its_own():
    types = {each.number: error_type(each.number) for each in CODES}
    assert "other" not in types.values()
    assert len(set(types.values())) == len(types)
    assert types[errors.TRY_AGAIN] == "try_again"


def test_requests_are_timed_and_a_failed_one_is_told_apart(metrics):
    for ask, name in ((metrics.headscale, "headscale"), (metrics.tailscale, "tailscale")):
        with ask("status"):
            pass
        with pytest.raises(OSError, match="gone"), ask("status"):
            raise OSError("gone")
        for outcome in ("ok", "error"):
            seen = {"operation": "status", "outcome": outcome}
            assert value(metrics, f"{name}_request_duration_seconds_count", **seen) == 1


def test_the_daemons_other_parts_count(metrics):
    metrics.responded(0.006)
    metrics.event("created")
    metrics.failed("netlink")
    metrics.reconciled("routes", 0.01, added=3, removed=0)
    metrics.reconciled("routes", 0.01, ok=False)
    metrics.allocated("sequential", 0.0002)
    assert value(metrics, "daemon_response_duration_seconds_count") == 1
    assert value(metrics, "events_total", type="created") == 1
    assert value(metrics, "network_errors_total", error_type="netlink") == 1
    assert value(metrics, "reconcile_changes_total", part="routes", action="added") == 3
    assert value(metrics, "reconcile_duration_seconds_count", part="routes", outcome="ok") == 1
    assert value(metrics, "reconcile_duration_seconds_count", part="routes", outcome="error") == 1
    assert value(metrics, "ip_allocations_total", strategy="sequential") == 1


def test_gauges_are_read_at_each_scrape(metrics):
    pool: dict[Any, float] = {("pods", "used"): 3.0, ("pods", "total"): 253.0}
    metrics.gauge("pool_addresses", "Addresses.", lambda: pool, ("network", "state"))
    metrics.gauge("routes", "Routes.", lambda: 7.0)
    metrics.gauge("peers", "Peers.", lambda: {(): 2.0})
    assert value(metrics, "pool_addresses", network="pods", state="used") == 3
    pool["pods", "used"] = 4.0
    assert value(metrics, "pool_addresses", network="pods", state="used") == 4
    assert value(metrics, "routes") == 7
    assert value(metrics, "peers") == 2


def test_a_gauge_that_cannot_be_read_spoils_no_other(metrics):
    def fails() -> dict[tuple[str, ...], float]:
        raise OSError("no netlink")

    metrics.gauge("routes", "Routes.", fails)
    metrics.gauge("peers", "Peers.", lambda: {(): 2.0})
    text = metrics.render()[1].decode()
    assert "headcni_peers 2.0" in text
    assert "headcni_routes" not in text
    assert value(metrics, "scrape_errors_total", gauge="routes") >= 1


def test_a_gauge_is_not_read_when_it_is_made_and_its_name_is_taken_once(metrics):
    read = []
    metrics.gauge("routes", "Routes.", lambda: read.append(1) or {(): 0.0})
    assert read == []
    with pytest.raises(ValueError, match="routes"):
        metrics.gauge("routes", "Routes.", lambda: {(): 0.0})


def test_conditions_are_gauges(metrics):
    metrics.conditions(lambda: [("tailscale", True), ("routes", False)])
    assert value(metrics, "condition", condition="tailscale") == 1
    assert value(metrics, "condition", condition="routes") == 0


def test_pods_make_no_series_of_their_own(metrics):
    add(metrics)
    before = len(list(samples(metrics)))
    for number in range(50):
        metrics.call("ADD", NETWORK, PodRef("shop", f"web-{number}"), 0.008, 0, PHASES)
        metrics.call("DEL", NETWORK, PodRef("shop", f"web-{number}"), 0.008, 0, {})
    after = [one for one in samples(metrics) if 'verb="DEL"' not in str(one)]
    assert len([one for one in after if one.labels.get("verb") != "DEL"]) == before


def test_where_pods_are_labelled_their_series_go_with_them():
    metrics = Metrics(pod_name_label=True)
    add(metrics)
    seen = {"namespace": "shop", "pod_name": "web-0"}
    assert value(metrics, "pod_network_setup_duration_seconds_count", **seen) == 1
    metrics.call("DEL", NETWORK, POD, 0.008, 0, {})
    metrics.call("DEL", NETWORK, POD, 0.008, 0, {})
    assert value(metrics, "pod_network_setup_duration_seconds_count", **seen) is None


def test_memory_and_cpu_of_the_process_are_told(metrics):
    found = metrics.registry
    assert (found.get_sample_value("process_resident_memory_bytes") or 0) > 1e6
    assert (found.get_sample_value("process_cpu_seconds_total") or 0) > 0
    assert 'headcni_build_info{python="' in metrics.render()[1].decode()


@pytest.mark.parametrize("accept", ["", "text/plain", "application/openmetrics-text;version=1.0.0"])
def test_the_text_is_prometheus_own(metrics, accept):
    add(metrics)
    content_type, body = metrics.render(accept)
    assert ("openmetrics" in content_type) is ("openmetrics" in accept)
    assert "headcni_ip_allocations_total" in body.decode()
    assert "_created" not in body.decode()
    if not accept:
        names = {one.name for one in text_string_to_metric_families(body.decode())}
        assert "headcni_pod_network_setup_duration_seconds" in names


def samples(metrics: Metrics) -> Any:
    for family in metrics.registry.collect():
        if family.name.startswith("headcni_"):
            yield from family.samples
