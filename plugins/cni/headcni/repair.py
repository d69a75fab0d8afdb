"""Finds and repairs damage to the network of running pods.

CHECK compares everything of one pod, with pyroute2, when the runtime asks. This compares all pods
of the node every minute. So it reads the node's side once for all of them, and compares only what a
pod cannot work without. A repair keeps the pod's addresses and its MAC, so connections continue.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Optional

from . import comparison, config
from .address_sources import routes_of, source_of
from .datapath import (
    firewall,
    guard,
    host_ports,
    interfaces,
    link,
    loopback_ports,
    netns,
    pod_ranges,
    rtnl,
)
from .datapath.interfaces import LINK, Link
from .datapath.netlink import Netlink, Request, attributes, text, u32
from .errors import STORE, CniError
from .model import Address, NetworkConfig
from .plugins.headcni.node import Node, of_store
from .plugins.headcni.plugin import run
from .record import replace
from .store import Attachment, Store

CNI_PATH = "/opt/cni/bin"


class Reader:
    """Reads the node's own network namespace once, for all pods, or that of a pod."""

    def __init__(self, kernel: Netlink) -> None:
        self._kernel = kernel
        self._links = interfaces.links(kernel)
        self._addresses = interfaces.addresses(kernel)

    def link(self, name: str) -> Optional[Link]:
        return self._links.get(name)

    def addresses(self, index: int) -> Sequence[str]:
        return self._addresses.get(index, ())

    def has_route(self, address: Address, index: int) -> bool:
        answer = link.route_to(self._kernel, address)
        if answer is None or answer[1] != address.max_prefixlen:
            return False
        leads_to = dict(attributes(answer[12:])).get(rtnl.RTA_OIF, bytes(4))
        return int(struct.unpack("=I", leads_to)[0]) == index


def network_of(attachment: Attachment, env: Optional[Mapping[str, str]] = None) -> NetworkConfig:
    """The configuration that the pod was added with. The MTU is that of the result, because it may
    have come from a file that has changed since."""
    network = config.parse(netconf_of(attachment), env or {}, forgiving=True)
    interfaces = attachment.result.get("interfaces", ())
    mtu = next((one["mtu"] for one in interfaces if one.get("mtu")), network.mtu)
    return replace(network, mtu=mtu)


def netconf_of(attachment: Attachment) -> bytes:
    """The netconf as the runtime passed it, or the rest of it if the store was damaged."""
    bare = {"cniVersion": "1.1.0", "name": attachment.owner.network, "type": config.TYPE}
    return json.dumps({**bare, **attachment.config}).encode()


def differences(
    node: Node, host: Reader, network: NetworkConfig, attachment: Attachment
) -> list[str]:
    """What the pod lacks, in words; nothing if other plugins made its network."""
    if network.delegates:
        return []
    found = [*comparison.lease(node.ipam, network, attachment)]
    found += comparison.host(host, network, attachment)
    try:
        with netns.opened(attachment.netns) as fd, netns.entered(fd), Netlink() as inside:
            found += comparison.pod(Reader(inside), attachment)
    except CniError as problem:
        found.append(f"network namespace: {problem}")
    if attachment.result.get("ips") and firewall.concerns(node.store, network):
        found += firewall.differences(node.store, attachment.owner)
    return found


def mend(node: Node, network: NetworkConfig, attachment: Attachment) -> None:
    """Restore the pod's network as ADD made it. Parts that are right do not change. A veth pair
    that has lost one end is made again."""
    owner, leased = attachment.owner, attachment.leased
    source_of(network).record_again(node, attachment)
    # The routes are those of the result: only ADD can see which of them other interfaces have.
    planned = link.plan(network, owner, leased, ())
    cable = replace(planned, routes=routes_of(attachment.result), default_routes=())
    station = guard.station_of_attachment(attachment)
    with netns.opened(attachment.netns) as fd:
        with netns.entered(fd), Netlink() as inside:
            whole = bool(inside.index(cable.pod))
        if not whole or not node.kernel.index(cable.host):
            link.connect(
                node.kernel, network, cable, fd, lambda index: guard.filters_for(station, index)
            )
        else:
            if station is not None:
                guard.check_frames(node.kernel, station)
            _mend_cable(node.kernel, network, cable, fd)
    ranges = attachment.state.get("ranges", pod_ranges.ranges_of(network, leased))
    addresses = [one.address for one in leased]
    firewall.ensure(node.store, owner.network, ranges, attachment.pod, addresses)
    ports = host_ports.published(node.store, owner)
    if ports:
        loopback_ports.open_for(node.kernel, network, cable)
        host_ports.publish(node.store, owner, attachment.pod, ports)


