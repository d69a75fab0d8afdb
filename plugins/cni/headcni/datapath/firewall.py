"""The node's one nft table: which pods are masqueraded, which host ports lead to them, and what
they may reach of the tailnet.

What the table should be stands in the store; a digest of the part that rarely changes stands in
the table's comment. So an ordinary ADD asks the kernel one question and changes nothing, and a
table that is gone or that an older release made is replaced whole, in one transaction. So is one
that somebody took rules or ports out of, by the daemon, which looks at all of it now and then.
"""

from __future__ import annotations

import _socket as socket  # without what `socket` imports
import errno
import json
import sqlite3
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from ipaddress import ip_address, ip_network
from typing import Tuple

from ..errors import KERNEL, KERNEL_LACKS, PORT_TAKEN, CniError
from ..model import Address, LeasedAddress, Network, NetworkConfig, Owner, PodRef
from ..record import dataclass
from ..sha import sha256
from ..store import Store, attachment_states
from ..tailnet_access import FORGOTTEN, PODS, Policy
from . import netns, nft, tailnet
from .netlink import KernelError

TABLE = "headcni"
# The bit that portmap uses for the same thing; Kubernetes has 0x4000 and 0x8000, Tailscale
# 0x40000 and 0x80000.
MARK = 0x2000

NOBODY = PodRef()
# Which ranges pods need, oldest first: the network, and as JSON its pods, masqueraded and cluster.
_Needs = Tuple[Tuple[str, str], ...]

_SET_NAMES = ("pods", "masqueraded", "cluster")
_PORT_OF = "pod_"  # begins the name of the map that holds the ports for a map of addresses
_MASQUERADE = "masquerade fully-random"  # two pods that choose a port at once must not collide


def _dnat(family: str, name: str, at: str = "") -> str:
    """Look a packet's host port up. libnftables 0.9.8 (Debian 11) cannot take an address and a port
    from one map, and translates ports only in a rule that matches protocols which have ports."""
    key = f"meta l4proto . {at}th dport"
    to = f"{key} map @{name} : {key} map @{_PORT_OF}{name}"
    return f"meta l4proto {{ tcp, udp, sctp }} dnat {family} to {to}"


# Each rule has a comment, by which CHECK notices another rule in its place.
_CHAINS = f"""
    chain guard {{
        comment "route_localnet opens 127.0.0.0/8 to neighbours; this closes it again"
        type filter hook prerouting priority raw; policy accept;
        iifname != "lo" ip daddr 127.0.0.0/8 drop comment "127.0.0.0/8 from outside"
        iifname != "lo" ip saddr 127.0.0.0/8 drop comment "127.0.0.0/8 as a source"
    }}
    chain ports {{
        comment "answers to these must come back through the node"
        ip daddr != 127.0.0.1 ip daddr 127.0.0.0/8 return comment "the node's own, IPv4"
        ip6 daddr ::1 return comment "the node's own, IPv6"
        ip saddr @pods4 meta mark set meta mark or {MARK:#x} comment "from a pod, IPv4"
        ip saddr 127.0.0.0/8 meta mark set meta mark or {MARK:#x} comment "from 127.0.0.0/8"
        ip6 saddr @pods6 meta mark set meta mark or {MARK:#x} comment "from a pod, IPv6"
        {_dnat("ip", "ports_at4", "ip daddr . ")} comment "host ports of one address, IPv4"
        {_dnat("ip", "ports4")} comment "host ports, IPv4"
        {_dnat("ip6", "ports_at6", "ip6 daddr . ")} comment "host ports of one address, IPv6"
        {_dnat("ip6", "ports6")} comment "host ports, IPv6"
    }}
    chain prerouting {{
        type nat hook prerouting priority dstnat; policy accept;
        fib daddr type local jump ports comment "for the node, from others"
    }}
    chain output {{
        type nat hook output priority -100; policy accept;
        fib daddr type local jump ports comment "for the node, from itself"
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        ct status dnat meta mark and {MARK:#x} != 0 {_MASQUERADE} comment "to a host port"
        ip saddr @masqueraded4 ip daddr != @cluster4 ip daddr != 224.0.0.0/4 \
            {_MASQUERADE} comment "out of the cluster, IPv4"
        ip6 saddr @masqueraded6 ip6 daddr != @cluster6 ip6 daddr != ff00::/8 \
            {_MASQUERADE} comment "out of the cluster, IPv6"
    }}
"""


