# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""A CIDR as people write it, and whether pods can use it.

A process without the daemon imports this for each pod, so it imports no `typing`.
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

TYPE_CHECKING = False  # mypy takes it for true

if TYPE_CHECKING:
    from typing import TypeAlias

Network: TypeAlias = "IPv4Network | IPv6Network"

# Addresses of tailnet devices: a pod with such an address would look like a device.
TAILNET: tuple[Network, ...] = (
    IPv4Network("100.64.0.0/10"),
    IPv6Network("fd7a:115c:a1e0::/48"),
)


class PodCidrError(ValueError):
    """A requested pod CIDR cannot be used. The message says which and why."""


def parse_cidr(text: str) -> Network:
    """A CIDR as written by hand: no host bits, no netmask in place of the length."""
    length = text.rpartition("/")[2]
    if "/" not in text or "%" in text or not (length.isascii() and length.isdigit()):
        raise PodCidrError(f"{text!r} is not a CIDR such as 10.244.1.0/24")
    try:
        network = ip_network(text, strict=False)
    except ValueError as wrong:
        raise PodCidrError(f"{text!r} is not a CIDR: {wrong}") from None
    if network.network_address != ip_address(text.partition("/")[0]):
        raise PodCidrError(f"{text!r} has host bits set; the network is {network}")
    return network


def unfit_for_pods(network: Network) -> str:
    """Why pods cannot use this network, as the end of a sentence; empty if they can."""
    if network.prefixlen > network.max_prefixlen - 2:
        return f"is too small: a gateway and a pod need at least /{network.max_prefixlen - 2}"
    special = network.is_multicast or network.is_loopback or network.is_link_local
    if special or not network.prefixlen:
        return "is not a range of ordinary unicast addresses"
    for taken in TAILNET:
        if taken.version == network.version and taken.overlaps(network):
            return f"overlaps {taken}, which Tailscale gives to its own devices"
    return ""
