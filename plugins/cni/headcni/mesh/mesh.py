"""The mesh as this node sees it: the desired state that routes and rules follow from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from ..datapath.rtnl import RT_TABLE_MAIN
from ..model import Address, Network
from .claims import Rules, prefixes, rules_of
from .kernel_routes import Rule
from .own_networks import own_network_rules

TABLE = 5200
PRIORITY = 5200  # Tailscale's rules begin at 5210


@dataclass(frozen=True)
class Mesh:
    """Which pods are on other nodes, and the way there.

    In host mode the interface is tailscaled's. In daemon mode it is the veth `headcni01`, and
    `gateways` are the addresses of its far end, one for each family. `sources` are the node's own
    pod gateways, so what the node itself sends to pods comes from an address that pods can answer.
    `service_cidrs`, `node_sizes` (pairs of IP version and prefix length) and `peer_tags` decide
    which claims of peers are accepted; see `claims`.
    """

    cluster_cidrs: tuple[Network, ...]
    own_cidrs: tuple[Network, ...]
    sources: tuple[Address, ...] = ()
    interface: str = "tailscale0"
    gateways: tuple[Address, ...] = ()
    mtu: Optional[int] = None
    table: int = TABLE
    priority: int = PRIORITY
    service_cidrs: tuple[Network, ...] = ()
    node_sizes: tuple[tuple[int, int], ...] = ()
    peer_tags: tuple[str, ...] = ()
    # None leaves the rules for the node's own networks as they are. They belong to host mode, and
    # stay in daemon mode until the node's tailscaled has its former prefs back.
    own_networks_first: Optional[bool] = None

    def claim_rules(self) -> Rules:
        return rules_of(
            self.cluster_cidrs, self.own_cidrs, self.service_cidrs, self.node_sizes, self.peer_tags
        )

    def rules(self) -> list[Rule]:
        own = [
            Rule(self.priority - 1, prefix, RT_TABLE_MAIN) for prefix in prefixes(self.own_cidrs)
        ]
        pods = [Rule(self.priority, prefix, self.table) for prefix in prefixes(self.cluster_cidrs)]
        return [*own, *pods, *(own_network_rules() if self.own_networks_first else ())]
