"""Reconstructs a lost store from the kernel and from libcni's cache.

If a node with running pods has a new store, the old one was lost. No address is leased before the
store was reconstructed (docs/decisions/0008):

- The links that HeadCNI made name their owners.
- containerd, CRI-O and cnitool keep the result of each ADD in a file until its DEL. From it, the
  whole attachment is restored. It is the only source for pods whose links other plugins made.
- For other pods, the filters of anti-spoofing and the node's routes show the addresses. What a pod
  itself shows counts last, because it may have given itself the address of another pod.
- The nft maps have the host ports. The address that a port leads to shows its owner.

Addresses that are in use without a known owner are not leased either.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_interface
from typing import Any, Tuple

from . import config, repair
from .database import DATA_DIR, is_unverified
from .datapath import firewall, guard, host_ports, link, pod_ranges, ruleset, seen
from .datapath.netlink import Netlink
from .errors import CniError
from .ipam.allocate import Ipam
from .ipam.config import TYPE as OUR_IPAM
from .model import Address, LeasedAddress, NetworkConfig, Owner, PodRef
from .record import dataclass, field, replace
from .result import ips_of, read
from .store import (
    Attachment,
    Store,
    insert_allocations,
    last_known,
    lease_of_owner,
)

RESULTS_DIR = "/var/lib/cni/results"
MOST_FILES = 16384
MOST_BYTES = 1 << 20
NOBODY = ""  # the network of addresses that are in use and whose owner is unknown
RECOVERED = "(recovered)"  # replaces the pod's name if only the kernel shows the address


@dataclass
class _Pod:
    """An owner, and what was found of it."""

    owner: Owner
    ref: str = RECOVERED
    addresses: dict[Address, LeasedAddress] = field(default_factory=dict)
    attachment: Attachment | None = None
    link: seen.PodLink | None = None
    claimed: dict[Address, LeasedAddress] = field(default_factory=dict)  # by the pod itself
    trusted: bool = True  # whether `addresses` come from another source than the pod


def recover(store: Store, network: NetworkConfig | None = None) -> None:
    """Record everything in use, in one transaction, unless another process has done so. `network`
    is the network of the call. Its configuration is assumed for its pods if no other one is
    known."""
    home = os.path.realpath(os.path.dirname(store.path))
    cache = list(_entries(RESULTS_DIR))
    pods = {pod.owner: pod for pod in _from_links()}
    for pod in _from_cache(cache, home):
        pods[pod.owner] = _merged(pods.get(pod.owner), pod)
    disputed = _believe_undisputed(pods.values())
    _attach(pods.values(), network)
    elsewhere = {DATA_DIR, *(_data_dir(conf) for _unused, conf in cache)} - {home, ""}
    foreign = {pod.owner for pod in pods.values() if _is_held_in(elsewhere, pod.owner)}
    ours = [pod for pod in pods.values() if pod.owner not in foreign]
    cached = [pod for pod in _from_cache(cache, home, of_others=True) if pod.owner not in pods]
    kept = _beside_ours((*(pods[owner] for owner in foreign), *cached), network)
    ports, ranges = host_ports.live_ports(), ruleset.live_ranges()
    holders = {address: pod for pod in ours for address in pod.addresses}
    unowned = _in_use(ports) - {one for pod in pods.values() for one in pod.addresses} | disputed
    unowned.update(address for pod in kept if pod.link is None for address in pod.addresses)

    def work(db: sqlite3.Connection) -> str:
        if not is_unverified(db):
            return ""  # another process has done it
        reason = store.lost.reason if store.lost else ""
        for pod in ours:
            insert_allocations(db, pod.owner, pod.ref, pod.addresses.values())
            if pod.attachment is not None and store.attachment(pod.owner) is None:
                store.remember(pod.attachment)
        for address in unowned:
            owner, leased = Owner(NOBODY, str(address), ""), _bare(address)
            insert_allocations(db, owner, RECOVERED, [leased])
        for pod in (*ours, *kept):
            if pod.link is not None:  # until the link is gone
                owner = Owner(NOBODY, pod.link.name, "")
                seen_there = {**pod.addresses, **pod.claimed}
                insert_allocations(db, owner, RECOVERED, seen_there.values())
        for port in ports:
            holder = holders.get(ip_address(port.pod_ip))
            if holder is not None:
                host_ports.adopt(db, holder.owner, holder.ref, port)
        for pod in ours:
            needed = pod.attachment.state.get("ranges") if pod.attachment is not None else None
            pod_ranges.adopt(db, pod.owner.network, ranges if needed is None else needed)
        firewall.adopt_policy(db)
        db.execute("UPDATE network SET ranges = ''")  # free addresses are computed from allocations
        store.recovered()
        expected = network is None or any(pod.owner.network == network.name for pod in ours)
        return reason or ("a new one was made while pods are running" if ours and expected else "")

    reason = store.atomically(work)
    if reason:
        _say(store, reason, ours, unowned, [p for p in ports if ip_address(p.pod_ip) in holders])


def running(home: str) -> dict[Owner, frozenset[Address]]:
    """The pods that the kernel and libcni's cache show, with their addresses. A pod whose link does
    not name it has its link's name as container."""
    pods = {pod.owner: pod for pod in _from_links()}
    for pod in _from_cache(_entries(RESULTS_DIR), os.path.realpath(home)):
        pods[pod.owner] = _merged(pods.get(pod.owner), pod)
    return {owner: frozenset(pod.addresses or pod.claimed) for owner, pod in pods.items()}


