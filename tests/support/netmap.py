"""What a tailscaled has been told by Headscale, and what follows from it for pods."""

from __future__ import annotations

import json
from ipaddress import ip_address, ip_network
from typing import Any

from headscale_server import Tailscaled

PORTS = (1, 79, 80, 81, 443, 1000, 30000, 65535)
TCP, UDP = 6, 17


def netmap(node: Tailscaled) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node.tailscale("debug", "netmap"))
    return found


def reaches(told: dict[str, Any], sender: str, receiver: str) -> bool:
    """Whether the node that was told this takes what pods of `sender`, a peer, send to its own."""
    if not any(sender in peer["AllowedIPs"] for peer in told["Peers"] or ()):
        return False
    return all(
        any(_passes(match, source, target, protocol, port) for match in told["PacketFilter"] or ())
        for source in _some_of(sender)
        for target in _some_of(receiver)
        for protocol in (TCP, UDP)
        for port in PORTS
    )


def _passes(match: dict[str, Any], source: Any, target: Any, protocol: int, port: int) -> bool:
    return (
        protocol in match["IPProto"]
        and any(_within(source, network) for network in match["Srcs"])
        and any(
            _within(target, dst["Net"]) and dst["Ports"]["First"] <= port <= dst["Ports"]["Last"]
            for dst in match["Dsts"]
        )
    )


def _within(address: Any, network: str) -> bool:
    return address in ip_network(network)


def _some_of(cidr: str) -> list[Any]:
    network = ip_network(cidr)
    first, last = int(network.network_address), int(network.broadcast_address)
    kind = type(ip_address(str(network.network_address)))
    return [kind(first), kind((first + last) // 2), kind(last)]