def _mend_cable(kernel: Netlink, network: NetworkConfig, cable: link.Cable, pod_netns: int) -> None:
    link.prepare_host(kernel, network, cable)
    routed = network.datapath == "routed"
    bridge = 0 if routed else kernel.index(network.bridge)
    kernel.do(
        [
            _plug(cable.host, network.mtu, bridge),
            rtnl.finish_host_end(cable.host, cable.alias, None if routed else network.hairpin),
        ]
    )
    link.finish_host(kernel, network, cable)
    with netns.entered(pod_netns), Netlink() as inside:
        link.finish_pod(inside, network, cable)


def _plug(name: str, mtu: int, bridge: int) -> Request:
    """Bring the host's end up and connect it to its bridge."""
    body = LINK.pack(0, 0, 0, rtnl.IFF_UP, rtnl.IFF_UP)
    body += text(rtnl.IFLA_IFNAME, name) + u32(rtnl.IFLA_MTU, mtu)
    if bridge:
        body += u32(rtnl.IFLA_MASTER, bridge)
    return Request(rtnl.RTM_NEWLINK, 0, body, f"plug {name} in")


def namespaces_at_work() -> Optional[frozenset[int]]:
    """The inodes of the network namespaces that have a process; None if some are not accessible."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                found.add(os.stat(f"/proc/{entry}/ns/net").st_ino)
            except PermissionError:
                return None
            except OSError:
                continue  # the process has ended meanwhile
    return frozenset(found)


def release(attachment: Attachment, store: Store, cni_path: str = CNI_PATH) -> None:
    """Run the DEL that the runtime should have sent. It always uses the store of the attachment,
    whatever data_dir its configuration has."""
    pod, owner = attachment.pod, attachment.owner
    args = {
        "IgnoreUnknown": "1",
        "K8S_POD_NAMESPACE": pod.namespace,
        "K8S_POD_NAME": pod.name,
        "K8S_POD_INFRA_CONTAINER_ID": owner.container_id,
        "K8S_POD_UID": pod.uid,
    }
    env = {
        "CNI_COMMAND": "DEL",
        "CNI_CONTAINERID": owner.container_id,
        "CNI_IFNAME": owner.ifname,
        "CNI_NETNS": attachment.netns if os.path.exists(attachment.netns) else "",
        "CNI_ARGS": ";".join(f"{name}={value}" for name, value in args.items() if value),
        "CNI_PATH": cni_path,
    }
    outcome = run(env, netconf_of(attachment), None, lambda _unused: of_store(store))
    if outcome.error is not None:
        raise outcome.error
    if outcome.unrecorded:
        raise CniError(STORE, "its network was removed, but not from the store", outcome.unrecorded)


def is_dead(path: str, at_work: Optional[frozenset[int]]) -> bool:
    """Whether a sandbox has no living process: its network namespace is gone, or only its file
    keeps it. In case of doubt, the sandbox is alive."""
    try:
        seen = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    namespaces = os.stat("/proc/self/ns/net").st_dev
    if seen.st_dev != namespaces:
        # The namespace is no longer mounted on this file, unless we are in a mount namespace that
        # does not get the host's mounts.
        try:
            return os.stat(f"/proc/1/root{path}").st_dev != namespaces
        except FileNotFoundError:
            return True
        except OSError:
            return False
    return at_work is not None and seen.st_ino not in at_work
