"""What pods of this node may reach of the tailnet: computed here, and kept in the store.

The configuration has a value for the node, and for namespaces. A Kubernetes namespace may have an
annotation. The configuration's value for a namespace comes first, then the annotation, then the
node's value. Annotations of pods are not read. ADD finds the result in the store, with or without
this daemon, so a limit applies to a pod before its ADD returns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, Callable, Optional

from ..datapath import firewall
from ..datapath import tailnet as rules
from ..errors import shortened
from ..log import Log
from ..model import Network
from ..settings import DaemonConfig
from ..store import Store
from ..tailnet_access import ANNOTATION, FORGOTTEN, PODS, Policy, WrongAccess, parse, policy

LONGEST_SHOWN = 80  # characters of a wrong annotation
MOST_SHOWN, LONGEST_ACCESS = 50, 500  # in the status

log = Log("tailnet")


class TailnetAccess:
    """Keeps the limits in the store. ensure() writes only what has changed."""

    def __init__(
        self,
        store: Callable[[], Store],
        config: Callable[[], DaemonConfig],
        watched: bool,
        mesh: Callable[[], Iterable[Network]] = tuple,
    ) -> None:
        """`watched`: annotated() will be called with the annotations. Until then the limits in
        the store stay, so a daemon that starts while the API server is away opens nothing.
        `mesh`: the ranges of all pods and services, which no netconf can widen."""
        self._store, self._config, self._mesh = store, config, mesh
        self._annotated: Optional[dict[str, str]] = None if watched else {}
        self._lock = threading.Lock()
        self.mistakes: dict[str, str] = {}  # in annotations, by namespace

    def ensure(self) -> bool:
        """Returns whether something changed. A store that must be reconstructed first is left
        alone."""
        with self._lock:
            store = self._store()
            return not store.is_unverified() and firewall.set_policy(store, self.policy())

    def policy(self) -> Policy:
        config = self._config()
        node, configured = config.network.tailnet_access, config.network.tailnet_access_namespaces
        annotated = self._annotated
        if annotated is None:
            kept = self._store().read(rules.policy_of)
            annotated = {
                name: access for name, access in kept.namespaces if name not in kept.configured
            }
            if kept[:2] == FORGOTTEN[:2]:
                node, configured = PODS, ()
        links = [config.tailscale.interface]
        return policy(node, annotated, dict(configured), links, self._mesh())

    def annotated(self, found: Mapping[str, str]) -> None:
        """Take over the annotations of namespaces. An annotation with a mistake counts as
        `pods`: its author wanted a limit."""
        accesses, mistakes = {}, {}
        for name, text in found.items():
            try:
                accesses[name] = parse(text)
            except WrongAccess as wrong:
                accesses[name] = PODS
                shown = shortened(text, LONGEST_SHOWN)
                mistakes[name] = f"{ANNOTATION} is {shown!r}: expected {wrong}; taken for pods"
        for name, mistake in sorted(set(mistakes.items()) - set(self.mistakes.items())):
            log.warn("a namespace has a mistake in its annotation", namespace=name, was=mistake)
        self.mistakes = mistakes
        if accesses != self._annotated:
            self._annotated = accesses
            self.ensure()

    def status(self) -> dict[str, Any]:
        """For headcnictl: the node's value, and the namespaces that differ, up to a readable
        number."""
        now = self.policy()
        differing = [namespace for namespace in now.namespaces if namespace[1] != now.node]
        shown = {name: shortened(access, LONGEST_ACCESS) for name, access in differing[:MOST_SHOWN]}
        return {"node": now.node, "namespaces": shown, "more": len(differing) - len(shown)}