_SAMPLE_POLICY = Policy(
    "100.64.0.7:443,100.64.0.0/24,[fd7a:115c:a1e0::7]:8000-8100/tcp", (("limited", PODS),)
)
_SAMPLE_RANGES = ["192.0.2.0/24", "2001:db8::/64"]
# Owners with an address that are neither attached nor deleted.
_BEING_ADDED = """
    FROM allocation WHERE NOT EXISTS (
        SELECT 1 FROM attachment WHERE attachment.network = allocation.network
            AND attachment.container_id = allocation.container_id
            AND attachment.ifname = allocation.ifname)
    AND NOT EXISTS (
        SELECT 1 FROM tombstone WHERE tombstone.network = allocation.network
            AND tombstone.container_id = allocation.container_id
            AND tombstone.ifname = allocation.ifname)
"""
_PROTOCOLS = {name: number for number, name in nft.PROTOCOLS.items()}


@dataclass(frozen=True)
class Port:
    """A host port that leads to a pod. host_ip is "" for any address of the family."""

    family: int
    protocol: str
    host_ip: str
    host_port: int
    pod_ip: str
    pod_port: int

    @property
    def map(self) -> str:
        return f"{'ports_at' if self.host_ip else 'ports'}{self.family}"

    @property
    def elements(self) -> tuple[tuple[str, str, str], ...]:
        """Map, key and value of the address and of the port that it leads to."""
        at = f" . {self.host_ip}" if self.host_ip else ""
        key = f"{self.protocol}{at} . {self.host_port}"
        return (self.map, key, self.pod_ip), (_PORT_OF + self.map, key, str(self.pod_port))

    @property
    def packed(self) -> tuple[nft.Element, ...]:
        """The same, as the kernel has it."""
        pack = partial(socket.inet_pton, socket.AF_INET if self.family == 4 else socket.AF_INET6)
        parts = [bytes([_PROTOCOLS[self.protocol]]), self.host_port.to_bytes(2, "big")]
        if self.host_ip:
            parts.insert(1, pack(self.host_ip))
        key = nft.words(*parts)
        return (
            nft.Element(self.map, key, pack(self.pod_ip)),
            nft.Element(_PORT_OF + self.map, key, self.pod_port.to_bytes(2, "big")),
        )


def ports_of(network: NetworkConfig, leased: Sequence[LeasedAddress]) -> tuple[Port, ...]:
    """Each mapping, for each family that both the pod and the mapping's host address have."""
    found = []
    for mapping in network.port_mappings:
        for one in leased:
            host = mapping.host_ip
            if host is not None and host.version != one.address.version:
                continue
            anywhere = host is None or host.is_unspecified
            found.append(
                Port(
                    one.address.version,
                    mapping.protocol,
                    "" if anywhere else str(host),
                    mapping.host_port,
                    str(one.address),
                    mapping.container_port,
                )
            )
    return tuple(found)


def ranges_of(network: NetworkConfig, leased: Sequence[LeasedAddress]) -> dict[str, list[str]]:
    """The ranges that a pod of the network needs in the sets: the ranges of pods, those that are
    masqueraded, and the destinations for which they are not. Nothing if the pod does not need the
    table. If another IPAM does not tell its ranges, the networks of the pod's addresses count."""
    if not leased or network.delegates or not (network.ip_masq or network.port_mappings):
        return {}
    pods = network.pod_cidrs or {ip_network(one.interface, strict=False) for one in leased}
    return {
        "pods": _texts(pods),
        "masqueraded": _texts(pods if network.ip_masq else ()),
        "cluster": _texts({*network.cluster_cidrs, *pods, *network.service_cidrs}),
    }


def concerns(store: Store, network: NetworkConfig) -> bool:
    """Whether pods of the network need the table, or are limited by it."""
    used = bool(network.ip_masq or network.port_mappings)
    return used or not store.read(tailnet.policy_of).is_open


def _texts(networks: Iterable[Network]) -> list[str]:
    return sorted(map(str, networks))


