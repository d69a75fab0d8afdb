"""What follows from the configuration for this node."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Dict, List, Tuple

from ..shared.podcidr import Resolution, parse_sizes, resolve
from .keys import as_dict
from .sections import DaemonConfig, TailscaleSocket

CONTROL_SOCKET = "daemon.sock"


def pod_cidrs(config: DaemonConfig) -> Resolution:
    """This node's own pod CIDRs, as the file gives them or as they are found."""
    return resolve(for_resolver(config), os.environ, node_name=config.daemon.node_name)


def node_sizes(config: DaemonConfig) -> Tuple[Tuple[int, int], ...]:
    """The allowed sizes of nodes' ranges: IP version and prefix length."""
    pod = config.network.pod_cidr
    allowed = {(4 if size <= 32 else 6, size) for size in pod.peer_sizes}
    return tuple(sorted({*parse_sizes(pod.per_node).items(), *allowed}))


def in_mode(config: DaemonConfig, mode: str, socket: str = "") -> DaemonConfig:
    """The same configuration in another mode, with the socket and interface of that mode."""
    own = TailscaleSocket(socket)
    tailscale = replace(config.tailscale, mode=mode, socket=own, interface_name="")
    return replace(config, tailscale=tailscale)


def answered(config: DaemonConfig) -> List[str]:
    """The node's ports that tailnet peers reach in daemon mode, in words. Empty in host mode, where
    the node's own tailscaled answers."""
    chosen = config.tailscale
    if chosen.mode != "daemon":
        return []
    if isinstance(chosen.answer_for_node, bool):
        return ["all"] if chosen.answer_for_node else ["none"]
    return [str(port) for port in chosen.answer_for_node]


def control_path(config: DaemonConfig) -> str:
    """The socket on which the daemon answers headcnictl, next to the one for CNI calls."""
    return os.path.join(os.path.dirname(config.daemon.socket), CONTROL_SOCKET)


def node_name(config: DaemonConfig) -> str:
    """The name of this node in Kubernetes."""
    given = config.daemon.node_name or os.environ.get("NODE_NAME", "")
    return given or os.uname().nodename.lower()


def for_resolver(config: DaemonConfig) -> Dict[str, Any]:
    """The part of the configuration that ``podcidr.resolve`` uses."""
    return {"network": {"podCIDR": as_dict(config.network.pod_cidr)}}
