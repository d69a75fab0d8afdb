"""Anti-spoofing: what a pod sends carries the pod's own MAC and addresses, or it is dropped.

One small nft table per family, with sets that are keyed by the host's end of the veth. The bridge
datapath is checked in the family bridge, before the bridge learns or forwards anything; the routed
one in inet and arp. A bridge hands frames to 01:80:c2:00:00:0x to the node without that check, so
inet and arp drop whatever comes from a bridged link itself, and the bridge is told not to learn
from such frames. So the check comes after a redirect through an ifb, which passes over netdev
hooks (docs/decisions/0011). A link that is not in the set `guarded` is not checked: pods of
somebody else, and pods that are exempt, are never cut off.
"""

from __future__ import annotations

import errno
import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import IPv6Address, ip_address, ip_interface
from typing import Any, NamedTuple, Optional

from ..errors import KERNEL_LACKS, CniError
from ..model import Address, NetworkConfig, Owner, PodRef
from ..store import Attachment, Store
from . import nft_messages as nft
from .link import Cable, bridge_of, host_name, learns_from_link_local_frames
from .netlink import KernelError, Netlink, Request, netfilter
from .rtnl import bridge_up

TABLE = "headcni_guard"
VERSION = 3  # of the tables: raise it with every change to guard_rules.py or _elements
COMMENT = f"headcni guard {VERSION}"
_SUBSYSTEM = 10  # nf_tables
_LACKS = (errno.ENOENT, errno.EOPNOTSUPP, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)
_AT_ONCE = 2000  # elements in one transaction: a socket's buffer holds some 200 KB
# The sets, with the bytes of a key: a link's name (16), a MAC (8) and an address.
_SETS = {"stations": 24, "own4": 28, "own6": 40, "guarded": 16}


class Station(NamedTuple):
    """A pod's interface, as its neighbours may see it."""

    host: str  # the host's end of its veth
    mac: str
    addresses: tuple[Address, ...]
    routed: bool

    @property
    def families(self) -> tuple[int, ...]:
        return (nft.INET, nft.ARP) if self.routed else (nft.BRIDGE, nft.INET, nft.ARP)


class Element(NamedTuple):
    family: int
    set: str
    key: bytes

    @property
    def host(self) -> str:
        return self.key[:16].rstrip(b"\0").decode(errors="replace")


def applies(anti_spoofing: bool, exempt: Sequence[str], pod: PodRef) -> bool:
    """Whether a network checks this pod. Only the network can exempt pods, by namespace/name: what
    a pod says of itself does not count."""
    if not anti_spoofing:
        return False
    if not exempt or not pod.name:
        return True
    from fnmatch import fnmatchcase  # few networks exempt anybody

    return not any(fnmatchcase(str(pod), pattern) for pattern in exempt)


def station_of(network: NetworkConfig, cable: Cable, pod: PodRef) -> Optional[Station]:
    """None for a pod that is not checked, such as one whose addresses we do not give."""
    if not cable.addresses or not applies(network.anti_spoofing, network.anti_spoofing_exempt, pod):
        return None
    addresses = tuple(one.address for one in cable.addresses)
    return Station(cable.host, cable.pod_mac, addresses, network.datapath == "routed")


def station_of_attachment(attachment: Attachment) -> Optional[Station]:
    """The same, as ADD left it; None also for what another plugin has made."""
    return _recorded(attachment.pod, attachment.host_ifname, attachment.config, attachment.result)


def _recorded(
    pod: PodRef, host: str, conf: Mapping[str, Any], result: Mapping[str, Any]
) -> Optional[Station]:
    exempt = conf.get("anti_spoofing_exempt") or ()
    if not host or not applies(conf.get("anti_spoofing") is not False, exempt, pod):
        return None
    macs = [one.get("mac") for one in result.get("interfaces", ()) if one.get("sandbox")]
    addresses = tuple(ip_interface(one["address"]).ip for one in result.get("ips", ()))
    if not macs or not macs[0] or not addresses:
        return None
    return Station(host, macs[0], addresses, conf.get("datapath") == "routed")


