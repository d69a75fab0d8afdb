"""Pods and namespaces as the API server describes them, reduced to what the daemon uses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from ...model import PodRef
from .errors import GONE, REFUSED, KubeError, not_understood

LONGEST_ANNOTATION = 4100  # longer than any value that is understood
LONGEST_QUOTE = 200

ADDED, MODIFIED, DELETED, BOOKMARK = "ADDED", "MODIFIED", "DELETED", "BOOKMARK"

# Annotations of a static pod's mirror pod that name the uid under which kubelet runs it.
_STATIC = ("kubernetes.io/config.hash", "kubernetes.io/config.mirror")


class Pod(NamedTuple):
    """The part of a pod that concerns its network."""

    namespace: str
    name: str
    uid: str
    runs_as: tuple[str, ...]  # the uids that its sandbox may have; see _STATIC
    node: str
    phase: str  # Pending, Running, Succeeded, Failed, Unknown
    host_network: bool
    ips: tuple[str, ...]
    terminating: bool

    @property
    def ref(self) -> PodRef:
        return PodRef(self.namespace, self.name, self.uid)

    @property
    def ended(self) -> bool:
        """It does not run any more, and never will."""
        return self.phase in ("Succeeded", "Failed")


class PodList(NamedTuple):
    pods: tuple[Pod, ...]
    version: str  # where to continue the watch


class Change(NamedTuple):
    """An event of a watch. A bookmark has no pod."""

    type: str
    version: str
    pod: Optional[Pod] = None


def read_change(line: bytes) -> Change:
    kind, version, found = read_event(line)
    return Change(kind, version, None if kind == BOOKMARK else read_pod(found))


def read_event(line: bytes) -> tuple[str, str, Mapping[str, Any]]:
    """The kind, the version and the object."""
    event = read_object(line)
    kind, found = event.get("type"), event.get("object")
    if not isinstance(found, dict):
        raise not_understood("an event has no object")
    if kind == "ERROR":
        said = f"{quoted(str(found.get('message') or ''))} (code {found.get('code')})"
        if found.get("code") == 410:
            raise KubeError(GONE, "the watch is too old to go on from", said)
        raise KubeError(REFUSED, "the API server ended the watch", said)
    meta = found.get("metadata")
    version = meta.get("resourceVersion") if isinstance(meta, dict) else None
    if not isinstance(version, str) or not version:
        raise not_understood("an event has no resourceVersion")
    if kind in (ADDED, MODIFIED, DELETED, BOOKMARK):
        return str(kind), version, found
    raise not_understood(f"an event is of the type {kind!r}")


def read_pods(answer: Mapping[str, Any]) -> tuple[list[Pod], str, Mapping[str, Any]]:
    items, version, meta = read_items(answer, "PodList")
    return [read_pod(item) for item in items], version, meta


def read_items(answer: Mapping[str, Any], kind: str) -> tuple[list[Any], str, Mapping[str, Any]]:
    """The items of a list, its version and its metadata. Anything else is an error."""
    meta, items = answer.get("metadata"), answer.get("items")
    if answer.get("kind") != kind or not isinstance(meta, dict):
        raise not_understood(f"it is no {kind}")
    # A server in Go writes an empty list as [] or as null.
    if items is not None and not isinstance(items, list):
        raise not_understood("its items are no list")
    version = meta.get("resourceVersion")
    if not isinstance(version, str) or not version:
        raise not_understood("the list has no resourceVersion")
    return items or [], version, meta


def read_annotation(found: Any, annotation: str) -> tuple[str, Optional[str]]:
    """A namespace's name and its annotation, cut to a useful length."""
    try:
        meta = found["metadata"]
        text = (meta.get("annotations") or {}).get(annotation)
        return str(meta["name"]), None if text is None else str(text)[:LONGEST_ANNOTATION]
    except (KeyError, TypeError, AttributeError) as problem:
        raise not_understood(f"a namespace lacks {problem}") from None


def read_pod(found: Any) -> Pod:
    """The used part of a pod. Anything that is not shaped like a pod is an error: it would be
    taken for a pod without an address."""
    try:
        meta, spec, status = found["metadata"], found.get("spec") or {}, found.get("status") or {}
        uid, notes = meta["uid"], meta.get("annotations") or {}
        ips = status.get("podIPs") or ([{"ip": status["podIP"]}] if status.get("podIP") else [])
        return Pod(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=uid,
            runs_as=(uid, *(notes[key] for key in _STATIC if notes.get(key))),
            node=spec.get("nodeName") or "",
            phase=status.get("phase") or "",
            host_network=bool(spec.get("hostNetwork")),
            ips=tuple(str(ip["ip"]) for ip in ips if ip.get("ip")),
            terminating=bool(meta.get("deletionTimestamp")),
        )
    except (KeyError, TypeError, AttributeError) as problem:
        raise not_understood(f"a pod lacks {problem}") from None


def read_object(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise not_understood(quoted(content[:400].decode(errors="replace"))) from None
    if not isinstance(found, dict):
        raise not_understood("it is no JSON object")
    return found


def quoted(said: str) -> str:
    text = " ".join("".join(c if c.isprintable() else " " for c in said).split())
    return text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + "…"
