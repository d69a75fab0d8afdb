"""This node's pods, as the API server knows them, compared with the networks that they have.

Two things can go wrong that no CNI call will ever put right. A network is *leaked* when its pod and
its sandbox are gone and no DEL came: it is released, by the same code as a DEL. A network is
*missing* when a pod runs and has lost its link, address or ports: it is mended in place, or else
reported. What is in doubt is left alone:

- An API server that does not answer proves nothing, and neither does a list: whether a pod is gone
  is asked about that very pod, and only the API server's own "not found" counts. So a label
  selector, a wrong node name or an empty list releases nothing.
- A sandbox in which a process lives is not dead, whatever the API server says.
- Both must be so for a while, since kubelet may be about to send the DEL.
- Pods on the host's network, attachments without a pod, and pods that another plugin has networked
  are none of our business.

Without an API server nothing of this runs, and nothing else needs it.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Callable, NamedTuple, Optional

from ... import repair, verbs
from ...condition import Condition
from ...datapath.netlink import Netlink
from ...errors import CniError
from ...ipam.allocate import Ipam
from ...log import Log
from ...model import Network, Owner, PodRef
from ...store import Attachment, Store
from .client import (
    BOOKMARK,
    DELETED,
    DENIED,
    GONE,
    REFUSED,
    Change,
    KubeClient,
    KubeError,
    Pod,
    Selector,
)
from .watching import FIRST_PAUSE, LONGEST_PAUSE, keep_watching

LEAKED, MISSING, REPAIRED = "pod-leaked", "pod-missing", "pod-repaired"

INTERVAL_SECONDS = 45.0
GRACE_SECONDS = 60.0
SETTLE_SECONDS = 5.0  # a difference must be seen twice, so long apart: a call may be at work on it
STOP_SECONDS = 5.0
QUEUED = 1024
BATCH = 256
BATCH_SECONDS = 1.0

# What happened, the network that it happened to (None where there is none), the pod, and words.
OnEvent = Callable[[str, Optional[Attachment], PodRef, str], None]

_UNKNOWN = (
    "it has an address of this node's, but no network that HeadCNI knows of: "
    "delete the pod, so that it is made anew"
)

_DEAD = "it runs as far as Kubernetes knows, but its sandbox is dead: is kubelet running?"

log = Log("pods")


class WorkQueue:
    """Pods to be looked at: each once however often it is named, so many at most, and not before a
    pause after the last batch. Storms of events cost what one look costs."""

    def __init__(self, capacity: int = QUEUED, pause: float = BATCH_SECONDS) -> None:
        self._capacity, self._pause = capacity, pause
        self._due: dict[str, float] = {}
        self._changed = threading.Condition()
        self._not_before = 0.0
        self._closed = self._interrupted = False

    def __len__(self) -> int:
        return len(self._due)

    def put(self, key: str, delay: float = 0.0) -> bool:
        """False if there is no room: then everything has to be looked at."""
        due = time.monotonic() + delay
        with self._changed:
            if key not in self._due and len(self._due) >= self._capacity:
                return False
            self._due[key] = min(due, self._due.get(key, due))
            self._changed.notify()
            return True

    def take(self, until: float, most: int = BATCH) -> list[str]:
        """Those that are due, the longest due first; none if it became `until`, or was closed or
        interrupted."""
        with self._changed:
            while not (self._closed or self._interrupted):
                now = time.monotonic()
                ready = [key for key, due in self._due.items() if due <= now]
                if ready and now >= self._not_before:
                    ready.sort(key=self._due.__getitem__)
                    for key in ready[:most]:
                        del self._due[key]
                    self._not_before = now + self._pause
                    return ready[:most]
                if now >= until:
                    return []
                next_due = min(self._due.values(), default=until)
                wake = max(next_due, self._not_before)
                self._changed.wait(max(0.0, min(wake, until) - now))
            self._interrupted = False
            return []

    def interrupt(self) -> None:
        """Who waits, or waits next, is to see that `until` is another now."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(frozen=True)
