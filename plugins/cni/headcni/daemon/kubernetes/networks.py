"""Comparing this node's pods, as the API server knows them, with the networks that they have.

Two problems are never solved by a CNI call. A network is *leaked* if its pod and its sandbox are
gone and no DEL came: it is released by the same code as in a DEL. A network is *missing* if a pod
runs and has lost its link, address or ports: it is repaired in place, or else reported. In case of
doubt nothing is done:

- An API server that does not answer proves nothing, and neither does a list. Whether a pod is gone
  is asked for exactly that pod, and only the API server's own "not found" counts. So a label
  selector, a wrong node name or an empty list releases nothing.
- A sandbox with a living process is not dead, whatever the API server says.
- Both must be the case for a while, because kubelet may be about to send the DEL.
- Pods on the host's network, attachments without a pod, and pods of another plugin are ignored.

Without an API server none of this runs, and nothing else needs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Callable, Optional

from ... import repair
from ...errors import CniError
from ...log import Log
from ...model import Network, Owner, PodRef
from ...plugins.headcni.node import Node, of_store
from ...store import Attachment, Store
from .client import KubeClient
from .errors import DENIED, KubeError
from .objects import Pod

LEAKED, MISSING, REPAIRED = "pod-leaked", "pod-missing", "pod-repaired"

GRACE_SECONDS = 60.0
SETTLE_SECONDS = 5.0  # a difference must be seen twice, this far apart: a call may be in progress

# What happened, the network that it happened to (None if there is none), the pod, and words.
OnEvent = Callable[[str, Optional[Attachment], PodRef, str], None]

_UNKNOWN = (
    "it has an address of this node's, but no network that HeadCNI knows of: "
    "delete the pod, so that it is made anew"
)
_DEAD = "it runs as far as Kubernetes knows, but its sandbox is dead: is kubelet running?"

log = Log("pods")


@dataclass(frozen=True)
class PassReport:
    """What a pass over all pods, or over changed pods, found and did."""

    pods: int = 0
    released: int = 0
    repaired: int = 0
    missing: int = 0
    problem: str = ""


class PodNetworks:
    """Compares pods with their networks, releases leaked networks and repairs broken ones."""

    def __init__(
        self,
        client: KubeClient,
        store: Callable[[], Store],
        node_name: str,
        look_again: Callable[[str, float], None],
        *,
        own_cidrs: Iterable[Network] = (),
        on_event: Optional[OnEvent] = None,
        grace: float = GRACE_SECONDS,
        settle: float = SETTLE_SECONDS,
        cni_path: str = repair.CNI_PATH,
    ) -> None:
        """`look_again` asks for another comparison of a pod, by its uid, after some seconds.
        `own_cidrs` distinguish our pods from those of another plugin. `cni_path` is where to find
        the plugins that may be needed to release a leaked network."""
        self._client, self._store, self._node_name = client, store, node_name
        self._look_again = look_again
        self._own = tuple(own_cidrs)
        self._on_event = on_event
        self._grace, self._settle, self._cni_path = grace, settle, cni_path
        self._absent: dict[Owner, float] = {}  # since when their pods are gone
        self._suspect: dict[str, float] = {}  # since when pods' networks differ, by uid
        self._told: dict[str, str] = {}  # what was said of pods that cannot be repaired, by uid

    def compare(self, pods: Mapping[str, Pod], uids: Optional[frozenset[str]] = None) -> PassReport:
        """Compare these of the pods, or all, with the networks in the store."""
        attachments = [
            attachment for attachment in self._store().attachments() if _is_a_pods(attachment)
        ]
        by_uid = {uid: pod for pod in pods.values() for uid in pod.runs_as}
        by_name = {(pod.namespace, pod.name): pod for pod in pods.values()}
        networks: dict[str, list[Attachment]] = {}
        newest: dict[tuple[str, str, str], Attachment] = {}
        owned = []
        for attachment in attachments:  # the oldest first
            pod = by_uid.get(attachment.pod.uid)
            if pod is None and not attachment.pod.uid:
                pod = by_name.get((attachment.pod.namespace, attachment.pod.name))
            owned.append((attachment, pod))
            if pod is not None:
                networks.setdefault(pod.uid, []).append(attachment)
                newest[pod.uid, attachment.owner.network, attachment.owner.ifname] = attachment
        orphans = []
        for attachment, pod in owned:
            if uids is not None and attachment.pod.uid not in uids:
                continue
            if pod is None or pod.ended:
                orphans.append((attachment, False))
            elif (
                newest[pod.uid, attachment.owner.network, attachment.owner.ifname] is not attachment
            ):
                orphans.append((attachment, True))
            else:
                self._absent.pop(attachment.owner, None)
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

    def _forget(self, pods: Mapping[str, Pod], attachments: list[Attachment]) -> None:
        """Drop the notes about pods and networks that no longer exist."""
        owners = {attachment.owner for attachment in attachments}
        self._absent = {o: since for o, since in self._absent.items() if o in owners}
        for noted in (self._suspect, self._told):
            for uid in set(noted) - set(pods):
                del noted[uid]

    def _collect(self, orphans: list[tuple[Attachment, bool]]) -> int:
        """Release networks whose pods and sandboxes have been gone for a while. If the pod
        exists, a sandbox that was replaced by a newer one counts as gone."""
        now, released = time.monotonic(), 0
        at_work: Optional[frozenset[int]] = None
        looked = False
        for orphan, replaced in orphans:
            since = self._absent.setdefault(orphan.owner, now)
            left = max(since + self._grace - now, orphan.created + self._grace - time.time())
            if left > 0:
                self._look_again(orphan.pod.uid, min(left, self._grace) + 0.1)
                continue
            if not looked and os.path.exists(orphan.netns):
                looked, at_work = True, repair.namespaces_at_work()
            if not repair.is_dead(orphan.netns, at_work) or not (
                replaced or self._is_gone(orphan.pod)
            ):
                continue
            try:
                self._undo(orphan)
            except CniError as problem:
                log.warn("a leaked network cannot be released", pod=orphan.pod, problem=problem)
                continue
            self._absent.pop(orphan.owner, None)
            why = "its sandbox was replaced" if replaced else "its pod and its sandbox are gone"
            self._say(LEAKED, orphan, orphan.pod, f"{why}: released")
            released += 1
        return released

    def _is_gone(self, ref: PodRef) -> bool:
        """Whether the API server says now that exactly this pod is gone."""
        try:
            pod = self._client.pod(ref.namespace, ref.name)
        except KubeError as problem:
            if problem.kind != DENIED:
                raise
            pod = self._client.pod_of_node(self._node_name, ref.namespace, ref.name)
        return pod is None or pod.ended or bool(ref.uid and ref.uid not in pod.runs_as)

    def _undo(self, attachment: Attachment) -> None:
        repair.release(attachment, self._store(), self._cni_path)

    def _look_after(
        self, running: list[Pod], networks: dict[str, list[Attachment]]
    ) -> tuple[int, int]:
        """Repair broken networks. Returns how many were repaired, and how many could not be."""
        repaired = missing = 0
        with of_store(self._store()) as node:
            host = repair.Reader(node.kernel)
            for pod in running:
                alive = [
                    network
                    for network in networks.get(pod.uid, ())
                    if not repair.is_dead(network.netns, None)
                ]
                if not alive and not self._is_ours(pod):
                    continue
                found = [
                    (attachment, differing)
                    for attachment in alive
                    if (differing := self._differences(node, host, attachment))
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
                    for attachment, differing in found:
                        done = self._repair(node, pod, attachment, differing)
                        repaired += done == REPAIRED
                        missing += done == MISSING
        return repaired, missing

    def _differences(self, node: Node, host: repair.Reader, attachment: Attachment) -> list[str]:
        return repair.differences(node, host, repair.network_of(attachment), attachment)

    def _has_lasted(self, uid: str, seconds: float) -> bool:
        now = time.monotonic()
        since = self._suspect.setdefault(uid, now)
        if now - since >= seconds:
            return True
        self._look_again(uid, since + seconds - now + 0.1)
        return False

    def _repair(self, node: Node, pod: Pod, attachment: Attachment, differing: list[str]) -> str:
        if node.store.attachment(attachment.owner) is None:
            return ""  # a DEL came first
        problem = ""
        try:
            repair.mend(node, repair.network_of(attachment), attachment)
            if node.store.attachment(attachment.owner) is None:  # a DEL came in between
                self._undo(attachment)
                return ""
            left = self._differences(node, repair.Reader(node.kernel), attachment)
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
        """Report a problem once, as long as it stays the same."""
        if self._told.get(pod.uid) != message:
            self._told[pod.uid] = message
            self._say(MISSING, attachment, pod.ref, message)

    def _is_ours(self, pod: Pod) -> bool:
        """Whether a pod that the store does not know has an address that only we can have given
        it."""
        return any(
            ip_address(ip) in cidr
            for ip in pod.ips
            for cidr in self._own
            if (":" in ip) == (cidr.version == 6)
        )

    def _say(self, kind: str, attachment: Optional[Attachment], pod: PodRef, message: str) -> None:
        write = log.info if kind == REPAIRED else log.warn
        write(kind, pod=pod, uid=pod.uid, was=message)
        if self._on_event is not None:
            try:
                self._on_event(kind, attachment, pod, message)
            except Exception as bug:  # a mistake in a listener must not stop the passes
                log.error("a listener failed", problem=bug)


def _is_a_pods(attachment: Attachment) -> bool:
    """Whether it belongs to a pod, and not to a headcni inside a chain, which goes with the
    chain."""
    return bool(attachment.pod.name) and "/" not in attachment.owner.network


def _should_have_network(pod: Pod) -> bool:
    return pod.phase == "Running" and not pod.host_network and not pod.terminating
