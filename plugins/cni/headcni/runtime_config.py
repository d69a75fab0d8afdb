"""runtimeConfig as the CNI conventions spell it.

containerd writes HostPort, IngressRate and Servers: its Go structs carry no JSON names, and Go
plugins read keys in any case. So must we.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .ipam.config import ANNOTATIONS, IP_ANNOTATION

# Of what a pod's author says, so much is stored, and read again by every pass of the daemon.
MOST_ANNOTATIONS = 8 << 10  # characters, of all together
LARGEST_VALUE = 8 << 10  # of one value that we do not read

_SPELLINGS = {
    "portMappings": ("hostPort", "containerPort", "protocol", "hostIP"),
    "bandwidth": ("ingressRate", "ingressBurst", "egressRate", "egressBurst"),
    "dns": ("servers", "searches", "options"),
    "ipRanges": ("subnet", "rangeStart", "rangeEnd", "gateway"),
}


def as_specified(runtime_config: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with the keys of what we know in the conventions' case."""
    return {
        name: _respelt(value, {key.lower(): key for key in _SPELLINGS.get(name, ())})
        for name, value in runtime_config.items()
    }


def storable(conf: Mapping[str, Any]) -> dict[str, Any]:
    """A netconf as it is kept for the pod's life: whole, but for large data of the pod that only
    other plugins could read. Their DEL gets it from the runtime, which has kept it as well."""
    kept = dict(conf)
    if "args" in conf and _size(conf["args"]) > LARGEST_VALUE:
        del kept["args"]
    given = conf.get("runtimeConfig")
    if isinstance(given, Mapping):
        kept["runtimeConfig"] = {
            name: _few(value) if name == ANNOTATIONS else value
            for name, value in given.items()
            if name in _SPELLINGS or name == ANNOTATIONS or _size(value) <= LARGEST_VALUE
        }
    return kept


def _few(annotations: Any) -> dict[str, Any]:
    """The one that we read, and of the others the small ones."""
    if not isinstance(annotations, Mapping):
        return {}
    sizes = {name: len(name) + _size(value) for name, value in annotations.items()}
    kept, room = set[str](), MOST_ANNOTATIONS
    for name in sorted(sizes, key=lambda name: (name != IP_ANNOTATION, sizes[name])):
        room -= sizes[name]
        if room < 0:
            break
        kept.add(name)
    return {name: value for name, value in annotations.items() if name in kept}


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else len(json.dumps(value))


def _respelt(value: Any, spellings: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping) and spellings:
        return {spellings.get(str(key).lower(), key): item for key, item in value.items()}
    if isinstance(value, list):
        return [_respelt(item, spellings) for item in value]
    return value
