"""The daemon: starts its parts, listens to them, reloads their settings, and stops them.

Each part does its own work. Nothing that pods need ends with the daemon: routes, links and rules
stay when it stops.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Callable, Optional

from .. import __version__
from .. import log as logs
from .. import settings as configuration
from ..datapath import firewall, netns
from ..datapath.host_firewall import PodTraffic
from ..errors import TRY_AGAIN, CniError, shortened
from ..mesh import pod_traffic
from ..mesh.approvals import ApprovalKeeper, ApprovalReport, identify
from ..mesh.headscale import HeadscaleClient
from ..mesh.localapi import LocalApi
from ..mesh.paths import Watched
from ..mesh.prefs import NodePrefs
from ..mesh.routes import Report, RouteReconciler
from ..mesh.settings import cluster_cidrs, mesh_of, namespace_of, own_cidrs, prefs_file
from ..model import Network, PodRef
from ..periodic import Periodic
from ..settings import DaemonConfig, control_path
from ..store import Attachment, Store
from .cni.server import CniServer, Served
from .faults import Faults
from .firewalls import Firewalls, TailscaleRules
from .leaks import Leaks
from .observe.control import Control
from .observe.events import ADDED, DELETED, FAILED, Event, Events
from .observe.gauges import measure
from .observe.metrics import Metrics
from .observe.monitor import Monitor, ask
from .policies import disabled
from .readiness import Conditions, problem_of
from .status import status_of
from .systemd import restart_if_running
from .tailnet import TailnetAccess

if TYPE_CHECKING:
    from .kubernetes.access import Source
    from .kubernetes.annotations import AnnotationWatcher
    from .kubernetes.networks import PassReport
    from .kubernetes.pods import PodWatcher
    from .kubernetes.token import TokenKeeper
    from .policies.policies import Policies

log = logs.Log("daemon")

STOP_SECONDS = 5.0
_TOLD = {"ADD": ADDED, "DEL": DELETED}


class Daemon:
    """Owns all parts from start() to stop()."""

    def __init__(self, config: DaemonConfig, path: str) -> None:
        self.config = config
        self.path = path
        self.metrics = Metrics(__version__, config.monitoring.pod_name_label)
        self.events = Events(self.metrics.event)
        self.pod_cidrs = own_cidrs(config)
        self.cluster_cidrs = cluster_cidrs(config, self.pod_cidrs)
        self.server = CniServer(
            config.daemon.socket,
            config.daemon.data_dir,
            on_call=self._called,
            log=log.info,
        )
        self._store: Optional[Store] = None
        self.conditions = Conditions(self.server, lambda: self.store.lost)
        self.control = Control(
            control_path(config),
            self.status,
            self.events,
            self._answer_about_policies,
            {"config": lambda: [self._settings()], "metrics": self.metrics.families},
        )
        self.api = LocalApi(config.tailscale.socket_path, timed=self.metrics.tailscale)
        self.paths = Watched(
            self.api, lambda: self.routes.serving if self.routes is not None else ()
        )
        self.namespace = namespace_of(config, self.pod_cidrs)
        self.routes: Optional[RouteReconciler] = None
        self.keeper: Optional[ApprovalKeeper] = None
        self.pods: Optional[PodWatcher] = None
        self.token: Optional[TokenKeeper] = None
        self.annotations: Optional[AnnotationWatcher] = None
        self.tailnet = TailnetAccess(
            lambda: self.store,
            lambda: self.config,
            self._knows_an_api_server(),
            lambda: (*self.cluster_cidrs, *self.config.network.service_cidr),
        )
        self.policies: Optional[Policies] = None
        if config.network.enable_network_policy:
            self.policies = self._make_policies()
        self.firewalls = Firewalls(
            lambda: self.store,
            self._pod_traffic,
            config.network.firewall == "auto",
            config.daemon.reconcile_interval,
            self._firewalls_passed,
            TailscaleRules(self.api) if config.tailscale.mode == "host" else None,
            self.tailnet.ensure,
        )
        self.conditions.fixed["firewall"] = self.firewalls.held_back
        self.monitor: Optional[Monitor] = None
        self.began = time.time()
        self.leaks = Leaks(lambda: self.store, lambda: self.pods is not None, self.events.tell)
        self.faults = Faults(path)
        self._nft_trouble = "the nft rules have not been tried on this node yet"
        self.conditions.fixed["nft-rules"] = lambda: self._nft_trouble
        self._port = pod_traffic.TailscaledPort(self.api)
        self._attachments: Sequence[Attachment] = ()
        self._upkeep = Periodic("upkeep", self._keep_up, config.daemon.reconcile_interval)

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = Store.in_directory(self.config.daemon.data_dir)
        return self._store

    def start(self) -> None:
        """The CNI server first: pods can come as soon as the socket exists. Before that, policies:
        no pod is to come without."""
        if self.policies is not None:
            self.policies.start()
        self.server.start()
        self._limit_pods()
        self.control.start()
        self._measure()
        self._start_monitor()
        self._start_keeper()
        self._start_pods()
        self.firewalls.start()
        self._upkeep.start()
        self.faults.start()

    def stop(self) -> bool:
        """Returns False if calls outlast the time limit. Routes stay as they are."""
        self._upkeep.ask_to_stop()
        finished = self.server.stop(self.config.daemon.stop_timeout)
        self.control.stop()
        self._upkeep.stop(STOP_SECONDS)
        for part in (
            *(self.token, self.pods, self.annotations),
            *(self.keeper, self.routes, self.firewalls, self.policies, self.faults),
        ):
            if part is not None:
                part.stop()
        if self.monitor is not None:
            self.monitor.stop()
        return finished

    def reload(self) -> None:
        """Apply what SIGHUP can change, and log what needs a restart."""
        try:
            wanted = configuration.load(self.path, missing_ok=True)
        except CniError as problem:
            log.error("the new configuration has mistakes; the old one stays", problem=problem)
            return
        differing = configuration.changes(self.config, wanted)
        before = self.config
        self.config = configuration.with_applied(self.config, wanted)
        logs.set_up(self.config.logging.level, self.config.logging.format)
        for change in differing.applied:
            log.info("changed", key=str(change))
        for change in differing.needs_restart:
            log.warn("unchanged until the daemon is restarted", key=str(change))
        self._limit_pods()
        if self.policies is not None:
            self.policies.configure()
        if self.config.daemon.reconcile_interval != before.daemon.reconcile_interval:
            self._set_pace()
        if self.config.ipam.gc_interval != before.ipam.gc_interval:
            self.leaks.due_at = time.monotonic() + self.config.ipam.gc_interval
        self._upkeep.every(self.config.daemon.reconcile_interval)
        if self.config.monitoring != before.monitoring:
            if self.monitor is not None:
                self.monitor.stop()
            self._start_monitor()
        if self.config.headscale != before.headscale:
            self._start_keeper()

    def _set_pace(self) -> None:
        if (routes := self.routes) is not None:
            routes.every(self.config.daemon.reconcile_interval)
        if self.pods is not None:
            self.pods.every(self._pods_interval)
        self.firewalls.every(self.config.daemon.reconcile_interval)
        if self.policies is not None:
            self.policies.enforcer.every(self.config.daemon.reconcile_interval)

    @property
    def _pods_interval(self) -> float:
        return max(self.config.daemon.reconcile_interval, 10.0)

    def status(self) -> dict[str, Any]:
        return status_of(self)

    def _settings(self) -> dict[str, Any]:
        """As they are in use: the file may have changed since they were read."""
        own = [str(cidr) for cidr in self.pod_cidrs]
        return {
            "path": self.path,
            "config": configuration.as_dict(self.config),
            "derived": {**configuration.derived(self.config), "network.podCIDR.nodeLocal": own},
        }

    def is_healthy(self) -> bool:
        watchers = (self.pods, self.annotations, self.token, self.firewalls, self.policies)
        parts = (self.server, self._upkeep, self.routes, self.keeper, self.faults, *watchers)
        return all(part.is_alive() for part in parts if part is not None)

    def _called(self, served: Served) -> None:
        verb, outcome = served.verb, served.outcome
        self.metrics.call(
            verb, outcome.network, outcome.pod, served.seconds, outcome.code, served.phases
        )
        self.metrics.responded(served.response)
        if self.policies is not None and verb in _TOLD:
            self.policies.source.pods_changed()
        if outcome.attachment is not None and verb in _TOLD:
            self.events.tell(Event.of(_TOLD[verb], outcome.attachment))
        elif outcome.code and verb == "ADD":
            if outcome.code == TRY_AGAIN:
                self.leaks.hurry()
            network = outcome.network.name if outcome.network else ""
            self.events.tell(Event(FAILED, outcome.pod, network, reason=str(outcome.error)))

    def _start_keeper(self) -> None:
        """If the operator has given an API key, request the approval of our routes and keep it."""
        if self.keeper is not None:
            self.keeper.stop()
            self.keeper = None
            del self.conditions.fixed["headscale"]
        wanted = self.config.headscale
        if not wanted.api_key_file:
            return
        client = HeadscaleClient(
            wanted.url,
            wanted.api_key_file,
            wanted.timeout,
            wanted.retries,
            timed=self.metrics.headscale,
        )
        self.keeper = ApprovalKeeper(
            client, lambda: identify(self.api), self.pod_cidrs, self._approval_reported
        )
        self.conditions.fixed["headscale"] = self.keeper.held_back
        self.keeper.start()

    def _limit_pods(self) -> None:
        """Apply the limits at once. If this fails, the next pass over the firewalls tries again."""
        try:
            if self.tailnet.ensure():
                now = self.tailnet.policy()
                named = len(now.namespaces)
                log.info("tailnet access", node=shortened(now.node, 200), namespaces=named)
        except (CniError, OSError) as problem:
            log.error("what pods may reach of the tailnet is as before", problem=problem)

    def _knows_an_api_server(self) -> bool:
        return bool(self.config.daemon.kubeconfig) or "KUBERNETES_SERVICE_HOST" in os.environ

    def _start_pods(self) -> None:
        """If there is an API server to ask, watch this node's pods and the namespaces."""
        wanted = self.config.daemon
        if not self._knows_an_api_server():
            return
        from .kubernetes.access import Source
        from .kubernetes.annotations import AnnotationWatcher
        from .kubernetes.client import KubeClient
        from .kubernetes.pods import PodWatcher

        source, timed = Source(wanted.kubeconfig), self.metrics.kubernetes
        self.annotations = AnnotationWatcher(KubeClient(source, timed=timed), self._annotated)
        self.annotations.start()
        self.pods = PodWatcher(
            KubeClient(source, timed=timed),
            lambda: self.store,
            configuration.node_name(self.config),
            wanted.pod_selector,
            own_cidrs=self.pod_cidrs,
            on_event=self._pod_event,
            on_pass=self._pods_compared,
            interval=self._pods_interval,
        )
        self.conditions.fixed["pods"] = self.pods.held_back
        self._measure_pods(self.pods)
        self.pods.start()
        if wanted.kubeconfig:  # kubelet renews the token of a pod
            self._start_token(Source(wanted.kubeconfig))

    def _make_policies(self) -> Policies:
        from .policies.setup import make

        made = make(
            lambda: self.config,
            lambda: self.store,
            self.metrics,
            self._knows_an_api_server(),
            os.path.dirname(os.path.abspath(self.path)),
        )
        self.conditions.fixed["policies"] = made.held_back
        self.conditions.fixed["policy-source"] = made.not_known
        return made

    def _answer_about_policies(self, words: Sequence[str]) -> Mapping[str, Any]:
        if self.policies is None:
            why = "network.enableNetworkPolicy is false"
            return {"error": f"this node does not enforce network policies: {why}"}
        return self.policies.answer(words)

    def _start_token(self, source: Source) -> None:
        from .kubernetes.client import KubeClient
        from .kubernetes.token import TokenKeeper

        self.token = TokenKeeper(
            KubeClient(source, timed=self.metrics.kubernetes),
            source,
            self.config.daemon.token_lifetime,
            on_failure=lambda: self.metrics.failed("kubernetes-token"),
        )
        self.metrics.gauge(
            "kubernetes_token_expiry_timestamp_seconds",
            "When the daemon's token for Kubernetes expires; 0 if it has none to renew."
            " Normal: more than a week from now.",
            lambda token=self.token: token.expires,  # type: ignore[misc]
        )
        self.token.start()

    def _annotated(self, found: Mapping[str, str]) -> None:
        try:
            self.tailnet.annotated(found)
        except (CniError, OSError) as problem:
            log.error("what pods may reach of the tailnet is as before", problem=problem)

    def _measure_pods(self, pods: PodWatcher) -> None:
        self.metrics.gauge(
            "pods",
            "Pods of this node that Kubernetes knows, also those that use the host network."
            " Only with an API server. Normal: at least as many as attachments.",
            lambda: float(pods.stats.pods),
        )
        self.metrics.gauge(
            "pod_queue",
            "Pods whose change has not been examined yet. Only with an API server."
            " Normal: 0; more for a moment.",
            lambda: float(pods.stats.queued),
        )

    def _pod_event(
        self, kind: str, attachment: Optional[Attachment], pod: PodRef, reason: str
    ) -> None:
        if attachment is None:
            self.events.tell(Event(kind, pod, reason=reason))
        else:
            self.events.tell(Event.of(kind, attachment, reason))

    def _pods_compared(self, report: PassReport, seconds: float) -> None:
        counts = {
            name: count
            for name in ("released", "repaired", "missing")
            if (count := getattr(report, name))
        }
        self.metrics.reconciled("pods", seconds, ok=not report.problem, **counts)

    def _approval_reported(self, report: ApprovalReport) -> None:
        counts = {
            name: len(cidrs)
            for name in ("approved", "restored", "withdrawn")
            if (cidrs := getattr(report, name))
        }
        self.metrics.reconciled("approval", 0.0, ok=not report.problem, **counts)

    def _start_monitor(self) -> None:
        wanted = self.config.monitoring
        self.monitor = None
        if not wanted.enabled:
            return
        monitor = Monitor(
            self.metrics,
            self.conditions,
            {"server": lambda: "" if self.is_healthy() else "a part of the daemon has ended"},
            wanted.address,
            wanted.port,
            wanted.path,
            wanted.pprof,
        )
        try:
            monitor.start()
        except CniError as problem:
            log.error("no monitor", problem=problem)
            return
        self.monitor = monitor

    def _measure(self) -> None:
        measure(
            self.metrics,
            lambda: self.store,
            lambda: self.server.calls,
            lambda: ask(self.conditions),
            lambda: self.conditions.report.refusals,
            self.paths.counts,
            self.faults,
        )

    def _keep_up(self) -> None:
        """The work that no event asks for: the mesh namespace, the start of the route reconciler
        once there is a way to the mesh, and the search for leaked networks."""
        self._nft_trouble = problem_of(firewall.try_out)
        self._pass("namespace", self._ensure_namespace)
        if self.policies is None:
            self._pass("policies", lambda: disabled.withdraw(self.store))
        if self.routes is None:
            self._pass("routes", self._start_routes)
        self._sweep_when_due()

    def _pass(self, part: str, work: Callable[[], Sequence[str]]) -> None:
        began = time.monotonic()
        try:
            repaired = work()
        except (CniError, OSError) as problem:
            log.error("not reconciled", what=part, problem=problem)
            self.metrics.reconciled(part, time.monotonic() - began, ok=False)
            return
        for line in repaired:
            log.info("repaired", what=part, was=line)
        self.metrics.reconciled(part, time.monotonic() - began, repaired=len(repaired))

    def _ensure_namespace(self) -> Sequence[str]:
        """A missing namespace is made by the start of its tailscaled, which must run in the new
        one anyway. Its cable is repaired here; if its addresses changed, the route reconciler
        starts again."""
        if self.namespace is None:
            return ()
        if not self.namespace.exists:
            restart_if_running("headcni-tailscaled.service")
            return (f"network namespace {self.namespace.path}: missing",)
        repaired = self.namespace.ensure()
        if repaired and self.routes is not None:
            gateways = tuple(self.namespace.gateways.values())
            if gateways != self.routes.mesh.gateways:
                self.routes.stop()
                self.routes = None
        return repaired

    def _pod_traffic(self) -> PodTraffic:
        """What other firewalls on this node have to let through."""
        port = self._port.current() if self.namespace is None else 0
        cidrs = self.pod_cidrs, self.cluster_cidrs
        with suppress(CniError):  # without the store, use the last known ones
            self._attachments = self.store.attachments()
        return pod_traffic.of(self.config, *cidrs, self._attachments, port)

    def _firewalls_passed(self, seconds: float, ok: bool, repaired: int) -> None:
        self.metrics.reconciled("firewall", seconds, ok=ok, repaired=repaired)

    def _sweep_when_due(self) -> None:
        if self.leaks.is_due(self.config.ipam.gc_interval):
            self._pass("leaks", self.leaks.sweep)
        self.leaks.note_opens(self._store.opens if self._store is not None else 0)

    def _start_routes(self) -> Sequence[str]:
        mesh = mesh_of(self.config, self.pod_cidrs, self.cluster_cidrs, self.namespace)
        if self.namespace is None:
            _turn_forwarding_on(mesh.own_cidrs)
        routes = RouteReconciler(
            mesh,
            self.api,
            prefs=NodePrefs(self.api, prefs_file(self.config)),
            interval=self.config.daemon.reconcile_interval,
            on_report=self._reported,
        )
        routes.start()
        self.routes = routes  # only now: a start that failed is tried again
        return ()

    def _reported(self, report: Report) -> None:
        previous, self.conditions.report = self.conditions.report, report
        counts = {
            name: len(entries)
            for name in ("added", "removed", "repaired")
            if (entries := getattr(report, name))
        }
        if counts:
            self.metrics.reconciled("routes", 0.0, **counts)
            log.info("routes changed", **counts)
        for alarm in set(report.alarms) - set(previous.alarms):
            self.metrics.failed("alarm")
            log.error(alarm.message, kind=alarm.kind, prefix=alarm.prefix)
        for warning in set(report.warnings) - set(previous.warnings):
            log.warn(warning.message, kind=warning.kind, prefix=warning.prefix)
        known = {condition.name: condition.ok for condition in previous.conditions}
        for condition in report.conditions:
            if known.get(condition.name, True) != condition.ok:
                (log.info if condition.ok else log.warn)(
                    condition.message or "holds again", condition=condition.name
                )
            if self.namespace is not None and condition.name == "interface" and not condition.ok:
                self._upkeep.wake()  # upkeep makes it again


def _turn_forwarding_on(cidrs: Sequence[Network]) -> None:
    """Do it before tailscaled advertises routes: it complains about a node that does not
    forward. If this fails, the first pod is refused with the reason."""
    with suppress(OSError):
        netns.write_sysctl("net/ipv4/ip_forward", "1")
        if any(cidr.version == 6 for cidr in cidrs):
            netns.forward_ipv6()
