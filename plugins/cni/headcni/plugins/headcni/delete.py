"""DEL: removes the network of a pod. Every step is tried, even if another one fails."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import suppress

from ... import config, deferred, unrecorded
from ... import light_json as json
from ...address_sources import Source, source_of
from ...datapath import firewall, host_ports, link, nft
from ...datapath.netlink import Netlink
from ...errors import CniError
from ...model import Address, NetworkConfig, Owner
from ...record import TYPE_CHECKING
from ...result import addresses_of
from ...skel import Call
from ...store import Attachment, last_known

if TYPE_CHECKING:
    from typing import Callable, Optional

    from ...chain import States
    from .node import Node


def delete(node: Node, network: NetworkConfig, call: Call) -> None:
    owner = call.owner(network.name)
    node.attachment = node.store.attachment(owner)
    undo(node, network, owner, call, node.attachment, node.links_wait)
    if node.links_wait is None:  # a daemon that was killed may have left links
        deferred.try_to_finish(node.store, node.kernel)


def undo(
    node: Node,
    network: NetworkConfig,
    owner: Owner,
    call: Call,
    known: Optional[Attachment],
    links_wait: Optional[Callable[[], None]] = None,
) -> None:
    """Remove everything that the owner has; it may have nothing. The address is released last, when
    nothing uses it. With `links_wait` the link is only taken down: deleting it and releasing the
    address are deferred."""
    failures: list[CniError] = []
    name, source = link.host_name(owner), source_of(_as_added(network, known, call))
    _try_each(
        failures,
        lambda: _undo_chain(network, owner, call, node.store),
        lambda: _withdraw(node, owner, known),
    )
    withdrawn = not failures
    if links_wait is not None and withdrawn and not source.runs_plugin:
        index = link.cut(node.kernel, name)
        if index:
            _forget_limits(node, owner, known)
            deferred.defer(node.store, owner, index)
            links_wait()
            return
    _try_each(
        failures,
        lambda: link.cut(node.kernel, name),
        lambda: _forget_limits(node, owner, known),
        lambda: link.disconnect(node.kernel, name),
    )
    if withdrawn:  # otherwise a host port would lead to the next pod with the address
        _try_each(failures, lambda: _release(node, owner, source, call))
    _raise_first(failures)
    node.store.forget(owner)


def delete_unrecorded(
    network: NetworkConfig, call: Call, problem: CniError
) -> Optional[Attachment]:
    """DEL while the store cannot be used: everything but its record. What the pod had is known from
    the readable part of the store, from the runtime's prevResult and from the kernel."""
    owner, failures = call.owner(network.name), list[CniError]()
    known = last_known(network.data_dir, owner)
    source = source_of(_as_added(network, known.attachment, call))
    addresses = {*known.addresses, *addresses_of(network.prev_result or {})}
    name = link.host_name(owner)
    with Netlink() as kernel:
        with suppress(CniError):
            addresses.update(_addresses_behind(kernel, name))
        _try_each(
            failures,
            lambda: _undo_chain(network, owner, call, known),
            lambda: _withdraw_from_kernel(addresses),
            lambda: link.disconnect(kernel, name),
        )
    _try_each(failures, lambda: source.release(call.env))
    _raise_first(failures)
    unrecorded.note(network.data_dir, owner, problem)
    return known.attachment


def _undo_chain(network: NetworkConfig, owner: Owner, call: Call, store: States) -> None:
    """The configuration may have changed, so the store may have steps of a chain that it lacks."""
    if network.delegates or store.plugin_states(owner):
        from ... import chain  # few networks have delegates

        chain.delete(network, call.env, owner, store)


def _withdraw(node: Node, owner: Owner, known: Optional[Attachment]) -> None:
    """Remove the host ports. An ADD that was interrupted may have left ports that only the kernel
    has."""
    host_ports.withdraw(node.store, owner)
    lease = node.ipam.lease(owner) if known is None else None
    if lease is not None:
        host_ports.withdraw_leftovers(node.store, {leased.address for leased in lease.addresses})


def _withdraw_from_kernel(addresses: Container[Address]) -> None:
    with suppress(CniError):  # the address stays allocated, so a remaining port leads nowhere
        host_ports.withdraw_from_kernel(addresses)


def _addresses_behind(kernel: Netlink, name: str) -> Iterator[Address]:
    """The pod's addresses according to the kernel. What the pod itself shows does not count: it
    could show its neighbour's address, which would then lose its host ports."""
    from ...datapath import seen  # only if the store cannot be used

    links = [one for one in seen.pod_links(kernel) if one.name == name]
    yield from seen.given(links, kernel).get(name, ())


def _forget_limits(node: Node, owner: Owner, known: Optional[Attachment]) -> None:
    """After the link is down, because the pod must stay limited as long as it can send."""
    addresses = addresses_of(known.result) if known is not None else []
    if addresses:
        firewall.forget_limits(node.store, addresses)
    if nft.table_comment(nft.POLICIES) is not None:
        from ...policy import admission  # most nodes have no policies

        admission.dismiss(owner, addresses)


def _release(node: Node, owner: Owner, source: Source, call: Call) -> None:
    lease = node.ipam.lease(owner)
    if lease is not None:
        deferred.forget_connections([lease])
        node.ipam.release(owner)
    source.release(call.env)


def _as_added(network: NetworkConfig, known: Optional[Attachment], call: Call) -> NetworkConfig:
    """The configuration with the IPAM that gave the pod its address, if it has changed since."""
    then = known.config.get("ipam") if known is not None else None
    if known is None or not isinstance(then, dict) or "type" not in then:
        return network
    if then["type"] == network.ipam.type:
        return network
    try:
        return config.parse(json.dumps(known.config).encode(), call.env, forgiving=True)
    except CniError:
        return network


def _try_each(failures: list[CniError], *steps: Callable[[], object]) -> None:
    for step in steps:
        try:
            step()
        except CniError as problem:
            failures.append(problem)


def _raise_first(failures: Sequence[CniError]) -> None:
    if failures:
        first = failures[0]
        raise CniError(first.code, first.msg, "; ".join([first.details, *map(str, failures[1:])]))