def link_local(mac: str) -> IPv6Address:
    """The address that the kernel gives an interface with this MAC."""
    octets = bytes.fromhex(mac.replace(":", ""))
    tail = bytes([octets[0] ^ 2]) + octets[1:3] + b"\xff\xfe" + octets[3:]
    return IPv6Address(b"\xfe\x80" + bytes(6) + tail)


def _elements(station: Station) -> list[Element]:
    host = station.host.encode().ljust(16, b"\0")
    mac = host + bytes.fromhex(station.mac.replace(":", "")) + b"\0\0"
    keys = [("guarded", host), ("stations", mac)]
    keys += [("own4" if a.version == 4 else "own6", mac + a.packed) for a in station.addresses]
    keys.append(("own6", mac + link_local(station.mac).packed))
    return [
        Element(family, name, key)
        for family in station.families
        for name, key in keys
        if _has(family, name, station.routed)
    ]


def _has(family: int, name: str, routed: bool) -> bool:
    """What a bridged pod says to the node comes in on the bridge; on its own link, nothing does."""
    if not routed and family != nft.BRIDGE:
        return name == "guarded"
    return not (family == nft.ARP and name == "own6")


def _adding(elements: Iterable[Element]) -> list[Request]:
    return _changing(nft.new_elements, elements)


def _deleting(elements: Iterable[Element]) -> list[Request]:
    return _changing(nft.delete_elements, elements)


def _changing(change: Any, elements: Iterable[Element]) -> list[Request]:
    keys: dict[tuple[int, str], list[bytes]] = {}
    for one in elements:
        keys.setdefault((one.family, one.set), []).append(one.key)
    return [
        request
        for (family, name), those in keys.items()
        for request in change(family, TABLE, name, those)
    ]


@contextmanager
def _conversation() -> Iterator[Netlink]:
    try:
        with netfilter() as kernel:
            yield kernel
    except OSError as problem:
        raise CniError(
            KERNEL_LACKS,
            "anti_spoofing is true, but this kernel has no nftables",
            f"{problem}; load nf_tables, or set anti_spoofing to false",
        ) from None


def admit(store: Store, station: Station) -> None:
    """From now on the link may send as this station, and as nobody else. The link need not be there
    yet, so a pod is never without the check."""
    elements = _elements(station)
    with _conversation() as kernel:
        if nft.table_comment(kernel, station.families[0], TABLE) == COMMENT:
            try:
                kernel.commit(_SUBSYSTEM, _adding(elements))
                return
            except KernelError as problem:
                if problem.errno != errno.ENOENT:
                    raise
        store.atomically(lambda db: _rebuild(kernel, db, elements))


def _rebuild(
    kernel: Netlink,
    db: sqlite3.Connection,
    more: Iterable[Element] = (),
    deleted: Collection[Owner] = (),
) -> list[int]:
    """Make the tables that are missing or not ours as this release has them, with all pods in
    them; which families those were. Under the store's lock, so that two do not undo each other."""
    from . import guard_rules  # an ordinary ADD makes no rules

    wanted = {*_of_store(db, deleted), *more}
    families = []
    requests: list[Request] = []
    for family in sorted({one.family for one in wanted}):
        comment = nft.table_comment(kernel, family, TABLE)
        if comment == COMMENT and nft.count_rules(kernel, family, TABLE) == guard_rules.COUNT:
            continue
        families.append(family)
        if comment is not None:
            wanted |= _held(kernel, family)  # pods of another store, or whose ADD is at work
            requests.append(nft.delete_table(family, TABLE))
        requests += guard_rules.structure(family, TABLE, COMMENT)
    elements = sorted(wanted, key=lambda one: one.set == "guarded")
    first, rest = elements[:_AT_ONCE], elements[_AT_ONCE:]
    try:
        kernel.commit(_SUBSYSTEM, [*requests, *_adding(first)])
        for start in range(0, len(rest), _AT_ONCE):
            kernel.commit(_SUBSYSTEM, _adding(rest[start : start + _AT_ONCE]))
    except KernelError as problem:
        if problem.errno in _LACKS:
            raise _kernel_lacks(families, problem) from None
        raise
    return families