def ensure(
    store: Store,
    name: str,
    ranges: Mapping[str, Sequence[str]],
    pod: PodRef = NOBODY,
    addresses: Sequence[Address] = (),
) -> None:
    """The table is there and has what a pod of the network `name` needs, and the limits of what it
    may reach."""
    needs, policy = store.read(lambda db: (_needs(db), tailnet.policy_of(db)))
    if not ranges and policy.is_open:
        return
    need = name, json.dumps(ranges, sort_keys=True)
    comment = nft.table_comment(TABLE)
    if (not ranges or _is_met(needs, need)) and comment == _digest(needs, policy):
        pods = _each(pod, addresses)
        if policy.namespaces or tailnet.members(policy, _pod_ranges(needs), pods):
            store.atomically(lambda db: _limit(db, pod, addresses))
        return

    def work(db: sqlite3.Connection) -> None:
        _settle(db)
        if ranges and not _is_met(_needs(db), need):
            _add_need(db, need)
            _write_rows(db)
        _replace(db)
        _limit(db, pod, addresses)

    store.atomically(work)
    if comment is None:  # clients may have come while the table was missing
        _forget_connections(store.read(_all_ports))


def set_policy(store: Store, policy: Policy) -> bool:
    """Apply this to all pods from now on; whether that was a change. In the store first: an ADD has
    its address before it reads the policy, so either ADD sees this policy, or this sees the pod."""
    if store.read(tailnet.policy_of) == policy:
        return False

    def work(db: sqlite3.Connection) -> None:
        tailnet.record(db, policy)
        if nft.table_comment(TABLE) is not None or _is_needed(db):
            _replace(db)

    store.atomically(work)
    return True


def adopt_policy(db: sqlite3.Connection) -> None:
    """After the store was lost: if the kernel limits pods, nobody remembers what they were allowed,
    so it is nothing until the daemon says it again."""
    limited = any(chain == "tailnet" for chain, _unused in _live().rules)
    if limited and tailnet.policy_of(db).is_open:
        tailnet.record(db, FORGOTTEN)


def _limit(db: sqlite3.Connection, pod: PodRef, addresses: Sequence[Address]) -> None:
    """Have the pod's addresses in the right sets, whoever had them before."""
    policy = tailnet.policy_of(db)
    if policy.is_open or not addresses:
        return
    wanted = tailnet.members(policy, _pod_ranges(_needs(db)), _each(pod, addresses))
    try:
        tailnet.settle(TABLE, policy, wanted, addresses)
    except KernelError:
        _replace(db)  # somebody took the sets away
        tailnet.settle(TABLE, policy, wanted, addresses)


def forget_limits(store: Store, addresses: Sequence[Address]) -> None:
    """Of a pod that cannot send any more. What stays, the daemon or the next pod with the address
    takes away."""

    def work(db: sqlite3.Connection) -> None:
        with suppress(KernelError):
            tailnet.settle(TABLE, tailnet.policy_of(db), {}, addresses)

    if addresses and not store.read(tailnet.policy_of).is_open:
        store.atomically(work)


def _limited(db: sqlite3.Connection, deleted: Collection[Owner] = ()) -> tailnet.Members:
    policy = tailnet.policy_of(db)
    if policy.is_open:
        return {}
    pods = tailnet.pods(db, f"SELECT pod, address {_BEING_ADDED}", deleted)
    return tailnet.members(policy, _pod_ranges(_needs(db)), pods)


def _each(pod: PodRef, addresses: Iterable[Address]) -> list[tuple[str, Address]]:
    return [(pod.namespace, one) for one in addresses]


@lru_cache(maxsize=8)
def _pod_ranges(needs: _Needs) -> tuple[Network, ...]:
    held = _members(needs)
    return tuple(ip_network(one) for name in ("pods4", "pods6") for one in held[name])


def _is_needed(db: sqlite3.Connection) -> bool:
    """A node without networks needs no table, unless its pods are limited."""
    return bool(_needs(db)) or not tailnet.policy_of(db).is_open


def _add_need(db: sqlite3.Connection, need: tuple[str, str]) -> None:
    db.execute(
        "INSERT OR REPLACE INTO firewall_need VALUES"
        " (?, ?, (SELECT coalesce(max(place) + 1, 0) FROM firewall_need))",
        need,
    )


