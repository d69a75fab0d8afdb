"""headcni-daemon: puts the parts together, keeps them going, and takes them apart again.

Every part works by itself and is only started, stopped and listened to here. Nothing that pods
need ends with the daemon: routes, links and rules stay when it stops.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Callable, Optional, Tuple

from .. import __version__, repair, verbs
from .. import log as logs
from .. import settings as configuration
from ..datapath import firewall, netns
from ..datapath.host_firewall import PodTraffic
from ..datapath.netlink import Netlink
from ..errors import CniError, shortened
from ..exec import leave_sandbox
from ..ipam.allocate import Ipam
from ..mesh import claims, pod_traffic
from ..mesh.approvals import ApprovalKeeper, ApprovalReport, identify
from ..mesh.headscale import HeadscaleClient
from ..mesh.localapi import LocalApi
from ..mesh.prefs import NodePrefs
from ..mesh.routes import Report, RouteReconciler
from ..mesh.settings import cluster_cidrs, mesh_of, namespace_of, prefs_file
from ..model import Network, PodRef
from ..periodic import Periodic
from ..recover import release_unused
from ..settings import DaemonConfig, control_path
from ..shared import podcidr
from ..store import Attachment, Store
from .cni.server import CniServer, Served
from .firewalls import Firewalls, TailscaleRules
from .observe.control import Control
from .observe.events import ADDED, DELETED, FAILED, LEAKED, Event, Events
from .observe.metrics import Metrics
from .observe.monitor import Monitor, Reason, ask
from .tailnet import TailnetAccess

if TYPE_CHECKING:
    from .kubernetes.annotations import AnnotationWatcher
    from .kubernetes.client import Source
    from .kubernetes.pods import PassReport, PodWatcher
    from .kubernetes.token import TokenKeeper

log = logs.Log("daemon")

STOP_SECONDS = 5.0
GRACE_SECONDS = 60.0  # before a network without a namespace is taken to be leaked
PORT_SECONDS = 300.0  # between two questions for tailscaled's UDP port
MOST_MISTAKES = 20  # of annotations, in the status
_TOLD = {"ADD": ADDED, "DEL": DELETED}
_M_ARENA_MAX = -8


class Notifier:
    """systemd's READY, RELOADING, WATCHDOG and STOPPING; silent where nobody asked for them."""

    def __init__(self) -> None:
        self._path = os.environ.pop("NOTIFY_SOCKET", "")
        self.watchdog = int(os.environ.pop("WATCHDOG_USEC", "0")) / 1e6

    def tell(self, *lines: str) -> None:
        if not self._path:
            return
        path = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.connect(path)
                sender.send("\n".join(lines).encode())
        except OSError as problem:
            log.warn("systemd cannot be told", problem=problem)


class Signals:
    """Those that the daemon waits for. By a socket: the kernel may hand a signal to any thread, and
    a main thread that sleeps elsewhere would not wake up for its handler."""

    def __init__(self, *numbers: int) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        for number in numbers:
            signal.signal(number, lambda *_unused: None)

    def wait(self, seconds: float) -> set[int]:
        """What has come; nothing if nothing came in time."""
        ready, _unused, _unused = select.select([self._reader], [], [], seconds)
        return set(self._reader.recv(64)) if ready else set()


class Conditions(Mapping[str, Reason]):
    """What /ready asks about: the socket, the store, and what the routes' last pass found.

    Not the approval: Headscale 0.29 tells a node of its own up to minutes late. It is logged and
    measured. And no claim of a foreign device, which could otherwise make every node not ready;
    only a node of the mesh that serves this node's own range does.
    """

    def __init__(self, server: CniServer, store: Callable[[], object]) -> None:
        self.fixed: dict[str, Reason] = {
            "cni-socket": lambda: "" if server.is_alive() else "the CNI socket is not served",
            "store": lambda: _trouble(store),
        }
        self.report: Report = Report()

    def _all(self) -> dict[str, Reason]:
        found = dict(self.fixed)
        if not self.report.conditions:
            found["routes"] = lambda: "the routes have not been looked at yet"
        for one in self.report.conditions:
            if one.name == "approved":
                continue
            found[one.name] = lambda one=one: "" if one.ok else one.message  # type: ignore[misc]
        for alarm in self.report.alarms:
            if not alarm.holds_back:
                continue
            found[f"alarm-{alarm.kind}-{alarm.prefix}"] = lambda alarm=alarm: alarm.message  # type: ignore[misc]
        return found

    def items(self) -> ItemsView[str, Reason]:
        """All of one moment: a pass that ends meanwhile must not answer to an older one's names."""
        return self._all().items()

    def __getitem__(self, name: str) -> Reason:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def _trouble(question: Callable[[], object]) -> str:
    try:
        question()
    except CniError as problem:
        return str(problem)
    return ""


