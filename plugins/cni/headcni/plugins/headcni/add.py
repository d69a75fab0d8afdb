"""ADD: sets up the network of a pod. If a step fails, the steps before it are undone."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from ... import deferred, result, unrecorded
from ...address_sources import ROUTE_NUMBERS, source_of
from ...datapath import firewall, guard, link, netns, nft, pod_ranges
from ...datapath.netlink import Netlink
from ...errors import (
    INVALID_CONFIG,
    STORE,
    TRY_AGAIN,
    UNSUPPORTED_FIELD,
    CniError,
)
from ...model import Dns, LeasedAddress, NetworkConfig, Owner, Route
from ...record import TYPE_CHECKING
from ...skel import Call, split_cni_args
from ...store import Attachment, holder_of

if TYPE_CHECKING:
    import sqlite3
    from typing import Any, Optional

    from .node import Node


def add(node: Node, network: NetworkConfig, call: Call) -> Mapping[str, Any]:
    refuse_unsupported(network)
    owner, pod, labels = call.owner(network.name), call.pod, _labels(network, call)
    store, kernel, opens = node.store, node.kernel, node.store.opens
    unrecorded.settle(store, owner)
    pending, known = store.read(lambda _unused: (store.tombstones(), store.attachment(owner)))
    deferred.prepare(store, kernel, owner, pending, node.links_wait is not None)
    sandbox, ranges = _sandbox(call), dict[str, list[str]]()
    addresses: Sequence[LeasedAddress] = ()
    if known is not None:
        if _is_set_up(node, known, call, sandbox):
            node.attachment = known
            return result.shape(known.result, network.cni_version)
        from .delete import undo as remove  # rarely needed

        remove(node, network, owner, call, known)  # it has another sandbox, or is incomplete

    with ExitStack() as undo:
        if network.delegates:
            from ... import chain

            with node.phase("delegates"):
                made = chain.add(network, call.env, owner, store)
            undo.callback(chain.delete, network, call.env, owner, store)
            firewall.ensure(store, owner.network, {}, pod, result.addresses_of(made))
            host = ""
        else:
            fd = undo.enter_context(netns.of_pod(call.netns, call.netns_fd))
            undo.callback(_release, node, network, owner)
            with node.phase("ipam"):
                source = source_of(network)
                given = deferred.retried(
                    store, kernel, pending, lambda: source.lease(node, owner, call, undo)
                )
            addresses = given.addresses
            with node.phase("link"):
                planned = link.plan(network, owner, addresses, given.routes)
            if _has_policies(network):
                with node.phase("policy"):
                    _protect(node, network, owner, call, planned, undo)
            with node.phase("link"):
                station = guard.station_of(network, planned, pod)
                cable = deferred.retried(
                    store, kernel, pending, lambda: _connect(kernel, network, planned, fd, station)
                )
            undo.callback(link.disconnect, kernel, cable.host)
            with node.phase("firewall"):
                if network.datapath == "bridge" and _leads_from_loopback(network.bridge):
                    _open_loopback(kernel, network, cable)  # other pods of the bridge have ports
                ranges = pod_ranges.ranges_of(network, addresses)
                pod_ips = [leased.address for leased in addresses]
                firewall.ensure(store, owner.network, ranges, pod, pod_ips)
                if network.port_mappings:
                    _publish(node, network, owner, call, cable, addresses, undo)
            with node.phase("dns"):
                dns = result.dns_of(_dns(network.dns, given.dns))
            made, host = _result(network, cable, call.netns, dns), cable.host
        state = {"netns": sandbox, "ranges": ranges, **labels}
        node.attachment = Attachment(
            owner, pod, call.netns, host, dict(network.raw), made, state, time.time()
        )
        with node.phase("store"):
            _remember(node, node.attachment, addresses, opens)
        undo.pop_all()  # from here on, everything belongs to the pod
    return result.shape(made, network.cni_version)


def refuse_unsupported(network: NetworkConfig) -> None:
    """To ignore a setting that should protect pods would be worse than an error."""
    if network.enable_network_policy and network.delegates:
        raise CniError(
            UNSUPPORTED_FIELD,
            "enable_network_policy is true, but delegates make the pods' links, and HeadCNI "
            "enforces network policies only on links of its own",
            "set it to false, or take delegate and plugins out of the configuration",
        )
    if network.prev_result is not None and not network.delegates:
        raise CniError(
            INVALID_CONFIG,
            "headcni makes the pod's interface, so it must be the first plugin of the list",
            "a prevResult was given",
        )


def _labels(network: NetworkConfig, call: Call) -> dict[str, Any]:
    """For the daemon, if the pod's policies and labels do not come from Kubernetes."""
    if not network.enable_network_policy:
        return {}
    from ... import pod_labels

    found = pod_labels.of_call(split_cni_args(call.env.get("CNI_ARGS", "")), network.runtime_config)
    return {"labels": found} if found else {}


def _has_policies(network: NetworkConfig) -> bool:
    """Whether network policies concern a pod: those of its network, or of another one, which may
    have the same bridge."""
    return network.enable_network_policy or nft.table_comment(nft.POLICIES) is not None


