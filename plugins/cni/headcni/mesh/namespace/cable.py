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

# tailscaled takes link-local addresses for "no network"; these are ordinary private ones.
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
    have = [ip_network(one, strict=False) for one in addresses_of(kernel, index)]
    versions = [4]
    if netns.read_sysctl("net/ipv6/conf/default/disable_ipv6") == "0":
        versions.append(6)
    links = []
    for version in versions:
        given = config.link4 if version == 4 else config.link6
        known = [one for one in have if one.version == version and one.num_addresses == 4]
        links.append(given or (known[0] if known else _free_link(config, kernel, version)))
    ways_out = _ways_out(kernel, index)
    mtus = [link.get("IFLA_MTU") for link in ways_out]
    underlay = config.underlay or tuple(_underlay_of(kernel, ways_out, versions))
    return Cable(tuple(links), config.mtu or min(mtus, default=1500), underlay)


def _free_link(config: MeshConfig, kernel: Any, version: int) -> Network:
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    taken = [one for one in _destinations(kernel, family) if one.prefixlen]
    taken += [*config.tailnet, *config.pod_cidrs]
    taken = [one for one in taken if one.version == version]
    # Where somebody routes all private ranges as a whole, only a narrower route is a clash.
    narrow = [one for one in taken if one.prefixlen > (16 if version == 4 else 48)]
    for routes in (taken, narrow):
        for candidate in _candidates(version):
            if not any(candidate.overlaps(one) for one in routes):
                return candidate
    raise CniError(
        INVALID_CONFIG,
        f"no private IPv{version} network is free for {config.interface}",
        f"set link{version}",
    )


def _destinations(kernel: Any, family: int) -> Iterator[Network]:
    """Of every route of every table, the local one's addresses among them."""
    for one in kernel.get_routes(family=family):
        if one.get("RTA_DST"):
            yield ip_network(f"{one.get('RTA_DST')}/{one['dst_len']}")


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
        for one in kernel.get_routes(family=family, table=RT_TABLE_MAIN):
            index = one.get("RTA_OIF")
            if one["dst_len"] == 0 and index and index != but and index not in found:
                found[index] = next(iter(kernel.get_links(index)), None)
    return [link for link in found.values() if link is not None]


def _underlay_of(kernel: Any, links: Sequence[Any], versions: Sequence[int]) -> Iterator[Address]:
    """One address of each family: tailscaled sees only the veth's, and what STUN tells it; nodes
    behind one NAT would not find each other."""
    for version in versions:
        for link in links:
            addresses = sorted(addresses_of(kernel, link["index"]))
            mine = [ip_address(one.partition("/")[0]) for one in addresses]
            for address in (one for one in mine if one.version == version):
                yield address
                break
            else:
                continue
            break


def resolv_conf(config: MeshConfig) -> str:
    """tailscaled's own look-ups, the control server's name above all. The host's stub
    resolver is on a loopback address, and its MagicDNS would be the namespace's own."""
    servers = list(config.nameservers)
    for path in () if servers else _RESOLV_CONFS:
        servers = [
            one
            for one in _nameservers(path)
            if not one.is_loopback and not one.is_link_local and one not in _MAGIC_DNS
        ]
        if servers:
            break
    return "".join(
        [
            "# Written by headcni.mesh.namespace\n",
            *(f"nameserver {one}\n" for one in servers),
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