@lru_cache(maxsize=64)
def _is_met(needs: _Needs, need: tuple[str, str]) -> bool:
    """Whether the sets would not change if the need were added as the newest."""
    latest = (*(one for one in needs if one != need), need)
    return need in needs and _members(latest) == _members(needs)


def _changes(db: sqlite3.Connection) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The needs that no pod has any more, and those of pods that another release has added. A
    network with an ADD at work keeps all of its needs, and so does one with pods of a release that
    did not record them. Such a release wrote what they need into its own table."""
    needs = _needs(db)
    have, live, unrecorded = set(needs), set(), set()
    for network, state in attachment_states(db):
        ranges = state.get("ranges")
        if ranges is None:
            unrecorded.add(network)
        elif ranges:
            live.add((network, json.dumps(ranges, sort_keys=True)))
    kept = _networks_at_work(db) | unrecorded
    theirs = {
        (network, text)
        for network, text in (_rows(db).items() - _rows_of(needs).items() if unrecorded else ())
        if network in unrecorded
    }
    unused = [need for need in have - live if need[0] not in kept]
    return unused, [*sorted(live - have), *sorted(theirs - have - live)]


def _networks_at_work(db: sqlite3.Connection) -> set[str]:
    return {row[0] for row in db.execute(f"SELECT DISTINCT network {_BEING_ADDED}")}


def _settle(db: sqlite3.Connection) -> bool:
    """Record what live pods need and no more; whether that was a change."""
    unused, missing = _changes(db)
    db.executemany("DELETE FROM firewall_need WHERE network = ? AND ranges = ?", unused)
    for need in missing:
        _add_need(db, need)
    if unused or missing:
        _write_rows(db)
    return bool(unused or missing)


def _rows(db: sqlite3.Connection) -> dict[str, str]:
    """What each network needs according to the table `firewall`. Releases that do not
    know `firewall_need` read it, and write it when a node is rolled back to them."""
    rows = db.execute("SELECT network, pods, masqueraded, cluster FROM firewall")
    return {
        network: json.dumps(dict(zip(_SET_NAMES, map(json.loads, ranges))), sort_keys=True)
        for network, *ranges in rows
    }


def _rows_of(needs: _Needs) -> dict[str, str]:
    """The same, as these needs make it."""
    return {
        network: json.dumps({name: sorted(ranges[name]) for name in _SET_NAMES}, sort_keys=True)
        for network, ranges in _by_network(needs).items()
    }


def _rows_differ(db: sqlite3.Connection) -> bool:
    return bool(_rows_of(_needs(db)).items() - _rows(db).items())


def _write_rows(db: sqlite3.Connection) -> None:
    """So that a node can be rolled back to a release that reads them."""
    networks = _by_network(_needs(db))
    at_work = _networks_at_work(db)  # perhaps by such a release
    unused = [(network,) for network in _rows(db) if network not in {*networks, *at_work}]
    db.executemany("DELETE FROM firewall WHERE network = ?", unused)
    for network, ranges in networks.items():
        row = (json.dumps(sorted(ranges[name])) for name in _SET_NAMES)
        db.execute("INSERT OR REPLACE INTO firewall VALUES (?, ?, ?, ?)", (network, *row))


def forget_unused(store: Store) -> None:
    """Take the ranges out that no pod needs any more."""

    def work(db: sqlite3.Connection) -> None:
        if _settle(db):
            _replace(db)

    store.atomically(work)


def publish(store: Store, owner: Owner, pod: PodRef, ports: Sequence[Port]) -> None:
    """Lead the ports to the pod, all of them or none. In the store first, then in the kernel, in
    one transaction of the store: two pods cannot have one port, and a failure leaves no trace."""
    if not ports:
        return

    def work(db: sqlite3.Connection) -> None:
        for port in ports:
            _claim(db, owner, pod, port)
        if nft.table_comment(TABLE) != _comment(db):
            _replace(db)
            return
        try:
            nft.add_elements(TABLE, [one for port in ports for one in port.packed])
        except CniError:
            _replace(db)  # an element of a call that was killed stood in the way

    store.atomically(work)
    _forget_connections(ports)


def _forget_connections(ports: Iterable[Port]) -> None:
    """Have clients led anew: those of TCP are by themselves, so most pods cost nothing."""
    lasting = [port for port in ports if port.protocol != "tcp"]
    if not lasting:
        return
    from . import conntrack  # rarely needed

    conntrack.forget_ports(
        [
            conntrack.HostPort(
                _PROTOCOLS[port.protocol],
                ip_address(port.host_ip) if port.host_ip else None,
                port.host_port,
                ip_address(port.pod_ip),
                port.pod_port,
            )
            for port in lasting
        ]
    )


def _claim(db: sqlite3.Connection, owner: Owner, pod: PodRef, port: Port) -> None:
    key = (port.family, port.protocol, port.host_ip, port.host_port)
    holder = db.execute(
        "SELECT network, container_id, ifname, pod FROM port"
        " WHERE family = ? AND protocol = ? AND host_ip = ? AND host_port = ?",
        key,
    ).fetchone()
    if holder is not None and Owner(*holder[:3]) != owner:
        same = (
            pod.namespace == holder[3].partition("/")[0]
        )  # who else's it is, is not theirs to know
        whose = f"it is {holder[3] or holder[1]}'s; " if same else ""
        raise CniError(
            PORT_TAKEN,
            f"host port {port.host_port}/{port.protocol} leads to another pod already",
            f"{whose}choose another hostPort, or remove that pod; see: headcnictl pods",
        )
    db.execute(
        "INSERT OR REPLACE INTO port VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *key,
            port.pod_ip,
            port.pod_port,
            owner.network,
            owner.container_id,
            owner.ifname,
            str(pod),
        ),
    )


def withdraw(store: Store, owner: Owner) -> tuple[Port, ...]:
    """Take the owner's ports away; most pods have none, and then nothing is written."""
    key = _key(owner)
    if not store.read(lambda db: _ports(db, key)):
        return ()

    def work(db: sqlite3.Connection) -> tuple[Port, ...]:
        ports = _ports(db, key)
        db.execute("DELETE FROM port WHERE network = ? AND container_id = ? AND ifname = ?", key)
        if nft.table_comment(TABLE) is not None:
            _replace(db) if len(ports) > 64 else _remove(db, ports)
        return ports

    withdrawn = store.atomically(work)
    _forget_connections(withdrawn)
    return withdrawn


