"""Hands what has changed to the enforcer, in small batches from one thread.

Each object waits at most once, however often it changes. The enforcer gets nothing before every
kind was listed, so that it never enforces a policy without knowing the pods that it allows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any, Callable, Dict, Generic, Optional, Protocol, Tuple, TypeVar

from ...errors import CniError, shortened
from ...log import Log
from ...policy.objects import Key, Namespace, Pod, Policy, World

GATHER_SECONDS = 0.01
PAUSE_SECONDS = 5.0  # after a bug
# From so many changes on, everything is compiled anew: that is faster than one by one.
MANY = 500
MOST_PROBLEMS = 20
LONGEST_PROBLEM = 500
STOP_SECONDS = 5.0

log = Log("policies")

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Enforces(Protocol):
    """The part of the enforcer that is fed."""

    def set_world(self, world: World) -> None: ...
    def pod_changed(self, key: Key, pod: Optional[Pod]) -> None: ...
    def namespace_changed(self, name: str, namespace: Optional[Namespace]) -> None: ...
    def policy_changed(self, key: Key, policy: Optional[Policy]) -> None: ...


class Known(Generic[K, V]):
    """All objects of a kind as they were heard last. Its methods are those of a Listener."""

    def __init__(self, kind: str, feed: Feed, apply: Callable[[K, Optional[V]], None]) -> None:
        """`apply` tells the enforcer about one object; None: it is gone."""
        self.kind, self._feed, self.apply = kind, feed, apply
        self.objects: Dict[K, V] = {}
        self.mistakes: Dict[K, str] = {}
        self.waiting: Dict[K, Optional[V]] = {}  # what the enforcer does not have yet
        self.is_listed = False

    def listed(self, found: Mapping[K, V], wrong: Mapping[K, str]) -> None:
        """What is wrong now keeps its last value that was understood."""
        with self._feed.changed:
            for key in [key for key in self.objects if key not in found and key not in wrong]:
                self._take(key, None)
            for key, value in found.items():
                self._take(key, value)
            self.mistakes = dict(wrong)
            self.is_listed = True
            self._feed.changed.notify()

    def changed(self, key: K, value: V) -> None:
        with self._feed.changed:
            self.mistakes.pop(key, None)
            if self._take(key, value):
                self._feed.changed.notify()

    def wrong(self, key: K, problem: str) -> None:
        with self._feed.changed:
            before = self.mistakes.get(key)
            self.mistakes[key] = problem
        if before != problem:
            shown = shortened(problem, LONGEST_PROBLEM)
            log.error("an object has a mistake; its last state stays in force", problem=shown)

    def gone(self, key: K) -> None:
        with self._feed.changed:
            self.mistakes.pop(key, None)
            if self._take(key, None):
                self._feed.changed.notify()

    def _take(self, key: K, value: Optional[V]) -> bool:
        """Whether it differs from what is known."""
        if self.objects.get(key) == value:
            return False
        if value is None:
            del self.objects[key]
        else:
            self.objects[key] = value
        self.waiting[key] = value
        return True


class Feed:
    """Works from start() to stop(), once."""

    def __init__(
        self,
        enforcer: Enforces,
        on_apply: Callable[[str, float, bool], None] = lambda _kind, _seconds, _ok: None,
    ) -> None:
        """`on_apply` gets the kind of what was applied (`all` for everything), the seconds that it
        took, and whether it succeeded."""
        self._enforcer, self._on_apply = enforcer, on_apply
        self.changed = threading.Condition()
        self.pods: Known[Key, Pod] = Known("pod", self, enforcer.pod_changed)
        self.namespaces: Known[str, Namespace] = Known(
            "namespace", self, enforcer.namespace_changed
        )
        self.policies: Known[Key, Policy] = Known("policy", self, enforcer.policy_changed)
        self.since = 0.0  # when the enforcer got the first complete list; seconds since 1970
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="policies", daemon=True)

    @property
    def _kinds(self) -> Tuple[Known[Any, Any], ...]:
        # Pods last: a policy that is new together with its pods should not see each of them come.
        return self.namespaces, self.policies, self.pods

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self.changed:
            self._stopping = True
            self.changed.notify()
        self._thread.join(STOP_SECONDS)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def is_complete(self) -> bool:
        """Whether everything was listed at least once."""
        return all(known.is_listed for known in self._kinds)

    def mistakes(self) -> Tuple[str, ...]:
        """The objects that are not understood, up to a readable number."""
        with self.changed:
            found = [text for known in self._kinds for text in known.mistakes.values()]
        shown = [shortened(text, LONGEST_PROBLEM) for text in found[:MOST_PROBLEMS]]
        more = len(found) - len(shown)
        return (*shown, f"and {more} more objects with mistakes") if more else tuple(shown)

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(self._has_work)
                if self._stopping:
                    return
            time.sleep(GATHER_SECONDS)
            try:
                self._apply()
            except Exception as bug:  # hand over everything again: it may succeed
                log.error("a bug in HeadCNI", problem=repr(bug))
                self.since = 0.0
                with self.changed:
                    self.changed.wait_for(lambda: self._stopping, PAUSE_SECONDS)

    def _has_work(self) -> bool:
        return self._stopping or (
            self.is_complete() and (not self.since or any(known.waiting for known in self._kinds))
        )

    def _apply(self) -> None:
        with self.changed:
            batches = [(known, known.waiting) for known in self._kinds]
            for known in self._kinds:
                known.waiting = {}
            count = sum(len(batch) for _known, batch in batches)
            world = None
            if not self.since or count >= MANY:
                world = World(
                    dict(self.pods.objects),
                    dict(self.namespaces.objects),
                    dict(self.policies.objects),
                )
        if world is not None:
            if self._timed("all", partial(self._enforcer.set_world, world)):
                log.info("network policies are in force", policies=len(world.policies))
            self.since = self.since or time.time()
            return
        for known, batch in batches:
            for key, value in batch.items():
                self._timed(known.kind, partial(known.apply, key, value))

    def _timed(self, kind: str, work: Callable[[], None]) -> bool:
        """The enforcer keeps what it was told even if the kernel refuses it, and tries again when
        it repairs."""
        began, ok = time.monotonic(), False
        try:
            work()
            ok = True
        except (CniError, OSError) as problem:
            log.error("the rules for network policies stay as they were", problem=problem)
        self._on_apply(kind, time.monotonic() - began, ok)
        return ok