def _protect(
    node: Node,
    network: NetworkConfig,
    owner: Owner,
    call: Call,
    planned: link.Cable,
    undo: ExitStack,
) -> None:
    from ...policy import admission  # most nodes have no policies

    undo.callback(admission.dismiss, owner, [leased.address for leased in planned.addresses])
    admission.admit(node.store, node.kernel, network, owner, call.pod, planned)


def _sandbox(call: Call) -> list[int]:
    """The device and inode of the pod's network namespace, because its path may name another one
    later. Empty if it cannot be read: only some steps need it, and they report that."""
    try:
        seen = os.stat(call.netns if call.netns_fd is None else call.netns_fd)
    except OSError:
        return []
    return [seen.st_dev, seen.st_ino]


def _is_set_up(node: Node, known: Attachment, call: Call, sandbox: list[int]) -> bool:
    """Whether the pod still has what ADD made: the same namespace with its interfaces, and the
    host's end."""
    then = known.state.get("netns")  # attachments of older releases lack it
    if known.netns != call.netns or (then and then != sandbox):
        return False
    if known.host_ifname and not node.kernel.index(known.host_ifname):
        return False
    made = [one["name"] for one in known.result.get("interfaces", ()) if one.get("sandbox")]
    try:
        with netns.opened(call.netns, call.netns_fd) as fd, netns.entered(fd), Netlink() as inside:
            return all(inside.index(name) for name in made)
    except CniError:
        return not made


def _release(node: Node, network: NetworkConfig, owner: Owner) -> None:
    """Free the address after the ADD has failed."""
    try:
        node.ipam.release(owner)
    except CniError as problem:
        if problem.code == STORE:
            unrecorded.note(network.data_dir, owner, problem)
        raise


def _connect(
    kernel: Netlink,
    network: NetworkConfig,
    planned: link.Cable,
    fd: int,
    station: Optional[guard.Station],
) -> link.Cable:
    with guard.needed():
        return link.connect(
            kernel, network, planned, fd, lambda index: guard.filters_for(station, index)
        )


def _leads_from_loopback(bridge: str) -> bool:
    return netns.read_sysctl(f"net/ipv4/conf/{bridge}/route_localnet") == "1"


def _open_loopback(kernel: Netlink, network: NetworkConfig, cable: link.Cable) -> None:
    from ...datapath import loopback_ports  # most pods have no host ports

    loopback_ports.open_for(kernel, network, cable)


def _publish(
    node: Node,
    network: NetworkConfig,
    owner: Owner,
    call: Call,
    cable: link.Cable,
    addresses: Sequence[LeasedAddress],
    undo: ExitStack,
) -> None:
    from ...datapath import host_ports, node_ports  # most pods have no host ports

    ports = host_ports.ports_of(network, addresses)
    if not ports:
        return
    node_ports.refuse_those_of_the_node(network, ports)
    _open_loopback(node.kernel, network, cable)
    undo.callback(host_ports.withdraw_leftovers, node.store, {one.address for one in addresses})
    undo.callback(host_ports.withdraw, node.store, owner)
    host_ports.publish(node.store, owner, call.pod, ports)


def _dns(configured: Dns, given: Dns) -> Dns:
    """The configuration's values, and for those that it lacks the values of the IPAM."""
    return Dns(
        configured.nameservers or given.nameservers,
        configured.domain or given.domain,
        configured.search or given.search,
        configured.options or given.options,
    )


def _result(
    network: NetworkConfig, cable: link.Cable, sandbox: str, dns: dict[str, Any]
) -> dict[str, Any]:
    interfaces: list[dict[str, Any]] = []
    if network.datapath != "routed":
        interfaces.append({"name": network.bridge})
    if network.bandwidth.egress_rate:
        interfaces.append({"name": link.limiter_of(cable.host)})
    interfaces.append({"name": cable.host, "mac": cable.host_mac, "mtu": network.mtu})
    interfaces.append(
        {"name": cable.pod, "mac": cable.pod_mac, "mtu": network.mtu, "sandbox": sandbox}
    )
    ips = result.ips_of(cable.addresses, len(interfaces) - 1)
    made: dict[str, Any] = {"cniVersion": "1.1.0", "interfaces": interfaces, "ips": ips}
    made["routes"] = [_route(route) for route in cable.routes]
    made["dns"] = dns
    return made


def _route(route: Route) -> dict[str, Any]:
    shown: dict[str, Any] = {"dst": str(route.dst)}
    if route.gateway is not None:
        shown["gw"] = str(route.gateway)
    for key in ROUTE_NUMBERS:
        if getattr(route, key) is not None:
            shown[key] = getattr(route, key)
    return shown


def _remember(
    node: Node, attachment: Attachment, leased: Sequence[LeasedAddress], opens: int
) -> None:
    """Write the attachment if the store still has the pod's addresses. This is checked inside the
    transaction, because its start detects that the file was replaced."""

    def work(db: sqlite3.Connection) -> None:
        held = all(holder_of(db, one.address) == attachment.owner for one in leased)
        if node.store.opens != opens or not held:
            raise CniError(
                TRY_AGAIN,
                "the allocation store was replaced while the pod was set up",
                "the new one does not know the pod's address; the runtime has to try again",
            )
        node.store.remember(attachment)

    node.store.atomically(work)
