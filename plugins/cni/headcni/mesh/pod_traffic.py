"""The traffic of pods on this node, for the firewalls that have to let it through."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_network
from typing import Tuple

from .. import settings as configuration
from ..datapath import seen
from ..datapath.host_firewall import PodTraffic
from ..datapath.netlink import Netlink
from ..errors import CniError
from ..model import Address, Network
from ..settings import DaemonConfig
from ..store import Attachment
from .localapi import LocalApi
from .mesh import TABLE
from .route_socket import RouteSocket
from .settings import cluster_cidrs

OWN_LINK = "headcni01"
PORT_SECONDS = 300.0  # between two questions for tailscaled's UDP port


def of(
    config: DaemonConfig,
    own: Tuple[Network, ...],
    cluster: Tuple[Network, ...],
    attachments: Sequence[Attachment],
    udp_port: int,
) -> PodTraffic:
    """`udp_port` is the port of a tailscaled in the node's own network namespace. The link to our
    own tailscaled is included in host mode too: while the mode is switched, both must work."""
    bridges, pods = {config.network.bridge}, dict.fromkeys(own)
    for attachment in attachments:
        if not attachment.host_ifname:
            continue
        if attachment.config.get("datapath") != "routed":
            bridges.add(str(attachment.config.get("bridge") or config.network.bridge))
        for text in attachment.state.get("ranges", {}).get(
            "pods", ()
        ):  # of a second network or another IPAM
            pods[ip_network(text)] = None
    mesh = config.tailscale.interface
    own_link = mesh if config.tailscale.mode == "daemon" else OWN_LINK
    node = _near_end(own_link)
    return PodTraffic(
        bridges=tuple(sorted(bridges)),
        pod_cidrs=tuple(pods),
        cluster_cidrs=cluster,
        trusted=config.network.pod_cidr.base or (*own, *_routed()),
        meshes=tuple(dict.fromkeys((mesh, own_link))),
        own_link=own_link,
        tailscaled=tuple(address + 1 for address in node),
        node=node,
        answers_for_node=config.tailscale.answer_for_node,
        udp_port=udp_port,
    )


def now(config: DaemonConfig, attachments: Sequence[Attachment]) -> PodTraffic:
    """The same for callers that only have the configuration."""
    own = tuple(configuration.pod_cidrs(config).cidrs)
    port = 0
    if config.tailscale.mode == "host":
        with suppress(CniError):
            port = tailscaled_port(LocalApi(config.tailscale.socket_path))
    return of(config, own, cluster_cidrs(config, own), attachments, port)


class TailscaledPort:
    """The UDP port of the node's own tailscaled, asked for now and then, as it may change."""

    def __init__(self, api: LocalApi) -> None:
        self._api = api
        self._port, self._ask_at = 0, 0.0

    def current(self) -> int:
        if not self._port or time.monotonic() > self._ask_at:
            with suppress(CniError):
                self._port = tailscaled_port(self._api) or self._port
            self._ask_at = time.monotonic() + PORT_SECONDS
        return self._port


def tailscaled_port(api: LocalApi) -> int:
    """The UDP port of the node's own tailscaled; 0 while it is unknown. Behind a NAT some of its
    endpoints have other ports, so only those with an address of the node count."""
    local = {str(address) for listed in seen.addresses().values() for address, _unused in listed}
    ports = []
    for endpoint in api.endpoints():
        address, _unused, port = endpoint.rpartition(":")
        if address.strip("[]") in local and port.isdigit():
            ports.append(int(port))
    return max(ports, key=ports.count) if ports else 0


def _routed() -> Tuple[Network, ...]:
    """The ranges of other nodes' pods, taken from our routes to them."""
    kernel = RouteSocket()
    try:
        found = [ip_network(str(route.dst)) for route in kernel.routes(TABLE)]
    finally:
        kernel.close()
    return tuple(sorted(found, key=lambda cidr: (cidr.version, cidr.network_address)))


def _near_end(link: str) -> Tuple[Address, ...]:
    """The node's own addresses on the link to our tailscaled, which has the next address of each
    network. Empty if there is no such link."""
    with Netlink() as kernel:
        index = kernel.index(link)
    listed = seen.addresses().get(index, ()) if index else ()
    found = sorted((address for address, _unused in listed), key=lambda found: found.version)
    return tuple(address for address in found if not address.is_link_local)
