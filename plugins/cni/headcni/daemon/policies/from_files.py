"""Policies of a node without Kubernetes: objects from files, and the pods of this node.

Pods of other nodes are known only as far as the files describe them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Callable, Dict, Tuple

from ...errors import CniError
from ...log import Log
from ...periodic import Periodic
from ...policy.bindings import of_attachment
from ...policy.objects import Key, Labels, Pod
from ...store import Attachment, Store
from . import files
from .feed import Feed

LOOK_SECONDS = 2.0
STOP_SECONDS = 5.0

log = Log("policy-files")


class FromFiles:
    """Looks from start() to stop(), once."""

    name = "files"

    def __init__(
        self,
        store: Callable[[], Store],
        data_dir: str,
        node_name: str,
        feed: Feed,
        folder: str,
        interval: float = LOOK_SECONDS,
    ) -> None:
        self._store, self._node_name, self._feed = store, node_name, feed
        kept = os.path.join(data_dir, files.KEPT)
        self._files = files.PolicyFiles(kept, folder)
        self._problem = ""
        self._is_new = False  # whether the feed does not have what the files say
        self._loop = Periodic("policy-files", self._look, interval)

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop(STOP_SECONDS)

    def is_alive(self) -> bool:
        return self._loop.is_alive()

    def problems(self) -> Tuple[str, ...]:
        return (*self._files.problems, *filter(None, [self._problem]))

    def pods_changed(self) -> None:
        """A pod of this node was added or deleted."""
        self._loop.wake()

    def _look(self) -> None:
        self._is_new = self._files.look() or self._is_new
        declared = self._files.declared
        if declared is None:
            return
        try:
            attachments = self._store().attachments()
            self._problem = ""
        except (CniError, OSError) as problem:
            self._problem = f"the pods of this node are not known: {problem}"
            log.warn("pods keep the policies that they have", problem=problem)
            return
        # Namespaces and policies first: pods alone would be seen without any policy.
        if self._is_new:
            self._feed.namespaces.listed(declared.namespaces, {})
            self._feed.policies.listed(declared.policies, {})
            self._is_new = False
        self._feed.pods.listed(pods_of(attachments, declared, self._node_name), {})


def pods_of(
    attachments: Iterable[Attachment], declared: files.Declared, node_name: str
) -> Dict[Key, Pod]:
    """Pods of this node with their labels, and pods of other nodes as the files describe them."""
    found = dict(declared.pods)
    for attachment in attachments:
        binding = of_attachment(attachment)
        if binding is None:
            continue
        key, addresses = binding.key, binding.addresses
        described = declared.pods.get(key)
        before = found.get(key)
        if before is not None and before is not described:
            addresses = before.addresses + addresses  # of another network
        found[key] = Pod(
            namespace=key[0],
            name=key[1],
            uid=binding.ref.uid,
            labels=_labels(key, attachment, declared),
            addresses=addresses,
            ports=described.ports if described is not None else (),
            node=node_name,
            phase="Running",
        )
    return found


def _labels(key: Key, attachment: Attachment, declared: files.Declared) -> Labels:
    """Those of the call, then those of the files, which only root writes and which win."""
    labels: Dict[str, str] = dict(attachment.state.get("labels") or {})
    described = declared.pods.get(key)
    extra: Tuple[Mapping[str, str], ...] = tuple(
        given for pattern, given in declared.labels if fnmatchcase("/".join(key), pattern)
    )
    for given in (described.labels if described is not None else {}, *extra):
        labels.update(given)
    return labels
