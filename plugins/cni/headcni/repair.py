"""A pod's network that came apart while the pod runs: found cheaply, and mended in place.

CHECK compares all there is of one pod, by pyroute2, when the runtime asks. This is asked about all
pods of the node every minute, so the node's side is read once for all of them, and only what a pod
cannot do without is compared. Mending keeps the pod's addresses and its MAC: its connections go on.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Optional

from . import comparison, config
from .address_sources import routes_of, source_of
from .comparison import Link
from .datapath import firewall, guard, host_ports, link, loopback_ports, netns, pod_ranges, rtnl
from .datapath.netlink import Netlink, Request, attributes, text, u32
from .errors import STORE, CniError
from .model import Address, NetworkConfig
from .plugins.headcni.node import Node, Opener
from .plugins.headcni.plugin import run
from .record import replace
from .store import Attachment

CNI_PATH = "/opt/cni/bin"
RTM_GETLINK, RTM_GETADDR = 18, 22
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBi")


class Reader:
    """Reads the node's own network namespace once, for all pods, or that of a pod."""

    def __init__(self, kernel: Netlink) -> None:
        self._kernel = kernel
        self._links = _links(kernel)
        self._addresses = _addresses(kernel)

    def link(self, name: str) -> Optional[Link]:
        return self._links.get(name)

    def addresses(self, index: int) -> frozenset[str]:
        return self._addresses.get(index, frozenset())

    def has_route(self, address: Address, index: int) -> bool:
        answer = link.route_to(self._kernel, address)
        if answer is None or answer[1] != address.max_prefixlen:
            return False
        leads_to = dict(attributes(answer[12:])).get(rtnl.RTA_OIF, bytes(4))
        return int(struct.unpack("=I", leads_to)[0]) == index


def _links(kernel: Netlink) -> dict[str, Link]:
    links = {}
    question = Request(RTM_GETLINK, 0, _LINK.pack(0, 0, 0, 0, 0), "list the links")
    for body in kernel.dump(question):
        _unused, _unused, index, flags, _unused = _LINK.unpack_from(body)
        name, master = "", 0
        for kind, value in attributes(body[_LINK.size :]):
            if kind == rtnl.IFLA_IFNAME:
                name = value.rstrip(b"\0").decode(errors="replace")
            elif kind == rtnl.IFLA_MASTER:
                (master,) = struct.unpack("=I", value)
        links[name] = Link(index, bool(flags & rtnl.IFF_UP), master)
    return links


def _addresses(kernel: Netlink) -> dict[int, frozenset[str]]:
    found: dict[int, set[str]] = {}
    question = Request(RTM_GETADDR, 0, _ADDRESS.pack(0, 0, 0, 0, 0), "list the addresses")
    for body in kernel.dump(question):
        family, prefix, _unused, _unused, index = _ADDRESS.unpack_from(body)
        if family not in (socket.AF_INET, socket.AF_INET6):
            continue
        have = dict(attributes(body[_ADDRESS.size :]))
        packed = have.get(rtnl.IFA_LOCAL) or have.get(rtnl.IFA_ADDRESS)
        if packed:
            found.setdefault(index, set()).add(f"{ip_address(packed)}/{prefix}")
    return {index: frozenset(those) for index, those in found.items()}


def network_of(attachment: Attachment, env: Optional[Mapping[str, str]] = None) -> NetworkConfig:
    """The configuration that the pod was added with. Its MTU may have come from a file that has
    changed since, so the result's counts."""
    network = config.parse(netconf_of(attachment), env or {}, forgiving=True)
    interfaces = attachment.result.get("interfaces", ())
    mtu = next((one["mtu"] for one in interfaces if one.get("mtu")), network.mtu)
    return replace(network, mtu=mtu)


def netconf_of(attachment: Attachment) -> bytes:
    """The same as the runtime handed it over; what is left of it where the store was damaged."""
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
    """Make the pod's network what ADD had made it. Every part is left alone that is as it should
    be; a cable of which one end is gone is made anew."""
    owner, leased = attachment.owner, attachment.leased
    source_of(network).record_again(node, attachment)
    # The routes are those that the pod got: only ADD sees which of them others have.
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
    """Bring the host's end up, and into its bridge."""
    body = _LINK.pack(0, 0, 0, rtnl.IFF_UP, rtnl.IFF_UP)
    body += text(rtnl.IFLA_IFNAME, name) + u32(rtnl.IFLA_MTU, mtu)
    if bridge:
        body += u32(rtnl.IFLA_MASTER, bridge)
    return Request(rtnl.RTM_NEWLINK, 0, body, f"plug {name} in")


def namespaces_at_work() -> Optional[frozenset[int]]:
    """The network namespaces that some process is in, by their numbers; None if not all may be
    looked at."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                found.add(os.stat(f"/proc/{entry}/ns/net").st_ino)
            except PermissionError:
                return None
            except OSError:
                continue  # it ended meanwhile
    return frozenset(found)


def release(attachment: Attachment, open_node: Opener, cni_path: str = CNI_PATH) -> None:
    """By a DEL, as the runtime should have sent it."""
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
    outcome = run(env, netconf_of(attachment), None, open_node)
    if outcome.error is not None:
        raise outcome.error
    if outcome.unrecorded:
        raise CniError(STORE, "its network was removed, but not from the store", outcome.unrecorded)


def is_dead(path: str, at_work: Optional[frozenset[int]]) -> bool:
    """Whether nothing can be alive in a sandbox: its network namespace is gone, or kept by its file
    alone. What cannot be told counts as alive."""
    try:
        seen = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    namespaces = os.stat("/proc/self/ns/net").st_dev
    if seen.st_dev != namespaces:
        # The file that the namespace was mounted on, and no longer is; unless we are in a mount
        # namespace that does not hear of the host's mounts.
        try:
            return os.stat(f"/proc/1/root{path}").st_dev != namespaces
        except FileNotFoundError:
            return True
        except OSError:
            return False
    return at_work is not None and seen.st_ino not in at_work