def withdraw_leftovers(store: Store, addresses: Container[Address]) -> None:
    """Take away ports that lead to these addresses without being in the store: an ADD that was
    killed before its commit, or whose commit failed, has left them. Before the addresses are free,
    and under the store's lock, as all changes of the table."""
    store.atomically(lambda _unused: withdraw_from_kernel(addresses))


def withdraw_from_kernel(addresses: Container[Address]) -> None:
    """Take the ports that lead to these addresses out of the kernel, whatever the store says; each
    by itself, as whoever else changes the table may have been quicker."""
    found = [port for port in live_ports() if ip_address(port.pod_ip) in addresses]
    for port in found:
        try:
            nft.delete_elements(TABLE, port.packed)
        except KernelError as problem:
            if problem.errno != errno.ENOENT:
                raise
    _forget_connections(found)


def _live() -> nft.Contents:
    """What the table holds now; to be read before anything replaces it."""
    try:
        if nft.table_comment(TABLE) is None:
            return nft.NOTHING
    except CniError:
        return nft.NOTHING  # the kernel has no nftables
    held = nft.contents(TABLE)
    if not held.sets:
        raise CniError(
            KERNEL,
            f"the nft table inet {TABLE} cannot be read",
            f"see: nft list table inet {TABLE}",
        )
    return held


def live_ports() -> list[Port]:
    """The ports that the kernel has, whoever they belong to."""
    elements, found = _live().elements, []
    for (name, key), pod_ip in elements.items():
        pod_port = elements.get((_PORT_OF + name, key))
        if pod_port is not None:
            protocol, *at, port = key.split(" . ")
            host_ip = at[0] if at else ""
            found.append(Port(int(name[-1]), protocol, host_ip, int(port), pod_ip, int(pod_port)))
    return found


def live_ranges() -> dict[str, list[str]]:
    """What the sets hold now, in the form of `ranges_of`."""
    held = _live().sets
    return {
        name: [one for family in (4, 6) for one in held.get(f"{name}{family}", ())]
        for name in ("pods", "masqueraded", "cluster")
    }


