"""What the daemon counts and measures, for Prometheus.

The parts of the daemon call plain methods; nothing outside this file knows prometheus_client. It
costs 15 ms and 2 MB in addition to http.client and ssl, which the daemon has anyway.

No label grows without bound: there are namespaces, networks and our own names, but no pods,
containers or addresses. ``pod_name_label`` is an exception that an operator may ask for; a pod's
series is then removed with the pod.

The help of a metric says what it means and, after "Normal:", which value is normal. docs/metrics.md
is generated from it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from time import monotonic, time
from typing import Callable, Dict, Optional, Tuple, Type, Union

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ... import errors
from ...ipam.config import TYPE as OUR_IPAM
from ...model import NetworkConfig, PodRef

# An ADD takes about 5 ms, without a daemon 100 ms, and with delegates up to seconds.
CALLS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# Steps within a call: an allocation is a fraction of a millisecond.
STEPS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10)
# Requests over a socket or the network.
REQUESTS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

# The help of these metrics belongs to prometheus_client, so their normal values are here.
OF_THE_CLIENT = {
    "process_virtual_memory_bytes": "no limit; it is address space, not memory",
    "process_resident_memory_bytes": "about 45 MiB; systemd ends the daemon at 512 MiB",
    "process_start_time_seconds": "changes only when the daemon is restarted",
    "process_cpu_seconds_total": "grows by less than 0.01 per second when no pods start",
    "process_open_fds": "below 100; about one more for each call",
    "process_max_fds": "the limit of the unit",
    "python_gc_objects_collected_total": "grows slowly",
    "python_gc_objects_uncollectable_total": "0",
    "python_gc_collections_total": "grows slowly",
}
MOST_SERIES = 1000  # of a metric, in an answer to headcnictl

# The names of error codes, from the table of errors.
_CODE_NAMES: Dict[int, str] = {
    value: name.lower()
    for name, value in vars(errors).items()
    if name.isupper() and isinstance(value, int)
}
_VERBS = ("ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION")

# What a provider returns: label values → value, or the value of a gauge without labels.
Reading = Union[float, Mapping[Tuple[str, ...], float]]
_Family = Type[Union[CounterMetricFamily, GaugeMetricFamily]]


def explained(name: str, about: str) -> Tuple[str, str]:
    """What a metric means and which value is normal, from its help."""
    meaning, _unused, normal = about.partition(" Normal: ")
    return meaning, normal.rstrip(".") or OF_THE_CLIENT.get(name, "")


def error_type(code: int) -> str:
    """The label of an error. Codes that delegates invent share a label."""
    return _CODE_NAMES.get(code, "other")


class Metrics:
    """Everything that is measured. All methods may be called from any thread."""

    def __init__(self, version: str = "", pod_name_label: bool = False) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._pod_name = pod_name_label
        labels = ("namespace", "pod_name") if pod_name_label else ("namespace",)
        self._setup = self._histogram(
            "pod_network_setup_duration_seconds",
            "Time to set up a pod's network, for calls of ADD that succeeded."
            " Normal: 5 to 50 ms, with other plugins in the chain up to seconds.",
            labels,
            CALLS,
        )
        self._plugin = self._histogram(
            "plugin_duration_seconds",
            "Time that the daemon worked on a call of the plugin."
            " Normal: below 50 ms, and no outcome error.",
            ("verb", "outcome"),
            CALLS,
        )
        self._phase = self._histogram(
            "phase_duration_seconds",
            "Time of a step of ADD. Normal: link is the slowest, with a few milliseconds.",
            ("phase",),
            STEPS,
        )
        self._allocation = self._histogram(
            "ip_allocation_duration_seconds",
            "Time to allocate the addresses of a pod. Normal: below 2 ms.",
            ("strategy",),
            STEPS,
        )
        self._dns = self._histogram(
            "dns_setup_duration_seconds",
            "Time to determine the DNS settings of a pod. Normal: below 1 ms.",
            (),
            STEPS,
        )
        self._response = self._histogram(
            "daemon_response_duration_seconds",
            "Time from the arrival of a complete request on the socket to its answer, including the"
            " time in the queue. Normal: below 50 ms; seconds while many pods start at once.",
            (),
            CALLS,
        )
        self._headscale = self._histogram(
            "headscale_request_duration_seconds",
            "Time of a request to Headscale's API. Only with headscale.apiKeyFile."
            " Normal: below 1 s, and outcome ok.",
            ("operation", "outcome"),
            REQUESTS,
        )
        self._tailscale = self._histogram(
            "tailscale_request_duration_seconds",
            "Time of a request to tailscaled's LocalAPI."
            " Normal: below 100 ms; longer, with outcome ok, for requests that wait for a change.",
            ("operation", "outcome"),
            REQUESTS,
        )
        self._kubernetes = self._histogram(
            "kubernetes_request_duration_seconds",
            "Time of a request to the Kubernetes API. Only with an API server."
            " Normal: below 1 s, and outcome ok; a watch lasts for minutes.",
            ("operation", "outcome"),
            REQUESTS,
        )
        self._reconcile = self._histogram(
            "reconcile_duration_seconds",
            "Time to compare the desired with the actual state of a part, and to repair it."
            " Normal: below 1 s, and outcome ok.",
            ("part", "outcome"),
            REQUESTS,
        )
        self._policies = self._histogram(
            "policy_apply_duration_seconds",
            "Time to compile a change for network policies and hand it to the kernel."
            " Normal: below 0.02 s for a change, below 2 s for a complete compilation.",
            ("kind", "outcome"),
            REQUESTS,
        )
        self._allocations = self._counter(
            "ip_allocations",
            "Successful allocations of addresses. Normal: one for each new pod.",
            ("strategy",),
        )
        self._allocation_failures = self._counter(
            "ip_allocation_failures",
            "Allocations of addresses that failed. Normal: 0.",
            ("strategy", "error_type"),
        )
        self._interfaces = self._counter(
            "interface_creations",
            "Attempts to create the interface of a pod. Normal: no outcome error.",
            ("outcome",),
        )
        self._errors = self._counter(
            "network_errors",
            "Errors by type, as in the table of error codes. Normal: 0.",
            ("error_type",),
        )
        self._events = self._counter(
            "events",
            "Events of pods' networks, as headcnictl events shows them."
            " Normal: no pod-failed, pod-leaked, pod-missing or pod-repaired.",
            ("type",),
        )
        self._repairs = self._counter(
            "reconcile_changes",
            "Differences between the desired and the actual state that were corrected."
            " Normal: changes while nodes come and go, and no steady growth.",
            ("part", "action"),
        )
        self._scrape_errors = self._counter(
            "scrape_errors",
            "Gauges that were left out of a scrape because they could not be read. Normal: 0.",
            ("gauge",),
        )
        self._repaired: Dict[str, int] = {}
        self._repaired_at = 0.0
        build = Gauge(
            "headcni_build_info",
            "The running versions of HeadCNI and Python."
            " Normal: 1, and the same versions on all nodes.",
            ("version", "python"),
            registry=self.registry,
        )
        build.labels(version, platform.python_version()).set(1)
        prometheus_client.ProcessCollector(registry=self.registry)  # memory, CPU, descriptors
        prometheus_client.GCCollector(registry=self.registry)

    def call(
        self,
        verb: str,
        network: Optional[NetworkConfig],
        pod: PodRef,
        seconds: float,
        code: int,
        phases: Mapping[str, float],
    ) -> None:
        """A verb, as the server's ``on_call`` reports it. An error came from the last phase."""
        outcome = "error" if code else "ok"
        self._plugin.labels(verb if verb in _VERBS else "other", outcome).observe(seconds)
        if code:
            self.failed(error_type(code))
        labels = (pod.namespace, pod.name) if self._pod_name else (pod.namespace,)
        if verb == "DEL" and self._pod_name and not code:
            self._forget(labels)
        if verb != "ADD":
            return
        if not code:
            self._setup.labels(*labels).observe(seconds)
        for phase, took in phases.items():
            self._phase.labels(phase).observe(took)
        failed = list(phases)[-1] if code and phases else ""
        if "ipam" in phases and network is not None:
            self.allocated(_strategy(network), phases["ipam"], code if failed == "ipam" else 0)
        if "link" in phases:
            self._interfaces.labels("error" if failed == "link" else "ok").inc()
        if "dns" in phases:
            self._dns.observe(phases["dns"])

    def allocated(self, strategy: str, seconds: float, code: int = 0) -> None:
        """An allocation of addresses. With a code, it failed."""
        self._allocation.labels(strategy).observe(seconds)
        if code:
            self._allocation_failures.labels(strategy, error_type(code)).inc()
        else:
            self._allocations.labels(strategy).inc()

    def responded(self, seconds: float) -> None:
        """A request on the daemon's socket was answered."""
        self._response.observe(seconds)

    def failed(self, kind: str) -> None:
        """Something went wrong: ``error_type(code)`` for a code, else a fixed word of the
        caller."""
        self._errors.labels(kind).inc()

    def event(self, kind: str) -> None:
        self._events.labels(kind).inc()

    def reconciled(self, part: str, seconds: float, ok: int = True, **changes: int) -> None:
        """A comparison of a part's desired and actual state: added=2, removed=1 and so on.

        ``ok`` is a bool. It has the type of the changes so that callers can pass them as **changes.
        """
        self._reconcile.labels(part, "ok" if ok else "error").observe(seconds)
        for action, count in changes.items():
            self._repairs.labels(part, action).inc(count)
        if changes.get("repaired"):
            self._repaired[part] = self._repaired.get(part, 0) + changes["repaired"]
            self._repaired_at = time()

    def drift(self) -> Mapping[str, object]:
        """What had to be put right since the start, by part, and when the last time was."""
        return {"repaired": dict(self._repaired), "last": self._repaired_at}

    def policies_applied(self, kind: str, seconds: float, ok: bool) -> None:
        """A change of a pod, namespace or policy, or of everything (``all``)."""
        self._policies.labels(kind, "ok" if ok else "error").observe(seconds)
        if not ok:
            self.failed("network-policy")

    @contextmanager
    def headscale(self, operation: str) -> Iterator[None]:
        """Measure a request to Headscale. It counts as failed if an exception leaves the block."""
        with _timed(self._headscale, operation):
            yield

    @contextmanager
    def tailscale(self, operation: str) -> Iterator[None]:
        """The same for a request to tailscaled."""
        with _timed(self._tailscale, operation):
            yield

    @contextmanager
    def kubernetes(self, operation: str) -> Iterator[None]:
        """The same for a request to the API server."""
        with _timed(self._kubernetes, operation):
            yield

    def gauge(
        self, name: str, about: str, read: Callable[[], Reading], labels: Tuple[str, ...] = ()
    ) -> None:
        """``headcni_<name>``, read at each scrape: a value, or a value for each tuple of labels.

        ``about`` says what it means and then, after "Normal:", which value is normal.
        A gauge that cannot be read is left out and counted; the others are still shown.
        """
        self._provide(GaugeMetricFamily, name, about, read, labels)

    def counted(
        self, name: str, about: str, read: Callable[[], Reading], labels: Tuple[str, ...] = ()
    ) -> None:
        """The same for ``headcni_<name>_total``, which somebody else counts."""
        self._provide(CounterMetricFamily, name, about, read, labels)

    def _provide(
        self,
        family: _Family,
        name: str,
        about: str,
        read: Callable[[], Reading],
        labels: Tuple[str, ...],
    ) -> None:
        could_not = self._scrape_errors.labels(name).inc
        self.registry.register(_Provided(family, f"headcni_{name}", about, read, labels, could_not))

    def conditions(self, read: Callable[[], Iterable[Tuple[str, bool]]]) -> None:
        """``headcni_condition``: 1 for each condition that holds, as in the answer of /ready."""
        self.gauge(
            "condition",
            "Whether a condition for the node's readiness holds. Normal: 1.",
            lambda: {(name,): float(holds) for name, holds in read()},
            ("condition",),
        )

    def render(self, accept: str = "") -> Tuple[str, bytes]:
        """The content type and the text of all metrics, in the format that the client accepts."""
        encoder, content_type = choose_encoder(accept)
        return content_type, encoder(self.registry)

    def families(self) -> Iterator[Dict[str, object]]:
        """Every metric with its samples, for headcnictl: name, labels and value of each."""
        for family in self.registry.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            meaning, normal = explained(name, family.documentation)
            yield {
                "name": name,
                "type": family.type,
                "meaning": meaning,
                "normal": normal,
                "samples": [
                    (sample.name, sample.labels, sample.value)
                    for sample in islice(family.samples, MOST_SERIES)
                ],
                "more": max(0, len(family.samples) - MOST_SERIES),
            }

    def _forget(self, labels: Tuple[str, ...]) -> None:
        try:
            self._setup.remove(*labels)
        except KeyError:  # an older prometheus_client, and a pod without measurements
            return

    def _histogram(
        self, name: str, about: str, labels: Tuple[str, ...], buckets: Tuple[float, ...]
    ) -> Histogram:
        return Histogram(f"headcni_{name}", about, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, about: str, labels: Tuple[str, ...]) -> Counter:
        return Counter(f"headcni_{name}", about, labels, registry=self.registry)


