"""runtimeConfig as the CNI conventions spell it.

containerd writes HostPort, IngressRate and Servers: its Go structs carry no JSON names, and Go
plugins read keys in any case. So must we.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def _respelt(value: Any, spellings: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping) and spellings:
        return {spellings.get(str(key).lower(), key): item for key, item in value.items()}
    if isinstance(value, list):
        return [_respelt(item, spellings) for item in value]
    return value
