"""The rules by which a node's own networks come before what its tailscaled accepts (host mode).

Without them a peer that advertises the network that this node is in would take it over, and with it
the way to the node's administrator (docs/decisions/0014).
"""

from __future__ import annotations

import os
import socket

from ..datapath.rtnl import RT_TABLE_MAIN
from .kernel_routes import Rule, add_rule, delete_rule
from .prefix import Prefix
from .route_socket import RouteSocket

OWN_NETWORKS = 5205  # after the cluster's pods, before whatever tailscaled accepts
# A route as wide as a /7 is a default route in disguise: VPNs use 0.0.0.0/1, some sites 2000::/3.
WIDEST_NETWORK = 7


def own_network_rules() -> list[Rule]:
    """Look in the main table before Tailscale's, but ignore its default routes."""
    everything = [Prefix(socket.AF_INET, bytes(4), 0)]
    if os.path.exists("/proc/sys/net/ipv6"):
        everything.append(Prefix(socket.AF_INET6, bytes(16), 0))
    return [
        Rule(OWN_NETWORKS, anywhere, RT_TABLE_MAIN, suppress=WIDEST_NETWORK)
        for anywhere in everything
    ]


def put_own_networks_first(kernel: RouteSocket) -> list[Rule]:
    """Add those of these rules that are missing, and return them."""
    have = kernel.rules()
    missing = [rule for rule in own_network_rules() if rule not in have]
    failures = kernel.send([add_rule(rule) for rule in missing])
    if failures:
        raise failures[0]
    return missing


def forget_own_networks(kernel: RouteSocket) -> list[Rule]:
    """Delete these rules, once tailscaled has its former prefs back, and return them."""
    there = [rule for rule in kernel.rules() if rule.priority == OWN_NETWORKS]
    failures = kernel.send([delete_rule(rule) for rule in there])
    if failures:
        raise failures[0]
    return there
