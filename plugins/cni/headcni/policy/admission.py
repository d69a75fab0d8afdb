"""What ADD and DEL have to do with network policies.

In the daemon they tell its enforcer, which knows all policies. In a process of their own they know
none: they close the pod's addresses, and the daemon opens them when it runs. Either way this is
done before the pod's link is up, so that there is no moment at which the pod is not protected.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Optional

from ..datapath import link, netns, rtnl
from ..datapath import nft_objects as nft
from ..datapath.netlink import KernelError, Netlink, netfilter
from ..datapath.nft_objects import ACCEPT, DROP
from ..errors import KERNEL_LACKS, TRY_AGAIN, CniError
from ..model import Address, NetworkConfig, Owner, PodRef
from ..store import Attachment, Store
from . import bindings, layout
from .bindings import Binding
from .desired import Desired
from .kernel import has_link, seen
from .layout import COMMENT, GROUPS, LINKS, PEERS, TABLE, link_key

if TYPE_CHECKING:
    from .enforcer import Enforcer

BRIDGE_FILTER = "net/bridge/bridge-nf-call-iptables"
PATIENCE_SECONDS = 3.0  # for a daemon that ends, and keeps the table until then
_MODPROBE_SECONDS = 10.0
_KEPT_AS = "policy_closed"  # the key of the store's table `meta`

_enforcer: Optional[Enforcer] = None  # of the daemon that this is
_filtered: dict[int, str] = {}  # bridges that were told to filter, by their index


def serve(enforcer: Optional[Enforcer]) -> None:
    """From now on ADD and DEL of this process tell this enforcer."""
    global _enforcer
    _enforcer = enforcer


def admit(
    store: Store,
    kernel: Netlink,
    network: NetworkConfig,
    owner: Owner,
    pod: PodRef,
    cable: link.Cable,
) -> None:
    """Before the pod's link is made: have its rules in force, or its addresses closed."""
    if not cable.addresses:
        return
    binding = bindings.of_cable(network, owner, pod, cable)
    if network.enable_network_policy and network.datapath != "routed":
        index = kernel.index(network.bridge)
        if not index:
            link.prepare_host(kernel, network, cable)
            index = kernel.index(network.bridge)
        filter_bridge(kernel, network.bridge, index)
    if _enforcer is not None:
        _enforcer.admit(binding)
    else:
        close(store, binding)


def expect(network: NetworkConfig, owner: Owner) -> None:
    """In the daemon, before another process runs an ADD: that process cannot change the table."""
    if _enforcer is not None and network.enable_network_policy:
        _enforcer.expect(bindings.link_of(network, owner), owner)


def settle(owner: Owner) -> None:
    """After that process: give what it added its rules, and forget what it deleted."""
    if _enforcer is not None:
        with suppress(CniError):  # the next regular pass tries again
            _enforcer.settle(owner)


def dismiss(owner: Owner, addresses: Iterable[Address]) -> None:
    """When the pod's link is down: nobody inherits what its addresses were allowed."""
    if _enforcer is not None:
        _enforcer.dismiss(owner)
    else:
        with suppress(KernelError):
            forget(addresses)


def differences(kernel: Netlink, attachment: Attachment) -> list[str]:
    """For CHECK: what of a pod's protection is missing, in words."""
    binding = bindings.of_attachment(attachment)
    if binding is None or binding.exempt:
        return []
    found = []
    with netfilter() as rules:
        if seen(rules) is None:
            found.append(f"network policies: the nft table inet {TABLE} is missing")
        elif not has_link(rules, binding.link):
            found.append(f"network policies: packets of {binding.link} are not checked")
    if binding.is_bridged and not rtnl.is_bridge_filtered(kernel, binding.link):
        found.append(f"network policies: packets between pods of {binding.link} are not checked")
    return found


# In a process of its own


