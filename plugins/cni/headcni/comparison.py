"""Compares the network of a pod with what ADD made: the part that CHECK and repair share.

Each has a reader of its own for the kernel: CHECK uses pyroute2, which shares no code with what
made the network. Repair reads all pods of the node every minute, so its reader must be cheap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Optional, Protocol

from .address_sources import source_of
from .datapath import link
from .datapath.interfaces import Link
from .ipam.allocate import Ipam
from .model import Address, LeasedAddress, NetworkConfig
from .store import Attachment


class Reader(Protocol):
    """What one network namespace has."""

    def link(self, name: str, /) -> Optional[Link]: ...

    def addresses(self, index: int, /) -> Collection[str]:
        """The addresses of a link, with their prefix lengths."""

    def has_route(self, address: Address, index: int, /) -> bool:
        """Whether there is a route to just this address through the link."""


def lease(ipam: Ipam, network: NetworkConfig, attachment: Attachment) -> Iterator[str]:
    addresses = [leased.address for leased in attachment.leased]
    for address in source_of(network).not_recorded(ipam, attachment.owner, addresses):
        yield f"allocation: {address} is not recorded as this pod's"


def host(reader: Reader, network: NetworkConfig, attachment: Attachment) -> Iterator[str]:
    """The differences on the node's side."""
    name, leased = attachment.host_ifname, attachment.leased
    end = reader.link(name)
    if end is None:
        yield f"host side: {name} is missing"
        return
    if not end.up:
        yield f"host side: {name} is down"
    if has_limiter(attachment):
        limiter = link.limiter_of(name)
        if reader.link(limiter) is None:
            yield f"egress: {limiter} is missing"
    if network.datapath == "routed":
        for one in leased:
            if not reader.has_route(one.address, end.number):
                yield f"host side: no route {one.address}/{one.address.max_prefixlen} to {name}"
        return
    yield from _bridge(reader, network, name, end, leased)


def _bridge(
    reader: Reader,
    network: NetworkConfig,
    name: str,
    end: Link,
    leased: Sequence[LeasedAddress],
) -> Iterator[str]:
    bridge = reader.link(network.bridge)
    if bridge is None:
        yield f"host side: bridge {network.bridge} is missing"
        return
    if not bridge.up:
        yield f"host side: bridge {network.bridge} is down"
    if end.master != bridge.number:
        yield f"host side: {name} is not a port of {network.bridge}"
    have = reader.addresses(bridge.number)
    for one in leased:
        expected = network.is_gateway and one.gateway is not None
        if expected and f"{one.gateway}/{one.prefixlen}" not in have:
            yield f"host side: {network.bridge} has no address {one.gateway}/{one.prefixlen}"


def pod(reader: Reader, attachment: Attachment) -> Iterator[str]:
    """The differences in the pod."""
    name = attachment.owner.ifname
    end = reader.link(name)
    if end is None:
        yield f"pod: interface {name} is missing"
        return
    have = reader.addresses(end.number)
    for one in attachment.leased:
        if one.interface not in have:
            yield f"pod: {name} has no address {one.interface}"


def has_limiter(attachment: Attachment) -> bool:
    """Whether a link of its own limits what the pod sends. Older releases limited it in the pod."""
    limiter = link.limiter_of(attachment.host_ifname)
    return any(one.get("name") == limiter for one in attachment.result.get("interfaces", ()))