class Daemon:
    """The parts, from start() to stop()."""

    def __init__(self, config: DaemonConfig, path: str) -> None:
        self.config = config
        self._path = path
        self.metrics = Metrics(__version__, config.monitoring.pod_name_label)
        self.events = Events(self.metrics.event)
        self.pod_cidrs = _pod_cidrs(config)
        self.cluster_cidrs = cluster_cidrs(config, self.pod_cidrs)
        self.server = CniServer(
            config.daemon.socket,
            config.daemon.data_dir,
            on_call=self._called,
            log=log.info,
        )
        self._store: Optional[Store] = None
        self.conditions = Conditions(self.server, lambda: self.store.lost)
        self.control = Control(control_path(config), self.status, self.events)
        self.api = LocalApi(config.tailscale.socket_path, timed=self.metrics.tailscale)
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
        self._began = time.time()
        self._sweep_at, self._opens = 0.0, 0
        self._nft_trouble = "the nft rules have not been tried on this node yet"
        self.conditions.fixed["nft-rules"] = lambda: self._nft_trouble
        self._udp_port, self._ask_port_at = 0, 0.0
        self._attachments: Sequence[Attachment] = ()
        self._upkeep = Periodic("upkeep", self._keep_up, config.daemon.reconcile_interval)

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = Store.in_directory(self.config.daemon.data_dir)
        return self._store

    def start(self) -> None:
        """Pods first: they can come as soon as the socket is there."""
        self.server.start()
        self._limit_pods()
        self.control.start()
        self._measure()
        self._start_monitor()
        self._start_keeper()
        self._start_pods()
        self.firewalls.start()
        self._upkeep.start()

    def stop(self) -> bool:
        """False if calls outlast the limit. Routes stay as they are."""
        self._upkeep.ask_to_stop()
        finished = self.server.stop(self.config.daemon.stop_timeout)
        self.control.stop()
        self._upkeep.stop(STOP_SECONDS)
        for part in (
            *(self.token, self.pods, self.annotations),
            *(self.keeper, self.routes, self.firewalls),
        ):
            if part is not None:
                part.stop()
        if self.monitor is not None:
            self.monitor.stop()
        return finished

    def reload(self) -> None:
        """What SIGHUP can change is changed; what it cannot is named."""
        try:
            wanted = configuration.load(self._path, missing_ok=True)
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
        if self.config.daemon.reconcile_interval != before.daemon.reconcile_interval:
            self._set_pace()
        if self.config.ipam.gc_interval != before.ipam.gc_interval:
            self._sweep_at = time.monotonic() + self.config.ipam.gc_interval
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

    @property
    def _pods_interval(self) -> float:
        return max(self.config.daemon.reconcile_interval, 10.0)

    def status(self) -> dict[str, Any]:
        """All that headcnictl shows of the daemon."""
        conditions = ask(self.conditions)
        return {
            "version": __version__,
            "pid": os.getpid(),
            "since": self._began,
            "mode": self.config.tailscale.mode,
            "interface": self.config.tailscale.interface,
            "answers": configuration.answered(self.config),
            "pod_cidrs": [str(cidr) for cidr in self.pod_cidrs],
            "cluster_cidrs": [str(cidr) for cidr in self.cluster_cidrs],
            "ready": all(condition.ok for condition in conditions),
            "conditions": [{"name": c.name, "ok": c.ok, "reason": c.message} for c in conditions],
            "firewalls": [
                {"name": one.name, "ok": not one.problem, "summary": one.in_words()}
                for one in self.firewalls.found
            ],
            "tailnet_access": self.tailnet.status(),
            "alarms": [alarm._asdict() for alarm in self.conditions.report.alarms],
            "warnings": [warning._asdict() for warning in self._warnings()],
            "kubernetes_token_expires": self.token.expires if self.token is not None else 0.0,
            "attachments": sum(self.store.attachment_counts().values()),
            "calls": self.server.calls,
            "monitor": self.monitor.where if self.monitor is not None else "",
        }

    def _warnings(self) -> list[claims.Alarm]:
        found = list(self.conditions.report.warnings)
        if self.token is not None and (said := self.token.trouble()):
            found.append(claims.Alarm("kubernetes-token", "", (), said))
        found += [claims.Alarm("tailnet-access", "", (), one) for one in self._doubtful_limits()]
        return found

    def _doubtful_limits(self) -> Iterator[str]:
        """Why what a namespace may reach of the tailnet may not be what its annotation says."""
        for name, mistake in list(self.tailnet.mistakes.items())[:MOST_MISTAKES]:
            yield f"namespace {name}: {mistake}"
        pods, annotations = self.pods, self.annotations
        if pods is None or annotations is None or pods.condition.message:
            return  # what is wrong with both is told of pods
        if annotations.problem:
            yield f"annotations of namespaces cannot be watched: {annotations.problem}"

    def is_healthy(self) -> bool:
        watchers = (self.pods, self.annotations, self.token, self.firewalls)
        parts = (self.server, self._upkeep, self.routes, self.keeper, *watchers)
        return all(part.is_alive() for part in parts if part is not None)

    def _called(self, served: Served) -> None:
        verb, outcome = served.verb, served.outcome
        self.metrics.call(
            verb, outcome.network, outcome.pod, served.seconds, outcome.code, served.phases
        )
        self.metrics.responded(served.response)
        if outcome.attachment is not None and verb in _TOLD:
            self.events.tell(Event.of(_TOLD[verb], outcome.attachment))
        elif outcome.code and verb == "ADD":
            problem = json.loads(outcome.output)
            said = ": ".join(filter(None, (problem.get("msg"), problem.get("details"))))
            network = outcome.network.name if outcome.network else ""
            self.events.tell(Event(FAILED, outcome.pod, network, reason=said))

    def _start_keeper(self) -> None:
        """Where the operator has given a key, our routes are asked for and kept approved."""
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
        """Right away; if this fails, the next pass over the firewalls tries again."""
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
        """Where there is an API server to ask, this node's pods are watched, and namespaces."""
        wanted = self.config.daemon
        if not self._knows_an_api_server():
            return
        from .kubernetes.annotations import AnnotationWatcher
        from .kubernetes.client import (  # TLS, which a node without Kubernetes has no use for
            KubeClient,
            Source,
        )
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
            "When the token for Kubernetes expires; 0 if the daemon has none to renew.",
            lambda token=self.token: token.expires,  # type: ignore[misc]
        )
        self.token.start()

    def _annotated(self, found: Mapping[str, str]) -> None:
        try:
            self.tailnet.annotated(found)
        except (CniError, OSError) as problem:
            log.error("what pods may reach of the tailnet is as before", problem=problem)

    def _measure_pods(self, pods: PodWatcher) -> None:
        self.metrics.gauge("pods", "Pods of this node.", lambda: float(pods.stats.pods))
        self.metrics.gauge("pod_queue", "Pods to look at.", lambda: float(pods.stats.queued))

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
        self.metrics.conditions(lambda: ((c.name, c.ok) for c in ask(self.conditions)))
        self.metrics.gauge(
            "cni_calls", "Calls at work or waiting.", lambda: float(self.server.calls)
        )
        self.metrics.gauge(
            "attachments",
            "Pod interfaces.",
            lambda: float(sum(self.store.attachment_counts().values())),
        )
        self.metrics.gauge(
            "links_to_delete",
            "Links of deleted pods that are still there.",
            lambda: float(len(self.store.tombstones())),
        )
        self.metrics.gauge("ip_pool_addresses", "Addresses.", self._pools, ("network", "state"))
        self.metrics.gauge(
            "refused_claims",
            "Pod ranges that peers serve and that get no route, by the reason.",
            self._refused_claims,
            ("reason",),
        )

    def _refused_claims(self) -> dict[Tuple[str, ...], float]:
        found: dict[Tuple[str, ...], float] = {(reason,): 0.0 for reason in claims.REASONS}
        for refusal in self.conditions.report.refusals:
            found[(refusal.reason,)] += 1
        return found

    def _pools(self) -> dict[Tuple[str, ...], float]:
        found: dict[Tuple[str, ...], float] = {}
        ipam = Ipam(self.store)
        for network in self.store.attachment_counts():
            for usage in ipam.usage(network):
                for state, count in (("leased", usage.leased), ("free", usage.free)):
                    key = (network, state)
                    found[key] = found.get(key, 0.0) + count
        return found

    def _keep_up(self) -> None:
        """The parts that no event wakes: the mesh namespace, the start of the route reconciler once
        there is a way to the mesh, and the search for leaked networks."""
        self._nft_trouble = _trouble(firewall.try_out)
        self._pass("namespace", self._ensure_namespace)
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
        """The namespace itself is made when its tailscaled is started, which must be in the new one
        anyway; its cable is made right here, and who goes by the old addresses begins anew."""
        if self.namespace is None:
            return ()
        if not self.namespace.exists:
            _try_restart("headcni-tailscaled.service")
            return (f"network namespace {self.namespace.path}: missing",)
        repaired = self.namespace.ensure()
        if repaired and self.routes is not None:
            gateways = tuple(self.namespace.gateways.values())
            if gateways != self.routes.mesh.gateways:
                self.routes.stop()
                self.routes = None
        return repaired

    def _pod_traffic(self) -> PodTraffic:
        """What other firewalls have to let through on this node."""
        port = self._tailscaled_port() if self.namespace is None else 0
        cidrs = self.pod_cidrs, self.cluster_cidrs
        with suppress(CniError):  # without the store, those of the last time
            self._attachments = self.store.attachments()
        return pod_traffic.of(self.config, *cidrs, self._attachments, port)

    def _tailscaled_port(self) -> int:
        """The UDP port of the node's tailscaled; asked for now and then, as it may change."""
        if not self._udp_port or time.monotonic() > self._ask_port_at:
            with suppress(CniError):
                self._udp_port = pod_traffic.tailscaled_port(self.api) or self._udp_port
            self._ask_port_at = time.monotonic() + PORT_SECONDS
        return self._udp_port

    def _firewalls_passed(self, seconds: float, ok: bool, repaired: int) -> None:
        self.metrics.reconciled("firewall", seconds, ok=ok, repaired=repaired)

    def _sweep_when_due(self) -> None:
        """Every gcInterval, and once more soon after the store was opened or replaced: a store that
        is reconstructed during a DEL may adopt the pod from the runtime's cache."""
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + self.config.ipam.gc_interval
            self._pass("leaks", self._sweep)
        opens = self._store.opens if self._store is not None else 0
        if opens != self._opens:
            self._opens = opens
            self._sweep_at = min(self._sweep_at, time.monotonic() + GRACE_SECONDS)

    def _sweep(self) -> Sequence[str]:
        """Networks whose namespace is gone, though no DEL came: for pods of Kubernetes, its word is
        asked for as well, and the watcher does that."""
        released = []
        for one in self.store.attachments():
            watched = self.pods is not None and bool(one.pod.name)
            young = time.time() - one.created < GRACE_SECONDS
            if watched or young or not one.netns or not repair.is_dead(one.netns, None):
                continue
            try:
                repair.release(one, self._opened)
            except CniError as problem:
                log.warn("a leaked network cannot be released", pod=one.pod, problem=problem)
                continue
            self.events.tell(Event.of(LEAKED, one, "its network namespace is gone: released"))
            released.append(f"{one.owner.container_id} {one.owner.ifname}")
        attached = {one.owner for one in self.store.attachments()}
        for owner in release_unused(self.store, attached):
            released.append(f"{owner.container_id} {owner.ifname}".strip())
        return released

    @contextmanager
    def _opened(self, _data_dir: str) -> Iterator[verbs.Node]:
        """The store is the one that the attachments came from: the plugin may have had its folder
        from HEADCNI_DATA_DIR, of which their configuration says nothing."""
        with Netlink() as kernel:
            yield verbs.Node(self.store, Ipam(self.store), kernel)

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
        self.routes = routes  # only now: what could not be started is tried again
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
        known = {one.name: one.ok for one in previous.conditions}
        for one in report.conditions:
            if known.get(one.name, True) != one.ok:
                (log.info if one.ok else log.warn)(one.message or "holds again", condition=one.name)
            if self.namespace is not None and one.name == "interface" and not one.ok:
                self._upkeep.wake()  # it is ours to make again


