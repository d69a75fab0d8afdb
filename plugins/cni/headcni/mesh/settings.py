"""The mesh as the node's configuration describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional, Tuple

from .. import settings as configuration
from ..log import Log
from ..model import Network
from ..settings import DaemonConfig
from ..shared import podcidr
from .mesh import Mesh
from .prefs import STATE_FILE

if TYPE_CHECKING:
    from .namespace.mesh_namespace import MeshNamespace

log = Log("daemon")


def own_cidrs(config: DaemonConfig) -> Tuple[Network, ...]:
    """This node's own pod CIDRs, logged with their source."""
    resolution = configuration.pod_cidrs(config)
    log.info("pod CIDR", cidrs=",".join(map(str, resolution.cidrs)), source=resolution.source)
    if resolution.guessed:
        log.warn("the pod CIDR is a guess: set network.podCIDR.nodeLocal")
    return tuple(resolution.cidrs)


def cluster_cidrs(config: DaemonConfig, own: Sequence[Network]) -> Tuple[Network, ...]:
    """network.podCIDR.base, or an assumption if it is not set."""
    if config.network.pod_cidr.base:
        return config.network.pod_cidr.base
    found = podcidr.cluster_around(own)
    log.info("no network.podCIDR.base, so it is taken to be", cidrs=",".join(map(str, found)))
    return found


def prefs_file(config: DaemonConfig) -> str:
    """The prefs that we changed, in one file for each tailscaled."""
    return STATE_FILE if config.tailscale.mode == "host" else f"{STATE_FILE}.daemon"


def mesh_of(
    config: DaemonConfig,
    own: Tuple[Network, ...],
    cluster: Tuple[Network, ...],
    namespace: Optional[MeshNamespace],
) -> Mesh:
    """Where the other nodes' pods are. In daemon mode the namespace must exist."""
    return Mesh(
        cluster_cidrs=cluster,
        own_cidrs=own,
        sources=tuple(cidr[1] for cidr in own),
        interface=config.tailscale.interface,
        gateways=tuple(namespace.gateways.values()) if namespace is not None else (),
        service_cidrs=config.network.service_cidr,
        node_sizes=configuration.node_sizes(config),
        peer_tags=config.tailscale.peer_tags,
        own_networks_first=own_networks_first(config),
    )


def own_networks_first(config: DaemonConfig) -> Optional[bool]:
    """Whether the node's own networks come before what its tailscaled accepts. None in daemon mode,
    where that tailscaled is the operator's alone."""
    return config.network.own_networks_first if config.tailscale.mode == "host" else None


def namespace_of(config: DaemonConfig, pod_cidrs: Tuple[Network, ...]) -> Optional[MeshNamespace]:
    """The namespace of our own tailscaled in daemon mode, else None."""
    if config.tailscale.mode != "daemon":
        return None
    from .namespace.mesh_namespace import (
        MeshNamespace,  # pyroute2 is large, and host mode needs none
    )
    from .namespace.settings import MeshConfig

    return MeshNamespace(MeshConfig.of_daemon(config, pod_cidrs))