def adopt(db: sqlite3.Connection, owner: Owner, pod: str, port: Port) -> None:
    """Take a port that the kernel has as the owner's, unless it is somebody's."""
    db.execute(
        "INSERT OR IGNORE INTO port VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(port.family, port.protocol, port.host_ip, port.host_port),
            *(port.pod_ip, port.pod_port, *_key(owner), pod),
        ),
    )


def adopt_ranges(db: sqlite3.Connection, network: str, ranges: Mapping[str, Sequence[str]]) -> None:
    """Keep them for pods that were found running."""
    if any(ranges.values()):
        _add_need(db, (network, json.dumps(ranges, sort_keys=True)))
        _write_rows(db)


def _remove(db: sqlite3.Connection, ports: Sequence[Port]) -> None:
    try:
        nft.delete_elements(TABLE, [one for port in ports for one in port.packed])
    except CniError:
        _replace(db)  # somebody flushed them: make the table what the store says


def published(store: Store, owner: Owner) -> tuple[Port, ...]:
    return store.read(lambda db: _ports(db, _key(owner)))


def differences(store: Store, owner: Owner, shared: bool = False) -> list[str]:
    """What of the owner's part of the table is not as the store has it; with `shared` also what
    somebody changed in the rules and sets that all pods share."""
    comment = nft.table_comment(TABLE)
    if comment is None:
        return [f"nft table inet {TABLE}: missing"]
    needs, policy, ports, known, limited = store.read(
        lambda db: (
            *(_needs(db), tailnet.policy_of(db), _ports(db, _key(owner)), store.attachment(owner)),
            _limited(db) if shared else {},
        )
    )
    found = []
    if comment != _digest(needs, policy):
        found.append(f"nft table inet {TABLE}: not what this release would write")
    found += _missing_ranges(needs, known.state.get("ranges") if known is not None else None)
    held = nft.contents(TABLE) if ports or shared else nft.NOTHING
    if shared and not found:
        found += _shared_differences(held, _contents(needs, policy, (), limited))
    for port in ports:
        have = [held.elements.get((name, key), "missing") for name, key, _unused in port.elements]
        expected = [value for _unused, _unused, value in port.elements]
        if have != expected:
            found.append(
                f"host port {port.protocol}/{port.host_port}: {':'.join(have)}, "
                f"expected {':'.join(expected)}"
            )
    return found


def _missing_ranges(needs: _Needs, ranges: Mapping[str, Sequence[str]] | None) -> Iterator[str]:
    """What the pod needs and the store does not know of. Whether a range is masqueraded, a newer
    pod of the network may have decided otherwise."""
    recorded: dict[str, set[str]] = {}
    for _unused, text in needs:
        for name, members in json.loads(text).items():
            recorded.setdefault(name, set()).update(members)
    for name, members in (ranges or {}).items():
        missing = sorted(set(members) - recorded.get(name, set()))
        if missing:
            yield f"nft set {name}: the pod needs {', '.join(missing)}, which nobody recorded"


def _shared_differences(held: nft.Contents, wanted: nft.Contents) -> Iterator[str]:
    if held.rules != wanted.rules:
        missing = [rule[1] for rule in wanted.rules if rule not in held.rules]
        what = f"lacks the rules {', '.join(missing)}" if missing else "its rules were changed"
        yield f"nft table inet {TABLE}: {what}"
    for name, expected in wanted.sets.items():
        have = held.sets.get(name, ())
        if have != expected:
            shown, right = (", ".join(one) or "nothing" for one in (have, expected))
            yield f"nft set {name}: holds {shown}, expected {right}"


def owners(store: Store, network: str) -> list[Owner]:
    """Who has host ports on a network."""
    rows = store.read(
        lambda db: db.execute(
            "SELECT DISTINCT network, container_id, ifname FROM port WHERE network = ?", (network,)
        ).fetchall()
    )
    return [Owner(*row) for row in rows]


def repair(store: Store, deleted: Collection[Owner] = ()) -> bool:
    """Make the table what live pods need, if it is not; a node without networks needs none. The
    store may still have ports of pods that were deleted."""

    def differs(db: sqlite3.Connection) -> bool:
        return any(_changes(db)) or (_is_needed(db) and not _is_whole(db, deleted))

    def work(db: sqlite3.Connection) -> bool:
        if not differs(db):
            return False
        _replace(db, deleted)
        return True

    repaired = store.read(differs) and store.atomically(work)
    if store.read(_rows_differ):
        store.atomically(_write_rows)
    if repaired:  # clients may have come while the rules were missing
        _forget_connections(store.read(lambda db: _all_ports(db, deleted)))
    return repaired