def _turn_forwarding_on(cidrs: Sequence[Network]) -> None:
    """Before tailscaled advertises routes: it complains about a node that does not forward. If
    this fails, the first pod is refused with the reason."""
    with suppress(OSError):
        netns.write_sysctl("net/ipv4/ip_forward", "1")
        if any(cidr.version == 6 for cidr in cidrs):
            netns.forward_ipv6()


def _try_restart(unit: str) -> None:
    """If it runs: what it was started in is gone."""
    log.warn("restarting what ran in the old namespace", unit=unit)
    command = ["systemctl", "--no-block", "try-restart", unit]
    try:
        subprocess.run(command, timeout=10, check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as problem:
        log.error("not restarted", unit=unit, problem=problem)


def _pod_cidrs(config: DaemonConfig) -> Tuple[Network, ...]:
    resolution = configuration.pod_cidrs(config)
    log.info("pod CIDR", cidrs=",".join(map(str, resolution.cidrs)), source=resolution.source)
    if resolution.guessed:
        log.warn("the pod CIDR is a guess: set network.podCIDR.nodeLocal")
    return tuple(resolution.cidrs)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="headcni-daemon", description="The HeadCNI node daemon.")
    parser.add_argument("--config", default=configuration.PATH, help="(%(default)s)")
    parser.add_argument("--check-config", action="store_true", help="say what is wrong, and stop")
    parser.add_argument("--json", action="store_true", help="with --check-config: as JSON")
    parser.add_argument(
        "--check-firewall", action="store_true", help="try the nft rules on this node, and stop"
    )
    parser.add_argument("--version", action="version", version=__version__)
    args = parser.parse_args(arguments)
    if args.check_config:
        code, said = configuration.check(args.config, args.json)
        print(said)
        return code
    if args.check_firewall:
        said = _trouble(firewall.try_out)
        print(said or "this node takes the nft rules")
        return 1 if said else 0
    return run(args.config)


