"""GC: frees what no valid attachment uses, in the store, in the kernel and by the delegates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ... import deferred
from ...address_sources import source_of
from ...datapath import firewall, host_ports, link
from ...errors import INTERNAL, INVALID_CONFIG, CniError
from ...model import Lease, NetworkConfig, Owner
from ...recover import release_unused
from ...skel import Call, nested_name, valid_attachments
from .delete import undo

if TYPE_CHECKING:
    from .node import Node


def gc(node: Node, network: NetworkConfig, call: Call) -> None:
    if network.raw.get("disableGC") is True:
        return
    valid = valid_attachments(network.raw)
    if valid is None:
        raise CniError(
            INVALID_CONFIG,
            "GC needs the list of valid attachments",
            "cni.dev/valid-attachments is missing: expected a list, possibly empty",
        )
    deferred.try_to_finish(node.store, node.kernel)
    release_unused(node.store)
    name = nested_name(network.name, call.env)
    known = {attachment.owner for attachment in node.store.attachments(name)}
    known.update(node.store.owners_with_plugin_states(name))
    known.update(link.links_of(name).values())
    known.update(host_ports.owners(node.store, name))
    # An ADD that was killed may have an address, and a link that has no alias yet.
    awaited = {tombstone.owner for tombstone in node.store.tombstones()}
    known.update({lease.owner for lease in node.ipam.leases(name)} - awaited)
    failures = []
    for owner in sorted(known):
        if (owner.container_id, owner.ifname) in valid:
            continue
        try:
            attachment = node.store.attachment(owner)
            netns_path = attachment.netns if attachment else ""
            undo(node, network, owner, call.for_owner(owner, netns_path), attachment)
        except CniError as problem:
            failures.append(f"{owner.container_id} {owner.ifname}: {problem}")
    leases = node.store.atomically(lambda _unused: _collect(node, name, valid))
    deferred.forget_connections(leases)
    firewall.forget_unused(node.store)
    in_use = {link.host_name(Owner(name, *pair)) for pair in valid}
    for host in link.links_without_owner(name):
        if host not in in_use:
            link.disconnect(node.kernel, host)
    if network.delegates:
        from ... import chain  # few networks have delegates

        chain.gc(network, call.env, node.store)
    source_of(network).gc(call.env)
    if failures:
        raise CniError(
            INTERNAL, f"{len(failures)} attachments could not be freed", "; ".join(failures)
        )


def _collect(node: Node, network: str, valid: Iterable[tuple[str, str]]) -> list[Lease]:
    """Free the addresses of ADDs that were interrupted, and their host ports. In one transaction,
    so that no pod gets an address that a host port still leads to."""
    dead = node.ipam.collect(network, valid)
    if dead:
        host_ports.withdraw_from_kernel({one.address for lease in dead for one in lease.addresses})
    return dead
