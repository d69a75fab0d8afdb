"""This node's own routes at Headscale, if the operator gives the daemon an API key: they are
approved, kept approved, and withdrawn on departure. Without a key none of this runs.

Headscale's API has a single call for it. The call replaces all approved routes of a node and cannot
be conditional on their being unchanged. So each write directly follows a read and keeps what was
there. A write is never repeated: the next read shows what became of it. An API key allows changes
to any node. We change only our own, because we find it by the key of the tailscaled beside us,
never by a name.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

from ..condition import Condition
from ..errors import CniError
from ..log import Log
from ..model import Network
from ..periodic import Periodic
from .claims import Alarm
from .headscale import (
    FIRST_PAUSE,
    STOPPED,
    UNKNOWN_NODE,
    HeadscaleClient,
    HeadscaleError,
    Node,
    too_old,
)
from .localapi import LocalApi
from .prefix import Prefix

INTERVAL_SECONDS = 30.0
STALE_SECONDS = 300.0
STOP_SECONDS = 5.0
WITHDRAW_TRIES = 3

log = Log("headscale")


class Identity(NamedTuple):
    """This node as its own tailscaled knows it, without the routes it believes to serve: Headscale
    0.29 tells a node about its own approvals only when it has other news for it."""

    key: str
    name: str


def identify(api: LocalApi) -> Identity:
    """This node's identity at Headscale; an error while tailscaled is logged out."""
    status = api.status(peers=False)
    if not status.key:
        raise HeadscaleError(
            UNKNOWN_NODE,
            f"tailscaled is not logged in (its state is {status.state or 'unknown'})",
            "join the node first: ansible-playbook site.yml, or tailscale up",
        )
    return Identity(status.key, status.name)


class Clash(NamedTuple):
    """Another node that serves a range that overlaps a CIDR of ours, or has it approved."""

    cidr: str
    theirs: str
    node: Node


def clashes(own: Sequence[str], others: Iterable[Node]) -> list[Clash]:
    """Overlaps with other nodes' routes. Default routes are ignored: those of an exit node overlap
    everything, and do no harm here."""
    mine = [(cidr, Prefix.parse(cidr)) for cidr in own]
    found = []
    for node in others:
        for theirs in dict.fromkeys((*node.routes, *node.served)):
            with suppress(ValueError, OSError):
                prefix = Prefix.parse(theirs)
                found += [
                    Clash(cidr, theirs, node)
                    for cidr, own_prefix in mine
                    if prefix.length and prefix.overlaps(own_prefix)
                ]
    return found


def find(nodes: Iterable[Node], me: Identity, url: str) -> Node:
    """This node among all nodes. A name proves nothing, because anybody may have taken it."""
    namesake = ""
    for node in nodes:
        if node.key == me.key:
            if node.approved is None:
                raise too_old(url)
            return node
        if node.name == me.name:
            namesake = f"; the {node.name} there (node {node.id}) has another key"
    raise HeadscaleError(
        UNKNOWN_NODE,
        f"Headscale at {url} does not know this node by its key",
        f"see that tailscaled is joined to this very server{namesake}",
    )


_WELL = Condition("headscale", True, "")


@dataclass(frozen=True)
class ApprovalReport:
    """What a pass found and did. `restored` routes had been approved, and no longer were."""

    approved: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    problem: str = ""
    condition: Condition = _WELL

    @property
    def changed(self) -> bool:
        return bool(self.approved or self.restored or self.withdrawn)