def _keep_memory_together() -> None:
    """glibc gives each thread an arena of its own, which keeps what the thread has freed."""
    import ctypes

    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def run(path: str) -> int:
    _keep_memory_together()
    notifier, signals = Notifier(), Signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if "INVOCATION_ID" in os.environ:  # systemd runs us, so it can run plugins for us
        leave_sandbox()
    try:
        config = configuration.load(path, missing_ok=True)
        logs.set_up(config.logging.level, config.logging.format)
        daemon = Daemon(config, path)
        daemon.start()
    except (CniError, podcidr.PodCidrError, OSError) as problem:
        logs.set_up()
        log.fatal("the daemon cannot start", problem=problem)
        return 1
    gc.collect()
    gc.freeze()  # a full collection that looked through all modules would hold up a call by 20 ms
    notifier.tell("READY=1", f"STATUS=serving {config.daemon.socket}")
    log.info("ready", version=__version__, mode=config.tailscale.mode)
    beat = notifier.watchdog / 3 or 3600.0
    while True:
        got = signals.wait(beat)
        if not got and daemon.is_healthy():
            notifier.tell("WATCHDOG=1")
        if got - {signal.SIGHUP}:
            break
        if not got:
            continue
        notifier.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        daemon.reload()
        notifier.tell("READY=1")
    notifier.tell("STOPPING=1")
    log.info("stopping", calls=daemon.server.calls)
    return 0 if daemon.stop() else 1
