"""127.0.0.1:hostPort on the node leads to a pod.

The kernel routes that only with `route_localnet` on the pod's way in, which alone would open all of
127.0.0.0/8 to pods. nft closes it again; so does a filter of tc, because one `nft flush ruleset`
ends all of nft, and no daemon need be running. Where there can be no such filter, route_localnet
stays off, and 127.0.0.1:hostPort does not answer.

The filter is on the pods' own links. On the bridge it would see answers of pods after br_netfilter
has put the address back that the node asked from, which is 127.0.0.1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from ..ipam.config import warn
from . import netns, rtnl
from .netlink import KernelError, Netlink

_PARENT = "/proc/sys/net/ipv4/conf"
_POD_LINK = re.compile(r"hc[0-9a-f]{11}\Z")


def is_open(through: str) -> bool:
    return netns.read_sysctl(_sysctl(through)) == "1"


def open_on(kernel: Netlink, through: str, host: str) -> None:
    """Have host ports of 127.0.0.1 lead to pods behind `through`: a bridge, or the pod's own link
    `host`. To be called for every further pod of the bridge, too, before it can send much."""
    others = [] if through == host or is_open(through) else _pod_links()
    try:
        for name in {host, *others}:
            _keep_out(kernel, name)
    except KernelError as problem:
        netns.write_sysctl(_sysctl(through), "0")
        warn(
            f"127.0.0.1:hostPort does not lead to pods: {problem}; expected the kernel modules"
            " sch_ingress and cls_bpf"
        )
        return
    netns.write_sysctl(_sysctl(through), "1")


def repair(kernel: Netlink, bridges: Iterable[str]) -> list[str]:
    """Add the filter where it is missing: pods of an older release, or somebody took it away. Says
    where that was."""
    opened = [name for name in bridges if is_open(name)]
    found = []
    for host in _pod_links():
        through = host if is_open(host) else next(iter(opened), "")
        if through and not _is_kept_out(kernel, kernel.index(host)):
            open_on(kernel, through, host)
            found.append(host)
    return found


def _pod_links() -> list[str]:
    return [name for name in os.listdir(_PARENT) if _POD_LINK.match(name)]


def _keep_out(kernel: Netlink, name: str) -> None:
    index = kernel.index(name)
    if index and not _is_kept_out(kernel, index):
        kernel.do([rtnl.ingress(index), rtnl.keep_out_loopback(index)])


def _is_kept_out(kernel: Netlink, index: int) -> bool:
    """A link without an ingress qdisc has no filters: the kernel lists none, or refuses to."""
    try:
        found = kernel.dump(rtnl.filters(index))
    except KernelError:
        return False
    return any(rtnl.preference_of(one) == rtnl.KEEP_OUT_LOOPBACK for one in found)


def _sysctl(name: str) -> str:
    return f"net/ipv4/conf/{name}/route_localnet"