def close(store: Store, binding: Binding) -> None:
    """Make sure that the table has nothing about the pod's addresses and closes what it does not
    know. What a daemon owns has that already: it was told to expect the pod."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with netfilter() as kernel:
                if close_by(kernel, binding, store, 0):
                    return
        except KernelError as problem:
            if problem.errno not in (errno.EPERM, errno.EEXIST, errno.ENOENT):
                raise
        if time.monotonic() > deadline:
            raise CniError(
                TRY_AGAIN,
                "the daemon has the network policies' rules, but it does not answer",
                "the runtime has to try again; see: systemctl status headcni-daemon",
            )
        time.sleep(0.05)


def close_by(kernel: Netlink, binding: Binding, store: Store, port: int) -> bool:
    """The same by a socket with this port; false if another one owns the table, and something in it
    would have to be changed."""
    addresses = (*binding.addresses, *binding.more)
    table = seen(kernel)
    if table is None:
        if not binding.exempt:
            create(kernel, store, [binding.link])
        return True
    stale = _elements_of(kernel, [*layout.keys_of(addresses), *_of_peers(kernel, addresses)])
    requests = [nft.remove_elements(TABLE, name, [key]) for name, key in stale]
    covered = has_link(kernel, binding.link)
    if binding.exempt and covered:
        requests += [nft.add_elements(TABLE, *one) for one in _opened(addresses)]
    elif not binding.exempt and not covered:
        requests.append(nft.add_elements(TABLE, LINKS, {link_key(binding.link): None}))
    if requests and table.owner not in (0, port):
        return False
    if not binding.exempt and table.owner in (0, port) and store.read(is_closed):
        # Nobody knows whether this pod may get packets to several pods at once.
        requests.append([nft.flush_chain(TABLE, GROUPS)])
        requests.append(nft.new_rules(TABLE, layout.groups_chain(DROP)))
    kernel.commit(nft.SUBSYSTEM, [one for those in requests for one in those])
    return True


def _opened(addresses: Iterable[Address]) -> list[tuple[str, nft.Elements]]:
    return [
        (layout.pods_map(way, one.version), {one.packed: ACCEPT})
        for one in addresses
        for way in layout.OWN_FIELD
    ]


def _elements_of(
    kernel: Netlink, candidates: Sequence[tuple[str, bytes]]
) -> list[tuple[str, bytes]]:
    return [
        (name, key)
        for name, key in candidates
        if kernel.ask(nft.get_element(TABLE, name, key)) is not None
    ]


def create(kernel: Netlink, store: Store, more_links: Iterable[str]) -> None:
    """The table without any policy, as after a reboot. If it was flushed while no daemon ran, the
    pods that are there are closed as well, but those of a network without policies."""
    known = _attached(store)
    links = {one.link for one in known if not one.exempt} | {*more_links}
    closed = store.read(is_closed)
    desired = Desired()
    for one in layout.sets().values():
        desired.add_set(one)
    for name in sorted(links):
        desired.put(LINKS, link_key(name))
    for pod in known:
        for name, elements in _opened((*pod.addresses, *pod.more)) if pod.exempt else ():
            for key, verdict in elements.items():
                desired.put(name, key, verdict)
    desired.add_counter(layout.UNKNOWN, "")
    verdict = DROP if closed else ACCEPT
    for chain in layout.chains(verdict, verdict).values():
        desired.add_chain(chain)
    filled = desired.everything(TABLE).requests
    try:
        kernel.commit(nft.SUBSYSTEM, [nft.new_table(TABLE, COMMENT, nft.PERSIST), *filled])
    except KernelError as problem:
        if problem.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        kernel.commit(nft.SUBSYSTEM, [nft.new_table(TABLE, COMMENT), *filled])


def _attached(store: Store) -> list[Binding]:
    found = []
    for attachment in store.attachments():
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # CHECK names the damage
            found.append(bindings.of_attachment(attachment))
    return [one for one in found if one is not None]


def forget(addresses: Iterable[Address]) -> None:
    """Take addresses out of the table."""
    with netfilter() as kernel:
        forget_by(kernel, list(addresses))


def forget_by(kernel: Netlink, addresses: Sequence[Address]) -> None:
    if seen(kernel) is None:
        return
    candidates = [*layout.keys_of(addresses), *_of_peers(kernel, addresses)]
    for name, key in _elements_of(kernel, candidates):
        with suppress(KernelError):  # somebody was quicker
            kernel.commit(nft.SUBSYSTEM, nft.remove_elements(TABLE, name, [key]))


def _of_peers(kernel: Netlink, addresses: Sequence[Address]) -> list[tuple[str, bytes]]:
    """Every set of peers that the addresses may be in."""
    listed = [nft.set_seen(body) for body in kernel.dump(nft.list_sets(TABLE))]
    names = [name for table, name in listed if table == TABLE and name.startswith(PEERS)]
    return [
        (name, one.packed)
        for name in names
        for one in addresses
        if name.endswith(f"_{one.version}")
    ]


def is_closed(db: sqlite3.Connection) -> bool:
    """Whether the daemon wants pods to be closed whose policies are not known."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (_KEPT_AS,)).fetchone()
    return row is not None


def record_closed(store: Store, closed: bool) -> None:
    """For processes that run without the daemon, and for the time after a reboot."""

    def work(db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM meta WHERE key = ?", (_KEPT_AS,))
        if closed:
            db.execute("INSERT INTO meta VALUES (?, '1')", (_KEPT_AS,))

    if store.read(is_closed) != closed:
        store.atomically(work)


# Bridges that pods are on


def filter_bridge(kernel: Netlink, name: str, index: int) -> None:
    """Have packets between pods of the bridge pass the rules for forwarding."""
    if _filtered.get(index) == name:
        return
    ensure_bridge_filter()
    kernel.do([rtnl.filter_bridged(name)])
    _filtered[index] = name


def ensure_bridge_filter() -> None:
    """The kernel's module br_netfilter is loaded."""
    if netns.read_sysctl(BRIDGE_FILTER) is not None:
        return
    import subprocess  # rarely needed

    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            ["/sbin/modprobe", "br_netfilter"],
            check=False,
            capture_output=True,
            timeout=_MODPROBE_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
        )
    if netns.read_sysctl(BRIDGE_FILTER) is None:
        raise CniError(
            KERNEL_LACKS,
            "enable_network_policy needs the kernel module br_netfilter for pods on a bridge",
            "load it (modprobe br_netfilter), or use datapath: routed, which does not need it",
        )