class PassReport:
    """What a pass, over all pods or over those that changed, found and did."""

    pods: int = 0
    released: int = 0
    repaired: int = 0
    missing: int = 0
    problem: str = ""


class Stats(NamedTuple):
    """For the metrics: how many pods and waiting ones now, and what was counted since the start."""

    connected: bool
    pods: int
    queued: int
    lists: int
    watches: int
    dropped: int


class _Counts:
    def __init__(self) -> None:
        self.lists = self.watches = self.dropped = 0


class PodWatcher:
    """Watches from start() to stop(), once."""

    def __init__(
        self,
        client: KubeClient,
        store: Callable[[], Store],
        node_name: str,
        labels: str = "",
        *,
        own_cidrs: Iterable[Network] = (),
        on_event: Optional[OnEvent] = None,
        on_pass: Optional[Callable[[PassReport, float], None]] = None,
        interval: float = INTERVAL_SECONDS,
        grace: float = GRACE_SECONDS,
        settle: float = SETTLE_SECONDS,
        pauses: tuple[float, float] = (FIRST_PAUSE, LONGEST_PAUSE),
        cni_path: str = repair.CNI_PATH,
    ) -> None:
        """`own_cidrs` tell a pod of ours from another plugin's; `cni_path` is where the plugins are
        that a leaked network may have to be released with."""
        self._client, self._store = client, store
        self._selector = Selector(node_name, labels)
        self._own = tuple(own_cidrs)
        self._on_event, self._on_pass = on_event, on_pass
        self._interval, self._grace, self._settle = interval, grace, settle
        self._pauses = pauses
        self._cni_path = cni_path
        self._queue = WorkQueue()
        self._counts = _Counts()
        self._lock = threading.Lock()
        self._working = threading.Lock()
        self._pods: dict[str, Pod] = {}  # by uid
        self._version = ""  # from which on to watch; "" is to list anew
        self._connected = False
        self._condition = Condition("pods", False, "the API server has not been asked yet")
        self._pass_at = 0.0
        self._absent: dict[Owner, float] = {}  # since when their pods are not to be seen
        self._suspect: dict[str, float] = {}  # since when pods' networks differ, by uid
        self._told: dict[str, str] = {}  # what was said of pods that cannot be mended, by uid
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def condition(self) -> Condition:
        """For /ready. Once the pods are known, an API server that is away is worth a word, but
        keeps no node from serving pods."""
        return self._condition

    def held_back(self) -> str:
        """The same as the monitor asks for it: why the node is not ready, or nothing."""
        return "" if self._condition.ok else self._condition.message

    @property
    def stats(self) -> Stats:
        counts = self._counts
        return Stats(
            self._connected,
            len(self._pods),
            len(self._queue),
            counts.lists,
            counts.watches,
            counts.dropped,
        )

    def start(self) -> None:
        self._threads = [
            threading.Thread(target=self._watch, name="pods-watch", daemon=True),
            threading.Thread(target=self._work, name="pods", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the watch and the passes; networks stay as they are."""
        self._stopping.set()
        self._queue.close()
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < deadline:
                self._client.cancel()
                thread.join(0.1)

    def every(self, seconds: float) -> None:
        """From now on the passes over all pods are so far apart."""
        self._interval = seconds
        self._plan_pass()
        self._queue.interrupt()

    def is_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def reconcile(self) -> PassReport:
        """One pass over all pods and networks. Without a current view of the pods it does nothing
        and says so; it never raises what a later pass may find mended."""
        if not self._connected:
            return PassReport(problem=self._condition.message)
        return self._pass(None)

    # The API server's side.

    def _watch(self) -> None:
        keep_watching(self._watch_once, self._lost, self._failed, self._stopping, self._pauses)

    def _watch_once(self, heard: Callable[[], None]) -> None:
        if not self._version:
            self._list()
        with self._client.watch(self._selector, self._version) as changes:
            self._counts.watches += 1
            self._found()
            for change in changes:
                heard()
                self._apply(change)

    def _failed(self, bug: Exception) -> None:
        self._version = ""
        log.error("a bug in HeadCNI", problem=bug)
        self._tell(False, f"a bug in HeadCNI: {bug!r}")

    def _list(self) -> None:
        found = self._client.pods(self._selector)
        self._counts.lists += 1
        if not found.pods:
            self._check_name()
        pods = {pod.uid: pod for pod in found.pods}
        with self._lock:
            changed = [uid for uid, pod in pods.items() if self._pods.get(uid) != pod]
            gone = [uid for uid in self._pods if uid not in pods]
            self._pods = pods
        self._version = found.version
        self._found()
        log.info("listed", pods=len(pods), changed=len(changed), gone=len(gone))
        for uid in (*changed, *gone):
            self._enqueue(uid)

    def _check_name(self) -> None:
        """A node without pods is rare, and a wrong name is not."""
        name = self._selector.node
        try:
            known = self._client.has_node(name)
        except KubeError as problem:
            if problem.kind != DENIED:
                raise
            log.debug("whether the node is known cannot be asked", problem=problem)
            return
        if not known:
            raise KubeError(
                REFUSED,
                f"Kubernetes knows no node by the name {name}",
                "set daemon.nodeName to what `kubectl get nodes` shows",
                retry_after=self._pauses[1],
            )

    def _apply(self, change: Change) -> None:
        if change.type != BOOKMARK and change.pod is not None:
            pod = change.pod
            with self._lock:
                if change.type == DELETED:
                    self._pods.pop(pod.uid, None)
                    matters = True
                else:
                    matters = self._pods.get(pod.uid) != pod
                    self._pods[pod.uid] = pod
            if matters:
                log.debug("pod", event=change.type.lower(), pod=pod.ref, phase=pod.phase)
                self._enqueue(pod.uid)
        self._version = change.version

    def _enqueue(self, uid: str, delay: float = 0.0) -> None:
        if not self._queue.put(uid, delay):
            self._counts.dropped += 1
            self._pass_at = time.monotonic()  # it is among all

    def _found(self) -> None:
        self._connected = True
        self._tell(True, "")

    def _lost(self, problem: KubeError) -> None:
        if problem.kind == GONE or (problem.kind == REFUSED and not problem.retry_after):
            self._version = ""
        if problem.kind == GONE:
            log.info("the pods are listed anew", problem=problem)
            return
        self._connected = False
        known = self._version or self._pods
        if known:
            self._tell(True, f"pods as last seen; {problem}")
        else:
            self._tell(False, str(problem))

    def _tell(self, ok: bool, message: str) -> None:
        """Logged when it changes; its figures aside, which differ each time."""
        before, self._condition = self._condition, Condition("pods", ok, message)
        if re.sub(r"\d+", "", before.message) == re.sub(r"\d+", "", message):
            return
        if message:
            log.warn("the API server cannot be watched", problem=message)
        else:
            log.info("watching", node=self._selector.node, labels=self._selector.labels)

    # The node's side.

    def _work(self) -> None:
        self._plan_pass()
        while not self._stopping.is_set():
            uids = self._queue.take(self._pass_at)
            if self._stopping.is_set():
                return
            if uids and self._connected:
                self._pass(frozenset(uids))
            if time.monotonic() >= self._pass_at:
                self._plan_pass()
                self.reconcile()

    def _plan_pass(self) -> None:
        # Nodes that were started together do not ask together for ever.
        wait = self._interval * random.uniform(0.8, 1.2)  # noqa: S311
        self._pass_at = time.monotonic() + wait

    def _pass(self, uids: Optional[frozenset[str]]) -> PassReport:
        """Over these pods, or all."""
        began = time.monotonic()
        with self._working:
            report = self._attempt(uids)
        if self._on_pass is not None:
            try:
                self._on_pass(report, time.monotonic() - began)
            except Exception as bug:  # a listener's mistake cuts nobody off
                log.error("a listener failed", problem=bug)
        return report

    def _attempt(self, uids: Optional[frozenset[str]]) -> PassReport:
        try:
            return self._compare(uids)
        except (CniError, OSError) as problem:
            if not self._stopping.is_set():
                log.warn("not compared", problem=problem)
            return PassReport(problem=str(problem))
        except Exception as bug:  # without passes nothing is repaired; the next may well succeed
            log.error("a bug in HeadCNI", problem=bug)
            return PassReport(problem=f"a bug in HeadCNI: {bug!r}")

    def _compare(self, uids: Optional[frozenset[str]]) -> PassReport:
        with self._lock:
            pods = dict(self._pods)
        attachments = [one for one in self._store().attachments() if _is_a_pods(one)]
        by_uid = {uid: pod for pod in pods.values() for uid in pod.runs_as}
        by_name = {(pod.namespace, pod.name): pod for pod in pods.values()}
        networks: dict[str, list[Attachment]] = {}
        newest: dict[tuple[str, str, str], Attachment] = {}
        owned = []
        for one in attachments:  # the oldest first
            pod = by_uid.get(one.pod.uid)
            if pod is None and not one.pod.uid:
                pod = by_name.get((one.pod.namespace, one.pod.name))
            owned.append((one, pod))
            if pod is not None:
                networks.setdefault(pod.uid, []).append(one)
                newest[pod.uid, one.owner.network, one.owner.ifname] = one
        orphans = []
        for one, pod in owned:
            if uids is not None and one.pod.uid not in uids:
                continue
            if pod is None or pod.ended:
                orphans.append((one, False))
            elif newest[pod.uid, one.owner.network, one.owner.ifname] is not one:
                orphans.append((one, True))
            else:
                self._absent.pop(one.owner, None)
        if uids is None:
            self._forget(pods, attachments)
        released = self._collect(orphans)
        running = [
            pod
            for uid, pod in pods.items()
            if (uids is None or uid in uids) and _should_have_network(pod)
        ]
        repaired, missing = self._look_after(running, networks)
        return PassReport(len(pods), released, repaired, missing)

    def _forget(self, pods: dict[str, Pod], attachments: list[Attachment]) -> None:
        """What was noted of what is no more."""
        owners = {one.owner for one in attachments}
        self._absent = {o: since for o, since in self._absent.items() if o in owners}
        for noted in (self._suspect, self._told):
            for uid in set(noted) - set(pods):
                del noted[uid]

    def _collect(self, orphans: list[tuple[Attachment, bool]]) -> int:
        """Release those networks whose pods and sandboxes are gone, and have been for a while. Of a
        pod that is there, a sandbox that was replaced by a newer one is as good as gone."""
        now, released = time.monotonic(), 0
        at_work: Optional[frozenset[int]] = None
        looked = False
        for one, replaced in orphans:
            since = self._absent.setdefault(one.owner, now)
            left = max(since + self._grace - now, one.created + self._grace - time.time())
            if left > 0:
                self._enqueue(one.pod.uid, min(left, self._grace) + 0.1)
                continue
            if not looked and os.path.exists(one.netns):
                looked, at_work = True, repair.namespaces_at_work()
            if not repair.is_dead(one.netns, at_work) or not (replaced or self._is_gone(one.pod)):
                continue
            try:
                self._undo(one)
            except CniError as problem:
                log.warn("a leaked network cannot be released", pod=one.pod, problem=problem)
                continue
            self._absent.pop(one.owner, None)
            why = "its sandbox was replaced" if replaced else "its pod and its sandbox are gone"
            self._say(LEAKED, one, one.pod, f"{why}: released")
            released += 1
        return released

    def _is_gone(self, ref: PodRef) -> bool:
        """As the API server says now, of this very pod."""
        try:
            pod = self._client.pod(ref.namespace, ref.name)
        except KubeError as problem:
            if problem.kind != DENIED:
                raise
            pod = self._client.pod_of_node(self._selector.node, ref.namespace, ref.name)
        return pod is None or pod.ended or bool(ref.uid and ref.uid not in pod.runs_as)

    def _undo(self, attachment: Attachment) -> None:
        repair.release(attachment, self._opened, self._cni_path)

    def _look_after(
        self, running: list[Pod], networks: dict[str, list[Attachment]]
    ) -> tuple[int, int]:
        """Mend what has come apart; how many were mended, and how many cannot be."""
        repaired = missing = 0
        with self._opened() as node:
            host = repair.look(node.kernel)
            for pod in running:
                alive = [
                    one for one in networks.get(pod.uid, ()) if not repair.is_dead(one.netns, None)
                ]
                if not alive and not self._is_ours(pod):
                    continue
                found = [
                    (one, differing)
                    for one in alive
                    if (differing := self._differences(node, host, one))
                ]
                if alive and not found:
                    self._suspect.pop(pod.uid, None)
                    self._told.pop(pod.uid, None)
                elif not self._has_lasted(pod.uid, self._settle if alive else self._grace):
                    continue
                elif not alive:
                    missing += 1
                    known = networks.get(pod.uid)
                    self._complain(pod, known[-1] if known else None, _DEAD if known else _UNKNOWN)
                else:
                    for one, differing in found:
                        done = self._mend(node, pod, one, differing)
                        repaired += done == REPAIRED
                        missing += done == MISSING
        return repaired, missing

    def _differences(self, node: verbs.Node, host: repair.Host, one: Attachment) -> list[str]:
        return repair.differences(node, host, repair.network_of(one), one)

    def _has_lasted(self, uid: str, seconds: float) -> bool:
        now = time.monotonic()
        since = self._suspect.setdefault(uid, now)
        if now - since >= seconds:
            return True
        self._enqueue(uid, since + seconds - now + 0.1)
        return False

    def _mend(
        self, node: verbs.Node, pod: Pod, attachment: Attachment, differing: list[str]
    ) -> str:
        if node.store.attachment(attachment.owner) is None:
            return ""  # a DEL was quicker
        problem = ""
        try:
            repair.mend(node, repair.network_of(attachment), attachment)
            if node.store.attachment(attachment.owner) is None:  # a DEL came in between
                self._undo(attachment)
                return ""
            left = self._differences(node, repair.look(node.kernel), attachment)
            problem = "; ".join(left)
        except CniError as failure:
            problem = f"{'; '.join(differing)}; it cannot be mended: {failure}"
        self._suspect.pop(pod.uid, None)
        if problem:
            self._complain(pod, attachment, problem)
            return MISSING
        self._told.pop(pod.uid, None)
        self._say(REPAIRED, attachment, attachment.pod, "; ".join(differing))
        return REPAIRED

    def _complain(self, pod: Pod, attachment: Optional[Attachment], message: str) -> None:
        """Once, as long as it stays the same."""
        if self._told.get(pod.uid) != message:
            self._told[pod.uid] = message
            self._say(MISSING, attachment, pod.ref, message)

    def _is_ours(self, pod: Pod) -> bool:
        """Whether a pod that the store does not know has an address that only we can have given."""
        return any(
            ip_address(ip) in cidr
            for ip in pod.ips
            for cidr in self._own
            if (":" in ip) == (cidr.version == 6)
        )

    @contextmanager
    def _opened(self, _data_dir: str = "") -> Iterator[verbs.Node]:
        """The store is the one that the attachments came from, whatever their configuration says
        of a data_dir."""
        store = self._store()
        with Netlink() as kernel:
            yield verbs.Node(store, Ipam(store), kernel)

    def _say(self, kind: str, attachment: Optional[Attachment], pod: PodRef, message: str) -> None:
        write = log.info if kind == REPAIRED else log.warn
        write(kind, pod=pod, uid=pod.uid, was=message)
        if self._on_event is not None:
            try:
                self._on_event(kind, attachment, pod, message)
            except Exception as bug:  # a listener's mistake cuts nobody off
                log.error("a listener failed", problem=bug)


def _is_a_pods(attachment: Attachment) -> bool:
    """Of a pod, and not of a headcni within a chain, which goes when the chain does."""
    return bool(attachment.pod.name) and "/" not in attachment.owner.network


def _should_have_network(pod: Pod) -> bool:
    return pod.phase == "Running" and not pod.host_network and not pod.terminating
