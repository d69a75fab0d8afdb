"""Policies, namespaces and pods of a cluster, as its API server knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Tuple

from ...policy.objects import Key, Namespace, Pod, Policy
from ..kubernetes.client import NAMESPACES, KubeClient, Resource
from ..kubernetes.watched import WatchedKind
from ..kubernetes.watching import FIRST_PAUSE, LONGEST_PAUSE
from .feed import Feed

PODS = Resource("/api/v1/pods", "Pod", page=200, most=50_000)
POLICIES = Resource(
    "/apis/networking.k8s.io/v1/networkpolicies", "NetworkPolicy", page=200, most=20_000
)


class FromKubernetes:
    """Watches from start() to stop(), once. While the API server is away, everything stays."""

    name = "kubernetes"

    def __init__(
        self,
        client: Callable[[], KubeClient],
        feed: Feed,
        pauses: Tuple[float, float] = (FIRST_PAUSE, LONGEST_PAUSE),
    ) -> None:
        """`client` makes a client for each watch."""
        self._watches: Tuple[WatchedKind[Any, Any], ...] = (
            WatchedKind(
                client(), NAMESPACES, _name, Namespace.from_object, feed.namespaces, pauses
            ),
            WatchedKind(client(), POLICIES, _key, Policy.from_object, feed.policies, pauses),
            WatchedKind(client(), PODS, _key, Pod.from_object, feed.pods, pauses),
        )

    def start(self) -> None:
        for watch in self._watches:
            watch.start()

    def stop(self) -> None:
        for watch in self._watches:
            watch.ask_to_stop()
        for watch in self._watches:
            watch.stop()

    def is_alive(self) -> bool:
        return all(watch.is_alive() for watch in self._watches)

    def problems(self) -> Tuple[str, ...]:
        """Why what we know may be old, each once: often all watches have the same problem."""
        return tuple(dict.fromkeys(watch.problem for watch in self._watches if watch.problem))

    def pods_changed(self) -> None:
        """The API server says more about new pods than this node knows."""


def _name(found: Mapping[str, Any]) -> str:
    return str(found["metadata"]["name"])


def _key(found: Mapping[str, Any]) -> Key:
    meta = found["metadata"]
    return str(meta["namespace"]), str(meta["name"])
