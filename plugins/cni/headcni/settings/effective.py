"""The settings that a node uses: each key's value, its origin, and which values are valid."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, Dict, NamedTuple

from ..shared.podcidr import PodCidrError
from .keys import as_in_file, walk
from .node import node_name, pod_cidrs
from .sections import DaemonConfig

FILE, DEFAULT, DERIVED = "file", "default", "derived"


class Setting(NamedTuple):
    """A key of config.yaml. ``live``: a reload of the daemon applies a change."""

    key: str
    value: Any
    origin: str
    about: str
    default: Any
    expected: str
    live: bool


def effective(
    config: DaemonConfig, given: Collection[str], derived: Mapping[str, Any]
) -> Iterator[Setting]:
    """Every key, in the order of the file. ``given`` are the keys that the file sets; ``derived``
    are the values of keys that follow from others or from the node."""
    for (key, declared, value), (_key, _declared, default) in zip(
        walk(config, ""), walk(DaemonConfig(), "")
    ):
        follows = value == default and key not in given and key in derived
        yield Setting(
            key,
            derived[key] if follows else as_in_file(value),
            DERIVED if follows else FILE if key in given else DEFAULT,
            declared.metadata["about"],
            as_in_file(default),
            declared.metadata["kind"].expected,
            declared.metadata["live"],
        )


def derived(config: DaemonConfig) -> Dict[str, Any]:
    """What a node uses in place of an empty default. An unknown pod CIDR is left out."""
    found: Dict[str, Any] = {
        "daemon.nodeName": node_name(config),
        "tailscale.socket.path": config.tailscale.socket_path,
        "tailscale.interfaceName": config.tailscale.interface,
    }
    with suppress(PodCidrError):
        found["network.podCIDR.nodeLocal"] = [str(cidr) for cidr in pod_cidrs(config).cidrs]
    return found
