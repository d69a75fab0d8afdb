"""127.0.0.1:hostPort on the node leads to a pod.

The kernel routes that only with `route_localnet` on the pod's way in, which alone would open all of
127.0.0.0/8 to pods. nft closes it again. So does the filter on every pod's link (guard.py), because
`nft flush ruleset` removes all rules of nft, and the daemon may not be running. If the kernel has
no such filters, route_localnet stays off, and 127.0.0.1:hostPort does not answer.

The filter cannot be on the bridge. Before it would see a pod's answer, br_netfilter has put back
the address that the node asked from, which is 127.0.0.1.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..model import NetworkConfig
from ..problems import warn
from . import netns
from .guard import is_kept_off_loopback, keep_off_loopback
from .link import Cable, pod_link_names
from .netlink import KernelError, Netlink


def is_open(through: str) -> bool:
    return netns.read_sysctl(_sysctl(through)) == "1"


def open_for(kernel: Netlink, network: NetworkConfig, cable: Cable) -> None:
    """Have host ports of 127.0.0.1 lead to the pod, but no other address of 127.0.0.0/8."""
    open_on(kernel, cable.host if network.datapath == "routed" else network.bridge, cable.host)


def open_on(kernel: Netlink, through: str, host: str) -> None:
    """Have host ports of 127.0.0.1 lead to pods behind `through`: a bridge, or the pod's own link
    `host`. Call this for every new pod of the bridge, too, before it can send much."""
    others = [] if through == host or is_open(through) else pod_link_names()
    try:
        for name in {host, *others}:
            keep_off_loopback(kernel, name)
    except KernelError as problem:
        netns.write_sysctl(_sysctl(through), "0")
        warn(
            f"127.0.0.1:hostPort does not lead to pods: {problem}; expected the kernel modules"
            " sch_ingress and cls_bpf"
        )
        return
    netns.write_sysctl(_sysctl(through), "1")


def repair(kernel: Netlink, bridges: Iterable[str]) -> list[str]:
    """Add missing filters: an older release made no filters, and other programs may remove them.
    Returns the links that lacked it."""
    opened = [name for name in bridges if is_open(name)]
    found = []
    for host in pod_link_names():
        through = host if is_open(host) else next(iter(opened), "")
        if through and not is_kept_off_loopback(kernel, host):
            open_on(kernel, through, host)
            found.append(host)
    return found


def _sysctl(name: str) -> str:
    return f"net/ipv4/conf/{name}/route_localnet"
