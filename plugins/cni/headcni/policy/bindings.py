"""A pod's interface on this node, as far as network policies are concerned with it."""

from __future__ import annotations

from ipaddress import ip_interface
from typing import NamedTuple, Optional, Tuple

from ..datapath import guard, link
from ..model import Address, NetworkConfig, Owner, PodRef
from ..store import Attachment

NO_NAMESPACE = "default"
BRIDGE = "headcni0"


class Binding(NamedTuple):
    """It has rules from its ADD to its DEL."""

    owner: Owner
    ref: PodRef
    addresses: Tuple[Address, ...]
    more: Tuple[Address, ...] = ()  # that only its neighbours see, such as link-local ones
    link: str = ""  # what leads to it: the bridge, or the host's end of its veth
    exempt: bool = False  # its network has no policies, but may use the same link

    @property
    def key(self) -> Tuple[str, str]:
        """What the pod is called in the world. A container that is no pod goes by its own id."""
        return self.ref.namespace or NO_NAMESPACE, self.ref.name or self.owner.container_id

    @property
    def is_bridged(self) -> bool:
        return self.link != link.host_name(self.owner)


def link_of(network: NetworkConfig, owner: Owner) -> str:
    """What leads to the network's pods, or to this one."""
    return link.host_name(owner) if network.datapath == "routed" else network.bridge


def of_cable(network: NetworkConfig, owner: Owner, pod: PodRef, cable: link.Cable) -> Binding:
    """Of a pod that is added."""
    return Binding(
        owner,
        pod,
        tuple(one.address for one in cable.addresses),
        (guard.link_local(cable.pod_mac),),
        link_of(network, owner),
        not network.enable_network_policy,
    )


def of_attachment(attachment: Attachment) -> Optional[Binding]:
    """The same, as ADD left it; None for what has no addresses, or was made by other plugins."""
    conf, result, owner = attachment.config, attachment.result, attachment.owner
    addresses = tuple(ip_interface(ip["address"]).ip for ip in result.get("ips", ()))
    if not addresses or not attachment.host_ifname:
        return None
    macs = [one.get("mac") for one in result.get("interfaces", ()) if one.get("sandbox")]
    routed = conf.get("datapath") == "routed"
    return Binding(
        owner,
        attachment.pod,
        addresses,
        tuple(guard.link_local(mac) for mac in macs if mac),
        attachment.host_ifname if routed else str(conf.get("bridge") or BRIDGE),
        conf.get("enable_network_policy") is not True,
    )
