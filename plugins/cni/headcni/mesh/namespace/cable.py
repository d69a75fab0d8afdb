"""Choosing the link between the host and the namespace: addresses, MTU and nameservers."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Any

from ...datapath import netns
from ...datapath.rtnl import RT_TABLE_MAIN
from ...errors import INVALID_CONFIG, CniError
from ...model import Address, Network
from .comparison import addresses_of, link_named
from .plan import Cable
from .settings import MeshConfig

# Ordinary private networks: tailscaled takes link-local addresses to mean "no network".
_LINKS4 = ("192.168.255.252/30", "172.31.255.252/30", "10.255.255.252/30")
_LINK6 = "fd68:6561:6463:6e69::/126"
_TRIES = 64
_RESOLV_CONFS = (
    "/etc/resolv.conf",
    "/run/systemd/resolve/resolv.conf",
    "/etc/resolv.pre-tailscale-backup.conf",
)
_MAGIC_DNS = (ip_address("100.100.100.100"), ip_address("fd7a:115c:a1e0::53"))


def chosen_cable(config: MeshConfig, kernel: Any) -> Cable:
    ours = link_named(kernel, config.interface)
    index = ours["index"] if ours is not None else 0
    have = [ip_network(address, strict=False) for address in addresses_of(kernel, index)]
    versions = [4]
    if netns.read_sysctl("net/ipv6/conf/default/disable_ipv6") == "0":
        versions.append(6)
    links = []
    for version in versions:
        given = config.link4 if version == 4 else config.link6
        known = [link for link in have if link.version == version and link.num_addresses == 4]
        links.append(given or (known[0] if known else _free_link(config, kernel, version)))
    ways_out = _ways_out(kernel, index)
    mtus = [link.get("IFLA_MTU") for link in ways_out]
    underlay = config.underlay or tuple(_underlay_of(kernel, ways_out, versions))
    return Cable(tuple(links), config.mtu or min(mtus, default=1500), underlay)


def _free_link(config: MeshConfig, kernel: Any, version: int) -> Network:
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    taken = [destination for destination in _destinations(kernel, family) if destination.prefixlen]
    taken += [*config.tailnet, *config.pod_cidrs]
    taken = [route for route in taken if route.version == version]
    # If all private ranges are routed as a whole, only narrower routes count as clashes.
    narrow = [route for route in taken if route.prefixlen > (16 if version == 4 else 48)]
    for routes in (taken, narrow):
        for candidate in _candidates(version):
            if not any(candidate.overlaps(route) for route in routes):
                return candidate
    raise CniError(
        INVALID_CONFIG,
        f"no private IPv{version} network is free for {config.interface}",
        f"set link{version}",
    )


def _destinations(kernel: Any, family: int) -> Iterator[Network]:
    """The destinations of all routes in all tables, including the host's own addresses."""
    for route in kernel.get_routes(family=family):
        if route.get("RTA_DST"):
            yield ip_network(f"{route.get('RTA_DST')}/{route['dst_len']}")


def _candidates(version: int) -> Iterator[Network]:
    for step in range(_TRIES):
        for first in _LINKS4 if version == 4 else (_LINK6,):
            base = ip_network(first)
            offset = -4 * step if version == 4 else 4 * step
            yield ip_network((int(base.network_address) + offset, base.prefixlen))


def _ways_out(kernel: Any, but: int) -> list[Any]:
    """The links that the host's default routes use."""
    found = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for route in kernel.get_routes(family=family, table=RT_TABLE_MAIN):
            index = route.get("RTA_OIF")
            if route["dst_len"] == 0 and index and index != but and index not in found:
                found[index] = next(iter(kernel.get_links(index)), None)
    return [link for link in found.values() if link is not None]


def _underlay_of(kernel: Any, links: Sequence[Any], versions: Sequence[int]) -> Iterator[Address]:
    """An address of the host for each family. tailscaled itself sees only the veth's address and
    what STUN tells it, so nodes behind the same NAT would not find each other."""
    for version in versions:
        for link in links:
            addresses = sorted(addresses_of(kernel, link["index"]))
            mine = [ip_address(address.partition("/")[0]) for address in addresses]
            for address in (own for own in mine if own.version == version):
                yield address
                break
            else:
                continue
            break


def resolv_conf(config: MeshConfig) -> str:
    """The nameservers for tailscaled's own look-ups, above all the control server's name. A stub
    resolver of the host on a loopback address does not work in the namespace, and MagicDNS would be
    the namespace's own."""
    servers = list(config.nameservers)
    for path in () if servers else _RESOLV_CONFS:
        servers = [
            nameserver
            for nameserver in _nameservers(path)
            if not nameserver.is_loopback
            and not nameserver.is_link_local
            and nameserver not in _MAGIC_DNS
        ]
        if servers:
            break
    return "".join(
        [
            "# Written by headcni.mesh.namespace\n",
            *(f"nameserver {server}\n" for server in servers),
        ]
    )


def _nameservers(path: str) -> list[Address]:
    found = []
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if len(words) > 1 and words[0] == "nameserver":
                with suppress(ValueError):
                    found.append(ip_address(words[1].partition("%")[0]))
    return found