def is_whole(store: Store) -> bool:
    """Whether all of the table is as the store has it: its comment tells nothing of rules and
    elements that somebody took out."""
    return store.read(_is_whole)


def _is_whole(db: sqlite3.Connection, deleted: Collection[Owner] = ()) -> bool:
    if nft.table_comment(TABLE) != _comment(db):
        return False
    wanted = _needs(db), tailnet.policy_of(db), _all_ports(db, deleted), _limited(db, deleted)
    return nft.contents(TABLE) == _contents(*wanted)


def _contents(
    needs: _Needs, policy: Policy, ports: Iterable[Port], limited: tailnet.Members
) -> nft.Contents:
    """What the table should hold."""
    elements = {(name, key): value for port in ports for name, key, value in port.elements}
    sets = _ranges(needs)
    if not policy.is_open:
        sets.update(
            (name, nft.ranges(map(str, limited.get(name, ()))))
            for name in tailnet.set_names(policy)
        )
    return nft.Contents(_rules(_chains(policy)), sets, elements)


def _chains(policy: Policy) -> str:
    if policy.is_open:
        return _CHAINS
    return _CHAINS + tailnet.chains(policy)


@lru_cache(maxsize=2)
def _rules(chains: str) -> tuple[tuple[str, str], ...]:
    """The chain and the comment of each rule, in order."""
    import re

    found, chain = [], ""
    for name, comment in re.findall(r"chain (\w+)|\S.* comment \"(.*)\"$", chains, re.MULTILINE):
        chain = name or chain
        if comment:
            found.append((chain, comment))
    return tuple(found)


def is_current(store: Store) -> bool:
    return nft.table_comment(TABLE) == store.read(_comment)


def _key(owner: Owner) -> tuple[str, str, str]:
    return owner.network, owner.container_id, owner.ifname


def _ports(db: sqlite3.Connection, key: tuple[str, str, str]) -> tuple[Port, ...]:
    rows = db.execute(
        "SELECT family, protocol, host_ip, host_port, pod_ip, pod_port FROM port"
        " WHERE network = ? AND container_id = ? AND ifname = ?",
        key,
    )
    return tuple(Port(*row) for row in rows)


def _all_ports(db: sqlite3.Connection, without: Collection[Owner] = ()) -> list[Port]:
    rows = db.execute(
        "SELECT family, protocol, host_ip, host_port, pod_ip, pod_port,"
        " network, container_id, ifname FROM port"
    )
    return [Port(*row[:6]) for row in rows if not without or Owner(*row[6:]) not in without]


def _comment(db: sqlite3.Connection) -> str:
    """What the table's comment should be: a digest of all but the ports and the limited pods."""
    return _digest(_needs(db), tailnet.policy_of(db))


@lru_cache(maxsize=8)
def _digest(needs: _Needs, policy: Policy) -> str:
    whole = "".join([_chains(policy), *_sets(needs)])
    return f"headcni {sha256(whole.encode()).hexdigest()[:24]}"


def _needs(db: sqlite3.Connection) -> _Needs:
    return tuple(db.execute("SELECT network, ranges FROM firewall_need ORDER BY place"))


def _sets(needs: _Needs) -> Iterator[str]:
    for name, members in _members(needs).items():
        kind = "ipv6_addr" if name.endswith("6") else "ipv4_addr"
        elements = f" elements = {{ {', '.join(members)} }};" if members else ""
        yield f"set {name} {{ type {kind}; flags interval; auto-merge;{elements} }}\n"


def _members(needs: _Needs) -> dict[str, list[str]]:
    """What each set holds: all that live pods need."""
    networks = _by_network(needs).values()
    sets = {name: set[str]().union(*(one[name] for one in networks)) for name in _SET_NAMES}
    return {
        f"{name}{family}": sorted(one for one in members if (":" in one) == (family == 6))
        for name, members in sets.items()
        for family in (4, 6)
    }


