"""STATUS: no error means that the node can serve ADD."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...address_sources import source_of
from ...datapath import blocked, firewall, guard
from ...errors import LIMITED, CniError
from ...model import NetworkConfig
from ...shared.modes import LINKS
from ...skel import Call
from ...store import PRESENT
from .add import refuse_unsupported

if TYPE_CHECKING:
    from .node import Node


def status(node: Node, network: NetworkConfig, call: Call) -> None:
    """A full pool is no error: kubelet would report the node as not ready and evict its pods."""
    node.store.prove_writable()
    refuse_unsupported(network)
    if network.delegates:
        from ... import chain  # few networks have delegates

        chain.status(network, call.env)
        return
    source_of(network).status(call.env)
    if network.enable_network_policy and network.datapath != "routed":
        from ...policy import admission

        admission.ensure_bridge_filter()
    if network.ip_masq and not firewall.is_current(node.store):
        firewall.try_out()  # no pod has used the rules yet
    if network.anti_spoofing:
        guard.try_out()  # a node that has another kernel since its last start may lack a module
    if {"headscale_url", "tailscale_socket"} & set(network.raw):
        _require_mesh(node, network)
    problem = blocked.read()
    if problem:
        raise CniError(LIMITED, "another firewall on this node blocks pods", problem)


def _require_mesh(node: Node, network: NetworkConfig) -> None:
    """CniError if the mesh interface has been missing for longer than `mesh_grace`.

    A runtime that hears of a missing interface reports the node as not ready, and its pods are
    evicted. A tailscaled that restarts removes its interface for moments, which must not do that.
    The store keeps when it disappeared, because most calls of STATUS are processes of their own.
    """
    mesh, now = LINKS[network.mode], time.clock_gettime(time.CLOCK_BOOTTIME)
    seen = node.store.mesh_seen(mesh)
    if node.kernel.index(mesh):
        if seen != PRESENT:
            node.store.note_mesh(mesh, PRESENT)
        return
    if seen == PRESENT:
        node.store.note_mesh(mesh, now)
        seen = now
    if seen is None or now - seen >= network.mesh_grace:
        since = f"for {now - seen:.0f} s" if seen is not None else "since the node started"
        raise CniError(
            LIMITED,
            f"{mesh} is not there, so pods cannot reach other nodes",
            f"it is missing {since} (mesh_grace is {network.mesh_grace:g} s), mode is "
            f"{network.mode}; see: systemctl status "
            + ("tailscaled" if network.mode == "host" else "headcni-tailscaled"),
        )