class ApprovalKeeper:
    """Keeps this node's own CIDRs approved at Headscale, and touches nothing else there.

    While all is well it asks for this node only, and rarely for the list of all nodes: every node
    asks, and the list contains every node.
    """

    def __init__(
        self,
        client: HeadscaleClient,
        identity: Callable[[], Identity],
        own_cidrs: Iterable[Network],
        on_report: Optional[Callable[[ApprovalReport], None]] = None,
        *,
        interval: float = INTERVAL_SECONDS,
        stale: float = STALE_SECONDS,
    ) -> None:
        """`identity` asks tailscaled: `lambda: identify(api)`."""
        self._client = client
        self._identity = identity
        self._own = tuple(dict.fromkeys(map(str, own_cidrs)))
        self._on_report = on_report
        self._stale = stale
        self._lock = threading.Lock()
        self._loop = Periodic("headscale", self._work, interval)
        self._pause = FIRST_PAUSE  # before the next attempt, while Headscale cannot be asked
        self._me: Optional[Identity] = None
        self._had: set[str] = set()
        self._settled: Optional[Node] = None  # this node when everything was approved for it alone
        self._looked_at = 0.0
        self._condition = Condition("headscale", False, "Headscale has not been asked yet")
        self._told: tuple[object, ...] = ()

    @property
    def condition(self) -> Condition:
        """For /ready, after the last pass. While Headscale is away, an approval that was seen is
        assumed to last: pods keep their connections then."""
        return self._condition

    def held_back(self) -> str:
        """For the monitor: why the node is not ready, or an empty text."""
        return "" if self._condition.ok else self._condition.message

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        """End the passes. The approvals stay."""
        self._loop.stop(STOP_SECONDS, cancel=self._client.cancel)

    def is_alive(self) -> bool:
        return not self._loop.is_started or self._loop.is_alive()

    def ensure_once(self) -> ApprovalReport:
        """One pass that asks Headscale. Problems that a later pass may solve are reported, not
        raised."""
        with self._lock:
            return self._pass(self._ensure)

    def withdraw(self) -> ApprovalReport:
        """For the departure: withdraw the approval of our CIDRs, whoever approved them. Stop
        advertising them first, or an autoApprover of the policy may bring them back."""
        self.stop()
        with self._lock:
            return self._pass(self._withdraw)

    def _work(self) -> float:
        with self._lock:
            report = self._pass(self._ensure_if_needed)
        if self._on_report is not None and not self._loop.is_stopping:
            try:
                self._on_report(report)
            except Exception as bug:  # a mistake in a listener must not stop the passes
                log.error("a listener failed", problem=bug)
        interval = self._loop.interval
        if report.problem:
            wait, self._pause = min(self._pause, interval), min(self._pause * 2, interval)
        else:
            wait, self._pause = interval, FIRST_PAUSE
        # Nodes that were started together should not ask at the same moments for ever.
        return wait * random.uniform(0.8, 1.2)  # noqa: S311

    def _pass(self, act: Callable[[], ApprovalReport]) -> ApprovalReport:
        try:
            report = act()
        except (CniError, OSError) as problem:
            if isinstance(problem, HeadscaleError) and problem.kind == STOPPED:
                return ApprovalReport(problem=str(problem), condition=self._condition)
            report = ApprovalReport(problem=str(problem), condition=self._doubtful(str(problem)))
        except Exception as bug:  # the next pass may succeed
            said = f"a bug in HeadCNI: {bug!r}"
            report = ApprovalReport(problem=said, condition=self._doubtful(said))
        self._condition = report.condition
        self._tell(report)
        return report

    def _doubtful(self, problem: str) -> Condition:
        if self._had.issuperset(self._own):
            return Condition("headscale", True, f"approved when last seen; {problem}")
        return Condition("headscale", False, problem)

    def _ensure_if_needed(self) -> ApprovalReport:
        if self._settled is not None and time.monotonic() - self._looked_at < self._stale:
            self._me = self._identity()
            mine = self._client.node(self._settled.id)
            if mine is not None and mine.key == self._me.key and set(self._own) <= set(mine.routes):
                return ApprovalReport()
        return self._ensure()

    def _ensure(self) -> ApprovalReport:
        self._settled = None
        self._me = self._identity()
        nodes = self._client.nodes()
        mine = find(nodes, self._me, self._client.url)
        found = clashes(self._own, (node for node in nodes if node.id != mine.id))
        taken = {clash.cidr for clash in found}
        adding = [cidr for cidr in self._own if cidr not in mine.routes and cidr not in taken]
        if adding:
            self._client.approve(mine, (*mine.routes, *adding))
            # Another node may have approved the same range at the same moment, without seeing ours.
            # The node that looks last sees both, and withdraws its own.
            nodes = self._client.nodes()
            mine = find(nodes, self._me, self._client.url)
            found = clashes(self._own, (node for node in nodes if node.id != mine.id))
            taken = {clash.cidr for clash in found}
            if taken.intersection(adding):
                keep = [route for route in mine.routes if route not in taken.intersection(adding)]
                self._client.approve(mine, keep)
                mine = mine._replace(approved=tuple(keep))
        had, self._had = self._had, set(self._own) & set(mine.routes)
        got = [cidr for cidr in adding if cidr in mine.routes]
        if self._had.issuperset(self._own) and not found:
            self._settled = mine
        self._looked_at = time.monotonic()
        return ApprovalReport(
            approved=tuple(cidr for cidr in got if cidr not in had),
            restored=tuple(cidr for cidr in got if cidr in had),
            alarms=tuple(_alarm(clash, clash.cidr in mine.routes) for clash in found),
            condition=self._judge(mine, found),
        )

    def _judge(self, mine: Node, found: Sequence[Clash]) -> Condition:
        """An approval is enough if no other node has the range. Whether it is also advertised, and
        so served, is reported by the route reconciler."""
        lost = [clash for clash in found if clash.cidr not in mine.served]
        if lost:
            return Condition("headscale", False, _sentence(lost[0], lost[0].cidr in mine.routes))
        missing = [cidr for cidr in self._own if cidr not in mine.routes]
        if missing:
            what = ", ".join(missing)
            return Condition("headscale", False, f"Headscale did not keep the approval of {what}")
        return _WELL

    def _withdraw(self) -> ApprovalReport:
        self._settled = None
        try:
            self._me = self._identity()
        except (CniError, OSError):
            if self._me is None:  # tailscaled may be gone already; then its last known key is used
                raise
        gone: tuple[str, ...] = ()
        for attempt in range(WITHDRAW_TRIES):
            try:
                mine = find(self._client.nodes(), self._me, self._client.url)
            except HeadscaleError as problem:
                if problem.kind != UNKNOWN_NODE:
                    raise
                break  # the node is gone, and its approvals with it
            ours = tuple(cidr for cidr in mine.routes if cidr in self._own)
            if not ours:
                break
            gone = ours
            try:
                self._client.approve(mine, [route for route in mine.routes if route not in ours])
                break
            except HeadscaleError as problem:
                # The write may have succeeded anyway: the next read shows it.
                if not problem.trouble or attempt == WITHDRAW_TRIES - 1:
                    raise
        self._had.clear()
        left = Condition("headscale", False, "this node has withdrawn its routes")
        return ApprovalReport(withdrawn=gone, condition=left)

    def _tell(self, report: ApprovalReport) -> None:
        """Log what was done, and problems when they change."""
        for word in ("approved", "restored", "withdrawn"):
            cidrs = getattr(report, word)
            if cidrs:
                log.info(word, cidrs=cidrs)
        # Without numbers, because the seconds of a pause differ in each pass.
        now = (re.sub(r"\d+", "", report.problem), report.alarms)
        if now == self._told:
            return
        before, self._told = self._told, now
        for alarm in report.alarms:
            log.error("alarm", kind=alarm.kind, prefix=alarm.prefix, problem=alarm.message)
        if report.problem:
            log.warn("approval not certain", problem=report.problem)
        elif before and not report.alarms:
            log.info("all is well again")


def _alarm(clash: Clash, approved: bool) -> Alarm:
    claimants = ("this node", clash.node.name)
    return Alarm("own-cidr", clash.theirs, claimants, _sentence(clash, approved))


def _sentence(clash: Clash, approved: bool) -> str:
    node = clash.node
    away = "" if node.online else ", offline"
    stand = "is approved for both" if approved else "is not asked for"
    return (
        f"{node.name} (node {node.id}{away}) has {clash.theirs} approved, so this node's own "
        f"{clash.cidr} {stand}: give one of them another pod CIDR, or take it from {node.name} "
        f"(headscale nodes approve-routes, or headscale nodes delete if it is no more)"
    )