def _by_network(needs: _Needs) -> dict[str, dict[str, set[str]]]:
    """What the pods of each network need together. Whether a range is masqueraded, the newest pod
    of a network decides for all of them."""
    networks: dict[str, dict[str, set[str]]] = {}
    for network, text in needs:
        ranges = json.loads(text)
        together = networks.setdefault(network, {name: set() for name in _SET_NAMES})
        together["masqueraded"].difference_update(ranges["pods"])
        for name, members in together.items():
            members.update(ranges[name])
    return networks


def _ranges(needs: _Needs) -> dict[str, tuple[str, ...]]:
    """The same as the kernel lists it."""
    return {name: nft.ranges(members) for name, members in _members(needs).items()}


def _maps(ports: Iterable[Port]) -> Iterator[str]:
    elements: dict[str, list[str]] = {}
    for port in ports:
        for name, key, value in port.elements:
            elements.setdefault(name, []).append(f"{key} : {value}")
    for family, kind in ((4, "ipv4_addr"), (6, "ipv6_addr")):
        for name, at in ((f"ports{family}", ""), (f"ports_at{family}", f"{kind} . ")):
            for filled, leads_to in ((name, kind), (_PORT_OF + name, "inet_service")):
                inside = elements.get(filled)
                body = f" elements = {{ {', '.join(inside)} }};" if inside else ""
                types = f"inet_proto . {at}inet_service : {leads_to}"
                yield f"map {filled} {{ type {types};{body} }}\n"


def _replace(db: sqlite3.Connection, deleted: Collection[Owner] = ()) -> None:
    _settle(db)  # another release may have added pods since
    _write(db, deleted)


def _write(db: sqlite3.Connection, deleted: Collection[Owner] = ()) -> None:
    ports, limited = _all_ports(db, deleted), _limited(db, deleted)
    nft.run(_ruleset(_needs(db), tailnet.policy_of(db), ports, limited))


def _ruleset(
    needs: _Needs,
    policy: Policy,
    ports: Iterable[Port],
    limited: tailnet.Members,
) -> str:
    sets = "".join(_sets(needs))
    if not policy.is_open:
        sets += "".join(tailnet.sets(policy, limited))
    return (
        f"table inet {TABLE}\ndelete table inet {TABLE}\n"
        f'table inet {TABLE} {{ comment "{_digest(needs, policy)}"\n'
        f"{sets}{''.join(_maps(ports))}{_chains(policy)}}}\n"
    )


@lru_cache(maxsize=1)
def try_out() -> None:
    """Whether this node takes the complete ruleset, with something in every set and map, and lists
    it as it was written: in a network namespace of its own, so that nothing of it stays. Success
    is remembered; otherwise a CniError says what was refused."""
    ranges = json.dumps(dict.fromkeys(("pods", "masqueraded", "cluster"), _SAMPLE_RANGES))
    needs = (("sample", ranges),)
    ports = [
        Port(family, protocol, host_ip, 8080, pod_ip, 80)
        for family, own, pod_ip in (
            (4, "192.0.2.1", "192.0.2.2"),
            (6, "2001:db8::1", "2001:db8::2"),
        )
        for protocol in _PROTOCOLS
        for host_ip in ("", own)
    ]

    pods = [("limited", ip_address(pod_ip)) for pod_ip in ("192.0.2.2", "2001:db8::2")]
    limited = tailnet.members(_SAMPLE_POLICY, _pod_ranges(needs), pods)

    def write() -> bool:
        nft.run_here(_ruleset(needs, _SAMPLE_POLICY, ports, limited))
        same = nft.contents_here(TABLE) == _contents(needs, _SAMPLE_POLICY, ports, limited)
        comment = nft.table_comment(TABLE, here_only=True)
        return same and comment == _digest(needs, _SAMPLE_POLICY)

    try:
        same = netns.apart(write)
    except (CniError, OSError) as problem:
        raise CniError(
            KERNEL_LACKS,
            "this node's nftables refuses the rules that pods need",
            f"{problem}; expected libnftables 0.9.8 or newer and Linux 5.10 or newer",
        ) from problem
    if not same:
        raise CniError(
            KERNEL_LACKS,
            "this node's nftables lists other rules than were written",
            "expected libnftables 0.9.8 or newer and Linux 5.10 or newer",
        )