def _kernel_lacks(families: Sequence[int], problem: KernelError) -> CniError:
    names = [nft.FAMILY_NAMES[family] for family in families]
    options = ", ".join(f"CONFIG_NF_TABLES_{name.upper()}" for name in names)
    return CniError(
        KERNEL_LACKS,
        f"anti_spoofing is true, but this kernel lacks nftables for {' and '.join(names)}",
        f"{problem}; use a kernel with {options}, or set anti_spoofing to false",
    )


def _all_held(kernel: Netlink) -> set[Element]:
    """Of every family; nothing on a kernel without nftables."""
    try:
        families = [one for one in nft.FAMILY_NAMES if nft.table_comment(kernel, one, TABLE)]
    except KernelError as problem:
        if problem.errno in (errno.EINVAL, *_LACKS):
            return set()
        raise
    return {one for family in families for one in _held(kernel, family)}


def _held(kernel: Netlink, family: int) -> set[Element]:
    """What the kernel has, of sets that are still made the same way."""
    return {
        Element(family, name, key)
        for name, length in _SETS.items()
        for key in nft.keys_of(kernel, family, TABLE, name)
        if len(key) == length
    }


def _of_store(db: sqlite3.Connection, deleted: Collection[Owner] = ()) -> set[Element]:
    rows = db.execute(
        "SELECT pod_namespace, pod_name, host_ifname, config, result FROM attachment"
        " WHERE host_ifname != ''"
    )
    gone = set(map(host_name, deleted))
    found: set[Element] = set()
    for namespace, name, host, conf, result in rows:
        if host in gone:
            continue
        try:
            station = _recorded(PodRef(namespace, name), host, json.loads(conf), json.loads(result))
        except (ValueError, TypeError, AttributeError, KeyError):
            continue  # a damaged row; CHECK names it
        if station is not None:
            found.update(_elements(station))
    return found


def dismiss(host: str, station: Optional[Station]) -> None:
    """Forget a link that is gone or down. Finding nothing is fine; without a station, whatever
    stands under the link's name is looked for. A kernel without nftables has nothing to forget."""
    with _nothing_without_nftables(), _conversation() as kernel:
        if station is not None:
            try:
                kernel.commit(_SUBSYSTEM, _deleting(_elements(station)))
                return
            except KernelError as problem:
                if problem.errno != errno.ENOENT:
                    raise
        left = [one for one in _all_held(kernel) if one.host == host]
        if left:
            kernel.commit(_SUBSYSTEM, _deleting(left))


def sweep(store: Store) -> None:
    """Forget links that are gone and that no pod of the store has."""
    with _nothing_without_nftables(), _conversation() as kernel:
        _swept(store, kernel, ())


@contextmanager
def _nothing_without_nftables() -> Iterator[None]:
    try:
        yield
    except CniError as problem:
        if problem.code != KERNEL_LACKS:
            raise


def stations() -> dict[str, Station]:
    """The pods that are checked now, by the host's end; without their link-local addresses."""
    held: list[Element] = []
    with _nothing_without_nftables(), _conversation() as kernel:
        held = sorted(_all_held(kernel))
    addresses: dict[str, dict[Address, None]] = {}
    for one in held:
        if one.set in ("own4", "own6"):
            address = ip_address(one.key[24:])
            if not address.is_link_local:
                addresses.setdefault(one.host, {})[address] = None
    return {
        one.host: Station(
            one.host,
            one.key[16:22].hex(":"),
            tuple(addresses.get(one.host, ())),
            one.family != nft.BRIDGE,
        )
        for one in held
        if one.set == "stations"
    }