def _strategy(network: NetworkConfig) -> str:
    """Other IPAM plugins have their own way of choosing."""
    return network.ipam.strategy if network.ipam.type == OUR_IPAM else "delegated"


@contextmanager
def _timed(histogram: Histogram, operation: str) -> Iterator[None]:
    began, outcome = monotonic(), "error"
    try:
        yield
        outcome = "ok"
    finally:
        histogram.labels(operation, outcome).observe(monotonic() - began)


class _Provided(Collector):
    """A gauge or a counter whose values come from a provider."""

    def __init__(
        self,
        family: _Family,
        name: str,
        about: str,
        read: Callable[[], Reading],
        labels: Tuple[str, ...],
        could_not: Callable[[], None],
    ) -> None:
        self.family, self.name, self.about, self.read = family, name, about, read
        self.labels, self.could_not = labels, could_not

    def describe(self) -> Iterable[Metric]:
        """Lets the registry find duplicate names without reading the values."""
        return [self.family(self.name, self.about, labels=self.labels)]

    def collect(self) -> Iterable[Metric]:
        family = self.family(self.name, self.about, labels=self.labels)
        try:
            reading = self.read()
            told = reading if isinstance(reading, Mapping) else {(): reading}
            for values, value in told.items():
                family.add_metric(list(values), value)
        except Exception:
            self.could_not()
            return []
        return [family]
