"""Keeping the routes to other nodes' pods: computed as data, compared with the kernel, and repaired
with a single send.

They are in a table of our own. Only packets for the cluster's pods are looked up in it, before they
are looked up in Tailscale's own table. Which routes there are follows from tailscaled's peers:

- A peer's route is deleted when the peer has left the tailnet, its key has expired, or it no longer
  serves the CIDR. A peer that is only offline keeps its route.
- `claims` decides which peers may serve what. A refused claim gets no route. If tailscaled would
  send packets for a node's pods to the refused peer, an unreachable route stops them.
- While tailscaled is away or not running, it knows nothing about its peers, so the routes stay.
- The node's own CIDR is never routed into the tunnel, neither by us nor by tailscaled if a peer
  claims it: a rule sends its packets to the main table first.
- In host mode, networks that the node is directly in stay its own whatever a peer advertises: a
  rule looks in the main table, without its default routes, before Tailscale's. It is there before
  tailscaled is told to accept routes (docs/decisions/0014).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional, Union

from ..condition import Condition
from ..datapath.netlink import Request
from ..datapath.rtnl import RTPROT_HEADCNI
from ..errors import CniError
from ..log import Log
from ..periodic import Periodic, Source, WakeUp
from .claims import Alarm, Heard, Plan, Refusal, hear, plan
from .kernel_routes import (
    RTN_UNREACHABLE,
    Link,
    Route,
    Rule,
    add_rule,
    delete_route,
    delete_rule,
    put_route,
    read_route,
    tunnel_route,
    unreachable_route,
)
from .localapi import Bus, LocalApi
from .mesh import Mesh
from .own_networks import OWN_NETWORKS, put_own_networks_first
from .prefix import Prefix, packed
from .prefs import NodePrefs
from .route_events import Interest, RouteEvents
from .route_socket import RouteSocket

INTERVAL_SECONDS = 30.0
STALE_SECONDS = 300.0
QUIET_SECONDS, PATIENCE_SECONDS = 0.05, 0.5
# A pod's ADD causes some twenty events. They are read together when it is over: reading each one as
# it comes would take the processor from the ADD twenty times.
TOGETHER_SECONDS = 0.02
STOP_SECONDS = 5.0

Entry = Union[Route, Rule]
# Fields of a note that may change a route, or our own approval.
_TELLING = frozenset({"State", "Prefs", "SelfChange", "PeersChanged", "PeersRemoved", "NetMap"})

log = Log("routes")


@dataclass(frozen=True)
class Report:
    """What a pass found and did. `repaired` entries were right after an earlier pass, and somebody
    has removed or changed them since."""

    added: tuple[Entry, ...] = ()
    removed: tuple[Entry, ...] = ()
    repaired: tuple[Entry, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    conditions: tuple[Condition, ...] = ()
    warnings: tuple[Alarm, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    @property
    def changed(self) -> bool:
        return bool(self.added or self.removed or self.repaired)


class _View(NamedTuple):
    """Everything in the kernel that a pass depends on. If it is as the last pass left it, there is
    nothing to compare, which with thousands of peers is most of the work."""

    table: int
    rules: frozenset[Rule]
    link: Optional[Link]
    sources: tuple[tuple[int, bytes], ...]


_ALL_THERE = Condition("routes", True, "")


class RouteReconciler:
    """Keeps the kernel's routes as they should be according to tailscaled's peers.

    Create and start it in the node's network namespace, because its sockets stay there. Stopping it
    leaves all routes in place, and the next start takes them over as they are.
    """

    def __init__(
        self,
        mesh: Mesh,
        api: LocalApi,
        *,
        prefs: Optional[NodePrefs] = None,
        interval: float = INTERVAL_SECONDS,
        on_report: Optional[Callable[[Report], None]] = None,
    ) -> None:
        """With `prefs`, tailscaled also keeps advertising our CIDRs and accepting others."""
        self.mesh = mesh
        self._api = api
        self._prefs = prefs
        self._on_report = on_report
        self._kernel = RouteSocket()
        self._lock = threading.Lock()
        self._rules = mesh.claim_rules()
        self._gateways, self._sources = packed(mesh.gateways), packed(mesh.sources)
        self._peers: Optional[Heard] = None  # None: tailscaled has not named them yet
        self._plan = Plan()
        self._heard: tuple[Condition, ...] = ()
        self._settled: dict[object, Entry] = {}  # by what _name() returns
        self._calm: Optional[_View] = None
        self._link: Optional[Link] = None
        self._asked_at = 0.0
        self._ask_again_at = 0.0
        self._stale = True
        self._loop = Periodic(
            "routes", self._work, interval, delay=self._delay, gather=TOGETHER_SECONDS
        )
        self._listener: Optional[threading.Thread] = None
        self._bus: Optional[Bus] = None
        self._bus_problem = ""

    def reconcile(self, ask: bool = True) -> Report:
        """One pass. Without `ask` it uses what tailscaled said last. Problems that a later pass may
        solve are not raised, but reported as conditions."""
        with self._lock:
            if ask:
                self._hear()
            try:
                return self._put_right()
            except (CniError, OSError) as problem:
                return self._report(conditions=(Condition("routes", False, str(problem)),))

    def remove_all(self) -> Report:
        """For the uninstall: delete all our routes and rules."""
        with self._lock:
            rules = [rule for rule in self._kernel.rules() if self._is_ours(rule)]
            routes = [r for r in self._kernel.routes(self.mesh.table) if _is_marked(r)]
            requests = [delete_rule(rule) for rule in rules]
            requests += [delete_route(route, self.mesh.table) for route in routes]
            failures = self._kernel.send(requests)
            if failures:
                raise failures[0]
            self._settled.clear()
            self._calm = None
            return Report(removed=(*rules, *routes))

    def start(self) -> None:
        self._stale = True
        events = RouteEvents()
        self._bus = self._api.watch(STALE_SECONDS)
        self._listener = threading.Thread(
            target=self._listen, args=(self._bus,), name="bus", daemon=True
        )
        news = Source(events, lambda: events.matter(self._interest()))
        self._loop.start([news], at_end=events.close)
        self._listener.start()

    def stop(self) -> None:
        """End the passes. The routes stay."""
        if self._bus is not None:
            self._bus.close()
        self._loop.stop(STOP_SECONDS)
        if self._listener is not None:
            self._listener.join(STOP_SECONDS)

    def every(self, seconds: float) -> None:
        """Change the interval between regular passes."""
        self._loop.every(seconds)

    def is_alive(self) -> bool:
        return self._loop.is_alive() and self._listener is not None and self._listener.is_alive()

    @property
    def serving(self) -> frozenset[str]:
        """The ids of the peers whose pods have routes."""
        peers = self._peers
        return frozenset(peers.claims if peers is not None else ())

    def _hear(self) -> None:
        """Ask tailscaled about its peers, our approval, and its prefs."""
        began = time.monotonic()
        self._stale = False
        try:
            status = self._api.status()
            if not status.running:
                problem = f"tailscaled is not running but in the state {status.state}"
                self._heard = (Condition("tailscale", False, problem),)
                return
            peers = hear(status, self._rules, self._peers.claims if self._peers else {})
            if peers != self._peers:
                self._peers, self._calm = peers, None
            missing = [str(cidr) for cidr in self.mesh.own_cidrs if str(cidr) not in status.served]
            self._heard = (
                Condition("tailscale", True, f"{len(status.peers)} peers"),
                Condition(
                    "approved",
                    not missing,
                    f"Headscale has not approved {', '.join(missing)}" if missing else "",
                ),
            )
            if self._prefs is not None:
                self._heard += (self._tell_prefs(self._prefs),)
        except CniError as problem:
            self._heard = (Condition("tailscale", False, str(problem)),)
        finally:
            self._asked_at = time.monotonic()
            # Reading thousands of peers takes a while: spend at most a tenth of the time on it.
            self._ask_again_at = self._asked_at + min(10 * (self._asked_at - began), 5.0)

    def _tell_prefs(self, prefs: NodePrefs) -> Condition:
        try:
            if self.mesh.own_networks_first:
                put_own_networks_first(self._kernel)  # before tailscaled accepts the first route
            changed = prefs.ensure(self.mesh.own_cidrs)
        except (CniError, OSError) as problem:
            return Condition("prefs", False, str(problem))
        return Condition("prefs", True, "; ".join(changed))

    def _put_right(self) -> Report:
        mesh, kernel = self.mesh, self._kernel
        table = kernel.table(mesh.table)
        have_rules = set(kernel.rules())
        link, conditions = self._look_at_link()
        # Before the first pod the gateway address does not exist, and the kernel would refuse it.
        sources = {f: source for f, source in self._sources.items() if kernel.is_local(source)}
        view = _View(hash(tuple(table)), frozenset(have_rules), link, tuple(sources.items()))
        if self._calm == view:
            return self._report(conditions=(*conditions, _ALL_THERE))

        have = {route.key: route for route in map(read_route, table)}
        self._plan = self._planned(have.values())
        wanted = self._plan.wanted
        routes = self._routes(wanted, link, sources) if link is not None and link.up else []
        blocks = [unreachable_route(prefix) for prefix in self._plan.blocked]
        rules = mesh.rules()

        good = {route.key: route for route in (*routes, *blocks)}
        put: list[Entry] = [*sorted(r for key, r in good.items() if have.get(key) != r)]
        put += [rule for rule in rules if rule not in have_rules]
        gone: list[Entry] = [
            route
            for key, route in have.items()
            if _is_marked(route) and key not in good and (routes or route.dst not in wanted)
        ]
        gone += [rule for rule in have_rules - set(rules) if self._is_ours(rule)]

        asked: list[tuple[Request, Entry]] = [(self._putting(entry), entry) for entry in put]
        asked += [(self._deleting(entry), entry) for entry in gone]
        failures = kernel.send([request for request, _unused in asked])
        failed = {id(failure.request) for failure in failures}
        refused = {id(entry) for request, entry in asked if id(request) in failed}
        done = {id(entry) for _unused, entry in asked} - refused

        self._calm = None if asked else view
        before = self._settled
        wished: list[Entry] = [*routes, *blocks, *rules]
        self._settled = {_name(entry): entry for entry in wished if id(entry) not in refused}
        repaired = {id(entry) for entry in put if before.get(_name(entry)) == entry}
        return self._report(
            added=tuple(e for e in put if id(e) in done and id(e) not in repaired),
            repaired=tuple(e for e in put if id(e) in done and id(e) in repaired),
            removed=tuple(e for e in gone if id(e) in done),
            conditions=(
                *conditions,
                Condition("routes", False, str(failures[0])) if failures else _ALL_THERE,
            ),
        )

    def _report(
        self,
        *,
        added: tuple[Entry, ...] = (),
        removed: tuple[Entry, ...] = (),
        repaired: tuple[Entry, ...] = (),
        conditions: tuple[Condition, ...],
    ) -> Report:
        """A report that includes what tailscaled said and what follows from its peers' claims."""
        return Report(
            added,
            removed,
            repaired,
            self._plan.alarms,
            (*self._heard, *conditions),
            self._plan.warnings,
            self._plan.refusals,
        )

    def _planned(self, have: Iterable[Route]) -> Plan:
        """The plan. Until tailscaled has named its peers, what exists is what should exist."""
        rules = self._rules
        if self._peers is not None:
            return plan(self._peers, rules, (route.dst for route in have if _is_tunnel(route)))
        sound = [
            route
            for route in have
            if _is_marked(route)
            and any(pods.covers(route.dst) for pods in rules.cluster)
            and not any(mine.overlaps(route.dst) for mine in rules.own)
        ]
        wanted = {route.dst for route in sound if _is_tunnel(route)}
        return Plan(wanted, {route.dst for route in sound} - wanted)

    def _look_at_link(self) -> tuple[Optional[Link], tuple[Condition, ...]]:
        name = self.mesh.interface
        link = self._kernel.link(name)
        if link is None:
            problem = f"there is no interface {name}"
            if self._link is not None and (now := self._kernel.link(index=self._link.number)):
                problem = f"the interface {name} is called {now.name} now"
            return None, (Condition("interface", False, problem),)
        self._link = link
        return link, (
            Condition("interface", link.up, "" if link.up else f"the interface {name} is down"),
        )

    def _routes(
        self, wanted: Iterable[Prefix], link: Link, sources: Mapping[int, bytes]
    ) -> list[Route]:
        mtu = self.mesh.mtu or 0
        return [
            tunnel_route(
                prefix,
                link.number,
                self._gateways.get(prefix.family, b""),
                sources.get(prefix.family, b""),
                mtu,
            )
            for prefix in wanted
        ]

    def _putting(self, entry: Entry) -> Request:
        return put_route(entry, self.mesh.table) if isinstance(entry, Route) else add_rule(entry)

    def _deleting(self, entry: Entry) -> Request:
        if isinstance(entry, Route):
            return delete_route(entry, self.mesh.table)
        return delete_rule(entry)

    def _is_ours(self, rule: Rule) -> bool:
        return rule.priority in self._priorities

    @property
    def _priorities(self) -> frozenset[int]:
        pods = {self.mesh.priority - 1, self.mesh.priority}
        return frozenset(pods if self.mesh.own_networks_first is None else {*pods, OWN_NETWORKS})

    def _work(self) -> Optional[float]:
        report = self._pass()
        if self._on_report is not None:
            try:
                self._on_report(report)
            except Exception as bug:  # a mistake in a listener must not stop the passes
                log.error("a listener failed", problem=bug)
        if not self._stale:
            return None
        # There was news during the pass, or it was too early to ask again.
        wait = max(self._ask_again_at - time.monotonic(), QUIET_SECONDS)
        return min(wait, self._loop.interval)

    def _delay(self, wake_up: WakeUp) -> float:
        """Wait until news has stopped pouring in, within reason."""
        delay = min(QUIET_SECONDS, max(0.0, PATIENCE_SECONDS - wake_up.since_first))
        if wake_up.woken and not wake_up.news:
            delay = max(delay, min(self._ask_again_at - time.monotonic(), 5.0))
        return delay

    def _pass(self) -> Report:
        try:
            return self.reconcile(ask=self._should_ask())
        except Exception as bug:  # the next pass may succeed
            return Report(conditions=(Condition("routes", False, f"a bug in HeadCNI: {bug!r}"),))

    def _should_ask(self) -> bool:
        now = time.monotonic()
        old = self._bus_problem or now - self._asked_at > STALE_SECONDS
        # The bus does not announce what failed on our side of the socket.
        failed = any(not told.ok for told in self._heard if told.name != "approved")
        return bool(self._stale or old or failed) and now >= self._ask_again_at

    def _interest(self) -> Interest:
        return Interest(
            self.mesh.table,
            self._priorities,
            self.mesh.interface,
            self._link.number if self._link is not None else 0,
            frozenset(self._sources.values()),
            self._kernel.port,
        )

    def _listen(self, bus: Bus) -> None:
        for note in bus:
            lost = bool(note.problem) and not self._bus_problem
            self._bus_problem = note.problem
            if lost or note.fields & _TELLING:
                self._stale = True
                self._loop.wake()


def _is_marked(route: Route) -> bool:
    return route.protocol == RTPROT_HEADCNI


def _is_tunnel(route: Route) -> bool:
    return _is_marked(route) and route.kind != RTN_UNREACHABLE


def _name(entry: Entry) -> object:
    return entry.dst if isinstance(entry, Route) else entry
