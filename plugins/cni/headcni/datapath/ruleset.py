"""The node's nft table: what the store says it should contain, as text and as the kernel lists it.

A digest of the part that rarely changes is the table's comment.
"""

from __future__ import annotations

import _socket as socket  # without what `socket` imports
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache, partial

from ..errors import KERNEL, CniError
from ..model import Address, Owner, PodRef
from ..record import TYPE_CHECKING, dataclass
from ..sha import sha256
from ..store import owner_key
from ..tailnet_access import Policy
from . import nft, pod_ranges, tailnet
from .pod_ranges import Needs

if TYPE_CHECKING:
    import sqlite3

TABLE = "headcni"
# portmap uses the same bit for the same purpose. Kubernetes uses 0x4000 and 0x8000, Tailscale
# 0x40000 and 0x80000.
MARK = 0x2000
PORT_OF = "pod_"  # prefix of the map with the ports that belong to a map with addresses
_MASQUERADE = "masquerade fully-random"  # two pods may choose the same port at once


def _dnat(family: str, name: str, at: str = "") -> str:
    """Find the pod of a host port. libnftables 0.9.8 (Debian 11) cannot get an address and a port
    from one map, and translates ports only in a rule that matches protocols with ports."""
    key = f"meta l4proto . {at}th dport"
    to = f"{key} map @{name} : {key} map @{PORT_OF}{name}"
    return f"meta l4proto {{ tcp, udp, sctp }} dnat {family} to {to}"


# CHECK recognises a rule by its comment.
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
PROTOCOLS = {name: number for number, name in nft.PROTOCOLS.items()}


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
        """Map, key and value: of the pod's address, and of its port."""
        at = f" . {self.host_ip}" if self.host_ip else ""
        key = f"{self.protocol}{at} . {self.host_port}"
        return (self.map, key, self.pod_ip), (PORT_OF + self.map, key, str(self.pod_port))

    @property
    def packed(self) -> tuple[nft.Element, ...]:
        """The same in the kernel's format."""
        pack = partial(socket.inet_pton, socket.AF_INET if self.family == 4 else socket.AF_INET6)
        parts = [bytes([PROTOCOLS[self.protocol]]), self.host_port.to_bytes(2, "big")]
        if self.host_ip:
            parts.insert(1, pack(self.host_ip))
        key = nft.words(*parts)
        return (
            nft.Element(self.map, key, pack(self.pod_ip)),
            nft.Element(PORT_OF + self.map, key, self.pod_port.to_bytes(2, "big")),
        )


def contents(
    needs: Needs, policy: Policy, ports: Iterable[Port], limited: tailnet.Members
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


@lru_cache(maxsize=8)
def digest(needs: Needs, policy: Policy) -> str:
    whole = "".join([_chains(policy), *_sets(needs)])
    return f"headcni {sha256(whole.encode()).hexdigest()[:24]}"


def _sets(needs: Needs) -> Iterator[str]:
    for name, members in pod_ranges.members(needs).items():
        kind = "ipv6_addr" if name.endswith("6") else "ipv4_addr"
        elements = f" elements = {{ {', '.join(members)} }};" if members else ""
        yield f"set {name} {{ type {kind}; flags interval; auto-merge;{elements} }}\n"


def _ranges(needs: Needs) -> dict[str, tuple[str, ...]]:
    """The members of each set as the kernel lists them."""
    return {name: nft.ranges(members) for name, members in pod_ranges.members(needs).items()}


def _maps(ports: Iterable[Port]) -> Iterator[str]:
    elements: dict[str, list[str]] = {}
    for port in ports:
        for name, key, value in port.elements:
            elements.setdefault(name, []).append(f"{key} : {value}")
    for family, kind in ((4, "ipv4_addr"), (6, "ipv6_addr")):
        for name, at in ((f"ports{family}", ""), (f"ports_at{family}", f"{kind} . ")):
            for filled, leads_to in ((name, kind), (PORT_OF + name, "inet_service")):
                inside = elements.get(filled)
                body = f" elements = {{ {', '.join(inside)} }};" if inside else ""
                types = f"inet_proto . {at}inet_service : {leads_to}"
                yield f"map {filled} {{ type {types};{body} }}\n"


def text(
    needs: Needs,
    policy: Policy,
    ports: Iterable[Port],
    limited: tailnet.Members,
) -> str:
    sets = "".join(_sets(needs))
    if not policy.is_open:
        sets += "".join(tailnet.sets(policy, limited))
    return (
        f"table inet {TABLE}\ndelete table inet {TABLE}\n"
        f'table inet {TABLE} {{ comment "{digest(needs, policy)}"\n'
        f"{sets}{''.join(_maps(ports))}{_chains(policy)}}}\n"
    )


def comment_of(db: sqlite3.Connection) -> str:
    """The table's comment: a digest of everything except the ports and the limited pods."""
    return digest(pod_ranges.needs_of(db), tailnet.policy_of(db))


def ports_of_owner(db: sqlite3.Connection, owner: Owner) -> tuple[Port, ...]:
    rows = db.execute(
        "SELECT family, protocol, host_ip, host_port, pod_ip, pod_port FROM port"
        " WHERE network = ? AND container_id = ? AND ifname = ?",
        owner_key(owner),
    )
    return tuple(Port(*row) for row in rows)


def all_ports(db: sqlite3.Connection, without: Collection[Owner] = ()) -> list[Port]:
    rows = db.execute(
        "SELECT family, protocol, host_ip, host_port, pod_ip, pod_port,"
        " network, container_id, ifname FROM port"
    )
    return [Port(*row[:6]) for row in rows if not without or Owner(*row[6:]) not in without]


def limited_pods(db: sqlite3.Connection, deleted: Collection[Owner] = ()) -> tailnet.Members:
    policy = tailnet.policy_of(db)
    if policy.is_open:
        return {}
    pods = tailnet.pods(db, f"SELECT pod, address {pod_ranges.BEING_ADDED}", deleted)
    return tailnet.members(policy, pod_ranges.ranges_of_pods(pod_ranges.needs_of(db)), pods)


def each_with_namespace(pod: PodRef, addresses: Iterable[Address]) -> list[tuple[str, Address]]:
    return [(pod.namespace, one) for one in addresses]


def is_needed(db: sqlite3.Connection) -> bool:
    """A node without networks needs no table, unless its pods are limited."""
    return bool(pod_ranges.needs_of(db)) or not tailnet.policy_of(db).is_open


def replace(db: sqlite3.Connection, deleted: Collection[Owner] = ()) -> None:
    pod_ranges.settle(db)  # another release may have added pods since
    write(db, deleted)


def write(db: sqlite3.Connection, deleted: Collection[Owner] = ()) -> None:
    ports, limited = all_ports(db, deleted), limited_pods(db, deleted)
    nft.run(text(pod_ranges.needs_of(db), tailnet.policy_of(db), ports, limited))


def live() -> nft.Contents:
    """The present content of the table. Read it before the table is replaced."""
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


def live_ranges() -> dict[str, list[str]]:
    """The present members of the sets, in the form of `pod_ranges.ranges_of`."""
    held = live().sets
    return {
        name: [one for family in (4, 6) for one in nft.networks(held.get(f"{name}{family}", ()))]
        for name in ("pods", "masqueraded", "cluster")
    }
