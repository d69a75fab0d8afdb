"""This node's pods as the API server knows them: a list, a watch, and regular comparisons."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterable
from typing import Callable, NamedTuple, Optional

from ... import repair
from ...condition import Condition
from ...errors import CniError
from ...log import Log
from ...model import Network
from ...store import Store
from .client import KubeClient, Selector
from .errors import DENIED, GONE, REFUSED, KubeError
from .networks import GRACE_SECONDS, SETTLE_SECONDS, OnEvent, PassReport, PodNetworks
from .objects import BOOKMARK, DELETED, Change, Pod
from .watching import FIRST_PAUSE, LONGEST_PAUSE, keep_watching
from .work_queue import WorkQueue

INTERVAL_SECONDS = 45.0
STOP_SECONDS = 5.0

log = Log("pods")


class Stats(NamedTuple):
    """For the metrics: pods and queued pods now, and counters since the start."""

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
        """For `own_cidrs` and `cni_path` see PodNetworks."""
        self._client = client
        self._selector = Selector(node_name, labels)
        self._on_pass, self._interval, self._pauses = on_pass, interval, pauses
        self._networks = PodNetworks(
            client,
            store,
            node_name,
            self._enqueue,
            own_cidrs=own_cidrs,
            on_event=on_event,
            grace=grace,
            settle=settle,
            cni_path=cni_path,
        )
        self._queue = WorkQueue()
        self._counts = _Counts()
        self._lock = threading.Lock()
        self._working = threading.Lock()
        self._pods: dict[str, Pod] = {}  # by uid
        self._version = ""  # where to continue the watch; "" means to list again
        self._connected = False
        self._condition = Condition("pods", False, "the API server has not been asked yet")
        self._pass_at = 0.0
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def condition(self) -> Condition:
        """For /ready. Once the pods are known, a lost API server is mentioned, but does not make
        the node not ready."""
        return self._condition

    def held_back(self) -> str:
        """For the monitor: why the node is not ready, or an empty text."""
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
        """End the watch and the passes. Networks stay as they are."""
        self._stopping.set()
        self._queue.close()
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < deadline:
                self._client.cancel()
                thread.join(0.1)

    def every(self, seconds: float) -> None:
        """Change the interval between passes over all pods."""
        self._interval = seconds
        self._plan_pass()
        self._queue.interrupt()

    def is_alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def reconcile(self) -> PassReport:
        """One pass over all pods and networks. Without a current view of the pods it does
        nothing and says so. Problems that a later pass may solve are reported, not raised."""
        if not self._connected:
            return PassReport(problem=self._condition.message)
        return self._pass(None)

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
        """A node without pods is rare, and a wrong node name is not."""
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
            self._pass_at = time.monotonic()  # the pass over all pods includes it

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
        """Log the condition when it changes. Numbers are ignored, because they differ each time."""
        before, self._condition = self._condition, Condition("pods", ok, message)
        if re.sub(r"\d+", "", before.message) == re.sub(r"\d+", "", message):
            return
        if message:
            log.warn("the API server cannot be watched", problem=message)
        else:
            log.info("watching", node=self._selector.node, labels=self._selector.labels)

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
        # Nodes that were started together should not ask at the same moments for ever.
        wait = self._interval * random.uniform(0.8, 1.2)  # noqa: S311
        self._pass_at = time.monotonic() + wait

    def _pass(self, uids: Optional[frozenset[str]]) -> PassReport:
        """Compare these pods, or all."""
        began = time.monotonic()
        with self._working:
            report = self._attempt(uids)
        if self._on_pass is not None:
            try:
                self._on_pass(report, time.monotonic() - began)
            except Exception as bug:  # a mistake in a listener must not stop the passes
                log.error("a listener failed", problem=bug)
        return report

    def _attempt(self, uids: Optional[frozenset[str]]) -> PassReport:
        try:
            return self._compare(uids)
        except (CniError, OSError) as problem:
            if not self._stopping.is_set():
                log.warn("not compared", problem=problem)
            return PassReport(problem=str(problem))
        except Exception as bug:  # the next pass may succeed
            log.error("a bug in HeadCNI", problem=bug)
            return PassReport(problem=f"a bug in HeadCNI: {bug!r}")

    def _compare(self, uids: Optional[frozenset[str]]) -> PassReport:
        with self._lock:
            pods = dict(self._pods)
        return self._networks.compare(pods, uids)