def release_unused(store: Store, but: Container[Owner] = ()) -> list[Owner]:
    """Free recovered addresses whose link no longer exists, because its DEL used another store.
    Addresses without any owner stay until the reboot."""
    select = "SELECT DISTINCT network, container_id, ifname FROM allocation WHERE pod = ?"
    rows = store.read(lambda db: db.execute(select, (RECOVERED,)).fetchall())
    if not rows:
        return []
    with Netlink() as kernel:
        links = {one.name for one in seen.pod_links(kernel)}
    released = []
    for owner in (Owner(*row) for row in rows):
        if owner in but or (owner.network == NOBODY and not owner.container_id.startswith("hc")):
            continue
        name = owner.container_id if owner.network == NOBODY else link.host_name(owner)
        if name not in links and _released(store, owner):
            released.append(owner)
    return released


def _released(store: Store, owner: Owner) -> bool:
    """False if a new pod has the owner's name by now."""

    def work(db: sqlite3.Connection) -> bool:
        lease = lease_of_owner(db, owner)
        if lease is None or lease.pod != RECOVERED:
            return False
        host_ports.withdraw(store, owner)
        Ipam(store).release(owner)
        store.forget(owner)
        return True

    return store.atomically(work)


def _from_links() -> Iterator[_Pod]:
    with Netlink() as kernel:
        links = [one for one in seen.pod_links(kernel) if one.alias.startswith("headcni ")]
        given = seen.given(links, kernel) if links else {}
        here = seen.addresses() if links else {}
        for one in links:
            words = one.alias.split()
            owner = Owner(*words[1:]) if len(words) == 4 else Owner(NOBODY, one.name, "")
            near = here.get(one.master or one.number, [])
            claimed = dict(seen.claimed(one, kernel))
            whole = {
                address: _as_leased(address, claimed.get(address), near, bool(one.master))
                for address in (*given.get(one.name, ()), *claimed)
            }
            addresses = {address: whole[address] for address in given.get(one.name, ())}
            claims = {address: whole[address] for address in claimed}
            yield _Pod(owner, RECOVERED, addresses, None, one, claims, one.name in given)


def _as_leased(
    address: Address, claimed: int | None, near: Iterable[tuple[Address, int]], bridged: bool
) -> LeasedAddress:
    """The address with the prefix length of the bridge. The pod's own prefix length counts only if
    the bridge has no address."""
    gateway, length = _gateway(address, near)
    if not bridged:
        length = address.max_prefixlen
    return LeasedAddress(address, length or claimed or address.max_prefixlen, gateway)


def _gateway(
    address: Address, candidates: Iterable[tuple[Address, int]]
) -> tuple[Address | None, int]:
    """The node's address that is a pod's gateway, on the bridge or on the host's end, and its
    prefix length; None and 0 if there is none."""
    for candidate, length in candidates:
        if candidate.version == address.version and (
            length == candidate.max_prefixlen
            or address in ip_interface(f"{candidate}/{length}").network
        ):
            return candidate, length
    return None, 0