def _swept(store: Store, kernel: Netlink, deleted: Iterable[Owner]) -> list[str]:
    """Their names."""
    held = _all_held(kernel)
    hosts = {one.host for one in held}
    # In this order: an ADD that is at work has its allocation before its elements.
    hosts -= store.read(_hosts_of_store) - set(map(host_name, deleted))
    with Netlink() as links:
        gone = {host for host in hosts if not links.index(host)}
    if gone:
        kernel.commit(_SUBSYSTEM, _deleting(one for one in held if one.host in gone))
    return sorted(gone)


def _hosts_of_store(db: sqlite3.Connection) -> set[str]:
    query = "SELECT network, container_id, ifname FROM {}"
    return {
        host_name(Owner(*row))
        for table in ("allocation", "attachment")
        for row in db.execute(query.format(table))
    }


def repair(store: Store, deleted: Collection[Owner] = ()) -> list[str]:
    """Make the tables what the store says; what was not so. The store may still have pods that
    were deleted."""
    with _conversation() as kernel:
        wanted = store.read(lambda db: _of_store(db, deleted))
        said = []
        if any(_differs(kernel, family) for family in {one.family for one in wanted}):
            families = store.atomically(lambda db: _rebuild(kernel, db, (), deleted))
            said += [f"nft table {nft.FAMILY_NAMES[family]} {TABLE}" for family in families]
        missing = store.read(lambda db: _of_store(db, deleted)) - _all_held(kernel)
        if missing:
            ordered = sorted(missing, key=lambda one: one.set == "guarded")
            for start in range(0, len(ordered), _AT_ONCE):
                kernel.commit(_SUBSYSTEM, _adding(ordered[start : start + _AT_ONCE]))
            said += [f"{host}: was not checked" for host in sorted({one.host for one in missing})]
        said += [f"{host}: its link is gone" for host in _swept(store, kernel, deleted)]
    return said + _stop_learning(wanted)


def _stop_learning(elements: Iterable[Element]) -> list[str]:
    """Of a bridge that an earlier release has made, or that somebody has changed."""
    ports = {one.host for one in elements if one.family == nft.BRIDGE}
    learning = [
        name for name in sorted(set(map(bridge_of, ports))) if learns_from_link_local_frames(name)
    ]
    if learning:
        with Netlink() as links:
            links.do([bridge_up(name) for name in learning])
    return [f"{name}: learned MACs from link-local frames" for name in learning]


def _differs(kernel: Netlink, family: int) -> str:
    """How a table differs from what this release would write."""
    from . import guard_rules

    name = f"nft table {nft.FAMILY_NAMES[family]} {TABLE}"
    comment = nft.table_comment(kernel, family, TABLE)
    if comment is None:
        return f"{name} is missing"
    if comment != COMMENT:
        return f"{name} is not what this release would write"
    count = nft.count_rules(kernel, family, TABLE)
    wanted = guard_rules.COUNT
    return "" if count == wanted else f"{name} has {count} rules, expected {wanted}"


def differences(station: Station) -> list[str]:
    """What is missing of a pod's protection."""
    found = []
    with _conversation() as kernel:
        for family in station.families:
            wrong = _differs(kernel, family)
            if wrong:
                found.append(f"anti-spoofing: {wrong}")
                continue
            wanted = {one for one in _elements(station) if one.family == family}
            held = {one for one in _held(kernel, family) if one.host == station.host}
            for name in sorted({one.set for one in wanted ^ held}):
                found.append(
                    f"anti-spoofing: {station.host} is not in the set {name} of the nft table "
                    f"{nft.FAMILY_NAMES[family]} {TABLE} as it should be"
                )
    bridge = "" if station.routed else bridge_of(station.host)
    if learns_from_link_local_frames(bridge):
        found.append(f"anti-spoofing: {bridge} learns MACs from link-local frames")
    return found
