"""``headcnictl own-networks``: reach the node's own networks directly, whatever peers advertise.

In host mode tailscaled accepts the routes of all peers, and Tailscale's table comes before the main
table. If a peer advertised the network that this node is in, the node would lose it, and with it
the way to its administrator. headcni-own-networks.service runs this at boot, before tailscaled
starts. From then on the daemon keeps the rules in place.
"""

from __future__ import annotations

import argparse
from contextlib import closing

from ..mesh.own_networks import put_own_networks_first
from ..mesh.route_socket import RouteSocket
from ..mesh.settings import own_networks_first
from . import node
from .main import OK, show


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)


def run(args: argparse.Namespace) -> int:
    config = node.load(args)
    if not own_networks_first(config):
        said = "daemon mode leaves the node's tailscaled alone"
        if config.tailscale.mode == "host":
            said = "network.ownNetworksFirst is false: routes from the tailnet come first"
        show({"added": [], "note": said} if args.json else said, args.json)
        return OK
    with closing(RouteSocket()) as kernel:
        added = [str(rule) for rule in put_own_networks_first(kernel)]
    said = ", ".join(f"added {rule}" for rule in added) or "the rules are in place"
    show({"added": added, "note": said} if args.json else said, args.json)
    return OK