def _attach(pods: Iterable[_Pod], network: NetworkConfig | None) -> None:
    """Reconstruct the attachments of pods that the runtime's cache does not have."""
    bare = [pod for pod in pods if pod.ref == RECOVERED and pod.link is not None and pod.addresses]
    if not bare:
        return
    with Netlink() as kernel:
        paths, checked = seen.namespaces(), guard.stations(kernel)
    for pod in bare:
        path = paths.get(pod.link.netns, "") if pod.link else ""
        if pod.link and path and pod.owner.network != NOBODY:
            mac = checked[pod.link.name].mac if pod.link.name in checked else ""
            pod.attachment = _attachment(pod, pod.link, path, mac, network)


def _attachment(
    pod: _Pod, one: seen.PodLink, path: str, mac: str, network: NetworkConfig | None
) -> Attachment:
    """What the kernel shows, without the pod's name, and with the present configuration. `mac` is
    that of the pod's anti-spoofing filter: without it, the pod stays unchecked."""
    same = network is not None and network.name == pod.owner.network
    conf = dict(network.raw) if network is not None and same else {}
    for of_the_call in ("runtimeConfig", "prevResult", "args"):
        conf.pop(of_the_call, None)
    if not one.master:
        conf["datapath"] = "routed"
    inside = {"name": pod.owner.ifname, "sandbox": path, **({"mac": mac} if mac else {})}
    interfaces = [{"name": one.name}, inside]
    made = {
        "cniVersion": "1.1.0",
        "interfaces": interfaces,
        "ips": ips_of(pod.addresses.values(), 1),
    }
    # Without an address of the node in its network, the prefix length is only the pod's claim.
    leased = [ip if ip.gateway is not None else _bare(ip.address) for ip in pod.addresses.values()]
    state = _state(path, conf, leased)
    return Attachment(pod.owner, PodRef(), path, one.name, conf, made, state, time.time())


def _in_use(ports: Iterable[ruleset.Port]) -> set[Address]:
    """The addresses of all pods that the kernel shows."""
    found = {ip_address(port.pod_ip) for port in ports}
    with Netlink() as kernel:
        for by_link in (seen.routed(kernel), seen.bridged(kernel)):
            found.update(*by_link.values())
    own = {address for listed in seen.addresses().values() for address, _unused in listed}
    return found - own


_Entry = Tuple[Mapping[str, Any], Mapping[str, Any]]


def _from_cache(entries: Iterable[_Entry], home: str, of_others: bool = False) -> Iterator[_Pod]:
    """The pods that were added with our store, or with other stores."""
    for entry, conf in entries:
        named = _data_dir(conf)
        if bool(named and os.path.realpath(named) != home) != of_others:
            continue
        try:
            pod = _remembered(entry, conf)
        except (ValueError, KeyError, TypeError, AttributeError, CniError):
            continue
        if pod is not None:
            yield pod


def _entries(folder: str) -> Iterator[_Entry]:
    """Each file of the cache that concerns us, with the configuration of our plugin in it."""
    import binascii

    try:
        names = sorted(os.listdir(folder))[:MOST_FILES]
    except OSError:
        return
    for name in names:
        try:
            with open(os.path.join(folder, name), "rb") as file:
                entry = json.loads(file.read(MOST_BYTES))
            whole = json.loads(binascii.a2b_base64(entry["config"]))
            conf = _ours(whole)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # another program's file, or an incomplete one
        if conf is not None:
            shared = {key: whole[key] for key in ("cniVersion", "name") if key in whole}
            yield entry, {**shared, **conf}


