"""What happened to pods' networks: written to the log, counted, and sent to followers.

The newest events are kept for those who ask later. A follower that is too slow loses the oldest of
its waiting events, and is told how many. Nobody waits for a follower.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Deque, Dict, List, Optional, Set

from ...errors import shortened
from ...log import Log
from ...model import PodRef
from ...store import Attachment

KEPT = 256
WAITING = 256
LONGEST_REASON = 1024  # characters; events are kept in memory, and a pod's author may cause them
MOST_ADDRESSES = 16

ADDED, DELETED, FAILED, LEAKED, MISSING, REPAIRED = (
    "pod-added",
    "pod-deleted",
    "pod-failed",
    "pod-leaked",
    "pod-missing",
    "pod-repaired",
)

_NO_POD = PodRef()

log = Log("events")


@dataclass(frozen=True)
class Event:
    """`pod_ip` and `gateway` have an address for each family. `interface` is the pod's."""

    type: str
    pod: PodRef = _NO_POD
    network: str = ""
    container_id: str = ""
    interface: str = ""
    host_interface: str = ""
    pod_ip: List[str] = field(default_factory=list)
    gateway: List[str] = field(default_factory=list)
    reason: str = ""
    time: float = field(default_factory=time.time)

    @classmethod
    def of(cls, kind: str, attachment: Attachment, reason: str = "") -> Event:
        ips = attachment.result.get("ips") or []
        return cls(
            kind,
            attachment.pod,
            attachment.owner.network,
            attachment.owner.container_id,
            attachment.owner.ifname,
            attachment.host_ifname,
            [str(ip["address"]).partition("/")[0] for ip in ips],
            [str(ip["gateway"]) for ip in ips if ip.get("gateway")],
            reason,
        )

    def as_dict(self) -> Dict[str, Any]:
        """As it is sent. Unknown values are left out."""
        named = {
            "type": self.type,
            "time": self.time,
            "namespace": self.pod.namespace,
            "pod": self.pod.name,
            "uid": self.pod.uid,
            "network": self.network,
            "container_id": self.container_id,
            "pod_ip": self.pod_ip[:MOST_ADDRESSES],
            "gateway": self.gateway[:MOST_ADDRESSES],
            "interface": self.interface,
            "host_interface": self.host_interface,
            "reason": shortened(self.reason, LONGEST_REASON),
        }
        return {name: value for name, value in named.items() if value}


class Follower:
    """Receives events. `next` waits for at most that many seconds."""

    def __init__(self) -> None:
        self._waiting: Deque[Dict[str, Any]] = deque()
        self._lost = 0
        self._changed = threading.Condition()

    def next(self, seconds: float) -> Optional[Dict[str, Any]]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._lost > 0, seconds)
            if self._lost:
                lost, self._lost = self._lost, 0
                return {"type": "lost", "count": lost}
            return self._waiting.popleft() if self._waiting else None

    def tell(self, event: Dict[str, Any]) -> None:
        with self._changed:
            if len(self._waiting) >= WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(event)
            self._changed.notify()


class Events:
    """The latest events, and their followers."""

    def __init__(self, count: Callable[[str], None] = lambda _unused: None) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._kept: Deque[Dict[str, Any]] = deque(maxlen=KEPT)
        self._followers: Set[Follower] = set()

    def tell(self, event: Event) -> None:
        told = event.as_dict()
        self._count(event.type)
        write = log.warn if event.type in (FAILED, LEAKED, MISSING) else log.info
        write(event.type, **{k: v for k, v in told.items() if k not in ("type", "time")})
        with self._lock:
            self._kept.append(told)
            for follower in self._followers:
                follower.tell(told)

    def wake(self) -> None:
        """Let followers look around although nothing has happened."""
        with self._lock:
            for follower in self._followers:
                follower.tell({})

    def kept(self) -> List[Dict[str, Any]]:
        with self._lock:
            return list(self._kept)

    @contextmanager
    def following(self) -> Iterator[Follower]:
        """The kept events, and then all new ones, without a gap."""
        follower = Follower()
        with self._lock:
            for event in self._kept:
                follower.tell(event)
            self._followers.add(follower)
        try:
            yield follower
        finally:
            with self._lock:
                self._followers.discard(follower)