def _ours(whole: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The plugin of a netconf or conflist that gets its addresses from us."""
    for plugin in whole.get("plugins") or [whole]:
        if plugin.get("type") == config.TYPE or (plugin.get("ipam") or {}).get("type") == OUR_IPAM:
            return dict(plugin)
    return None


def _data_dir(conf: Mapping[str, Any]) -> str:
    if conf.get("type") == config.TYPE:
        named = conf.get("data_dir") or conf.get("dataDir")
    else:
        named = (conf.get("ipam") or {}).get("dataDir")
    return named if isinstance(named, str) else ""


def _remembered(entry: Mapping[str, Any], conf: Mapping[str, Any]) -> _Pod | None:
    """The pod of an entry; None if its sandbox is dead."""
    owner = Owner(str(entry["networkName"]), str(entry["containerId"]), str(entry["ifName"]))
    made = read(entry["result"], str(conf.get("cniVersion") or "1.1.0"))
    args = dict(pair for pair in entry.get("cniArgs") or () if len(pair) == 2)
    ref = PodRef(*(args.get(f"K8S_POD_{name}", "") for name in ("NAMESPACE", "NAME", "UID")))
    pod = _Pod(owner, str(ref))
    for ip in made["ips"]:
        interface = ip_interface(ip["address"])
        gateway = ip_address(ip["gateway"]) if ip.get("gateway") else None
        length = interface.network.prefixlen
        pod.addresses[interface.ip] = LeasedAddress(interface.ip, length, gateway)
    sandboxes = [one["sandbox"] for one in made.get("interfaces", ()) if one.get("sandbox")]
    path = str(entry.get("netns") or "") or next(iter(sandboxes), "")
    if path and repair.is_dead(path, None):
        return None
    if path and conf.get("type") == config.TYPE:
        chained = "delegate" in conf or "plugins" in conf
        host = "" if chained else link.host_name(owner)
        whole = {**conf, **_runtime_config(entry, conf)}
        state = _state(path, whole, tuple(pod.addresses.values()))
        pod.attachment = Attachment(owner, ref, path, host, whole, made, state, time.time())
    return pod


def _runtime_config(entry: Mapping[str, Any], conf: Mapping[str, Any]) -> dict[str, Any]:
    """The runtime's values for the capabilities that the plugin declares."""
    given, has = entry.get("capabilityArgs") or {}, conf.get("capabilities") or {}
    chosen = {key: value for key, value in given.items() if has.get(key)}
    return {"runtimeConfig": chosen} if chosen else {}


def _merged(by_link: _Pod | None, by_cache: _Pod) -> _Pod:
    """The runtime's cache has the addresses that ADD gave to the pod, so it counts more."""
    if by_link is None:
        return by_cache
    return replace(by_cache, link=by_link.link, claimed=by_link.claimed)


def _believe_undisputed(pods: Iterable[_Pod]) -> set[Address]:
    """Accept the claims of pods that no other source confirms, except for addresses that another
    pod has or also claims. Returns the addresses that several pods claim."""
    found = list(pods)
    given = {address for pod in found for address in pod.addresses}
    claims = Counter(address for pod in found if not pod.trusted for address in pod.claimed)
    for pod in found:
        if not pod.trusted:
            mine = pod.claimed.items()
            pod.addresses = {a: one for a, one in mine if a not in given and claims[a] == 1}
    return {address for address, count in claims.items() if count > 1} - given


def _beside_ours(pods: Iterable[_Pod], network: NetworkConfig | None) -> list[_Pod]:
    """The pods of other stores whose addresses our store might lease: their network had another
    data_dir before, or uses the same bridge."""
    with Netlink() as kernel:
        bridge = kernel.index(network.bridge) if network is not None else 0
    return [
        pod
        for pod in pods
        if network is None
        or pod.owner.network == network.name
        or (pod.link is not None and bridge and pod.link.master == bridge)
    ]


def _is_held_in(folders: Iterable[str], owner: Owner) -> bool:
    """Whether another store has the owner: several stores are several networks."""
    return any(
        known.addresses or known.attachment
        for known in (last_known(folder, owner) for folder in folders)
    )


def _state(path: str, conf: Mapping[str, Any], leased: Sequence[LeasedAddress]) -> dict[str, Any]:
    """The state as ADD writes it: the namespace, and the ranges that the nft sets need."""
    state: dict[str, Any] = {}
    with suppress(OSError):
        found = os.stat(path)
        state["netns"] = [found.st_dev, found.st_ino]
    if conf.get("name"):
        with suppress(CniError):
            whole = json.dumps({"cniVersion": "1.1.0", **conf}).encode()
            network = config.parse(whole, {}, forgiving=True)
            state["ranges"] = pod_ranges.ranges_of(network, leased)
    return state


def _bare(address: Address) -> LeasedAddress:
    return LeasedAddress(address, address.max_prefixlen, None)


def _say(
    store: Store,
    reason: str,
    pods: Iterable[_Pod],
    unowned: Iterable[Address],
    ports: Iterable[ruleset.Port],
) -> None:
    found = list(pods)
    print(
        f'level=ERROR part=store msg="the allocation store was lost and has been reconstructed"'
        f' reason="{reason}" path={store.path} pods={len(found)}'
        f" addresses={sum(len(pod.addresses) for pod in found)}"
        f" attachments={sum(pod.attachment is not None for pod in found)}"
        f" ports={len(list(ports))} without_owner={len(list(unowned))}",
        file=sys.stderr,
        flush=True,
    )
