"""The node's one nft table: which pods are masqueraded, and which host ports lead to them.

What the table should be stands in the store; a digest of the part that rarely changes stands in
the table's comment. So an ordinary ADD asks the kernel one question and changes nothing, and a
table that is gone or that an older release made is replaced whole, in one transaction. So is one
that somebody took rules or ports out of, by the daemon, which looks at all of it now and then.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Tuple

from ..errors import PORT_TAKEN, CniError
from ..model import LeasedAddress, Network, NetworkConfig, Owner, PodRef
from ..store import Store
from . import nft

TABLE = "headcni"
# The bit that portmap uses for the same thing; Kubernetes has 0x4000 and 0x8000, Tailscale
# 0x40000 and 0x80000.
MARK = 0x2000

_Networks = Tuple[Tuple[str, str, str], ...]  # of each: pods, masqueraded and cluster, as JSON

_CHAINS = f"""
    chain guard {{
        comment "route_localnet opens 127.0.0.0/8 to neighbours; this closes it again"
        type filter hook prerouting priority raw; policy accept;
        iifname != "lo" ip daddr 127.0.0.0/8 drop
    }}
    chain ports {{
        comment "answers to these must come back through the node"
        ip saddr @pods4 meta mark set meta mark or {MARK:#x}
        ip saddr 127.0.0.0/8 meta mark set meta mark or {MARK:#x}
        ip6 saddr @pods6 meta mark set meta mark or {MARK:#x}
        dnat ip to meta l4proto . ip daddr . th dport map @ports_at4
        dnat ip to meta l4proto . th dport map @ports4
        dnat ip6 to meta l4proto . ip6 daddr . th dport map @ports_at6
        dnat ip6 to meta l4proto . th dport map @ports6
    }}
    chain prerouting {{
        type nat hook prerouting priority dstnat; policy accept;
        fib daddr type local jump ports
    }}
    chain output {{
        type nat hook output priority -100; policy accept;
        fib daddr type local jump ports
    }}
    chain postrouting {{
        type nat hook postrouting priority srcnat; policy accept;
        ct status dnat meta mark and {MARK:#x} != 0 masquerade
        ip saddr @masqueraded4 ip daddr != @cluster4 ip daddr != 224.0.0.0/4 masquerade
        ip6 saddr @masqueraded6 ip6 daddr != @cluster6 ip6 daddr != ff00::/8 masquerade
    }}
"""


_PROTOCOLS = {name: number for number, name in nft.PROTOCOLS.items()}
_RULES = sum(
    line.strip()[:1] not in ("", "}") and line.split()[0] not in ("chain", "comment", "type")
    for line in _CHAINS.splitlines()
)


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
    def element(self) -> tuple[str, str, str]:
        """The map it stands in, its key there, and where it leads."""
        kind, at = ("ports_at", f" . {self.host_ip}") if self.host_ip else ("ports", "")
        key = f"{self.protocol}{at} . {self.host_port}"
        return f"{kind}{self.family}", key, f"{self.pod_ip} . {self.pod_port}"

    @property
    def packed(self) -> nft.Element:
        """The same, as the kernel has it."""
        pack = partial(socket.inet_pton, socket.AF_INET if self.family == 4 else socket.AF_INET6)
        key = [bytes([_PROTOCOLS[self.protocol]]), self.host_port.to_bytes(2, "big")]
        if self.host_ip:
            key.insert(1, pack(self.host_ip))
        value = nft.words(pack(self.pod_ip), self.pod_port.to_bytes(2, "big"))
        return nft.Element(self.element[0], nft.words(*key), value)


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


def ensure(store: Store, network: NetworkConfig) -> None:
    """The table is there and knows this network."""
    wanted = _wanted(network)
    select = "SELECT pods, masqueraded, cluster FROM firewall WHERE network = ?"
    row, comment = store.read(
        lambda db: (db.execute(select, (network.name,)).fetchone(), _comment(db))
    )
    if row == wanted and nft.table_comment(TABLE) == comment:
        return

    def work(db: sqlite3.Connection) -> None:
        db.execute("INSERT OR REPLACE INTO firewall VALUES (?, ?, ?, ?)", (network.name, *wanted))
        _replace(db)

    store.atomically(work)


def _wanted(network: NetworkConfig) -> tuple[str, str, str]:
    """As JSON: the node's pod ranges, those that are masqueraded, and where to they never are."""
    cluster = {*network.cluster_cidrs, *network.pod_cidrs, *network.service_cidrs}
    masqueraded = network.pod_cidrs if network.ip_masq else ()
    return _texts(network.pod_cidrs), _texts(masqueraded), _texts(cluster)


def _texts(networks: Iterable[Network]) -> str:
    return json.dumps(sorted(map(str, networks)))


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
            nft.add_elements(TABLE, [port.packed for port in ports])
        except CniError:
            _replace(db)  # an element of a call that was killed stood in the way

    store.atomically(work)


def _claim(db: sqlite3.Connection, owner: Owner, pod: PodRef, port: Port) -> None:
    key = (port.family, port.protocol, port.host_ip, port.host_port)
    holder = db.execute(
        "SELECT network, container_id, ifname, pod FROM port"
        " WHERE family = ? AND protocol = ? AND host_ip = ? AND host_port = ?",
        key,
    ).fetchone()
    if holder is not None and Owner(*holder[:3]) != owner:
        raise CniError(
            PORT_TAKEN,
            f"host port {port.host_port}/{port.protocol} leads to another pod already",
            f"it is {holder[3] or holder[1]}'s; choose another hostPort, or remove that pod",
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
    key = (owner.network, owner.container_id, owner.ifname)
    if not store.read(lambda db: _ports(db, key)):
        return ()

    def work(db: sqlite3.Connection) -> tuple[Port, ...]:
        ports = _ports(db, key)
        db.execute("DELETE FROM port WHERE network = ? AND container_id = ? AND ifname = ?", key)
        if nft.table_comment(TABLE) is not None:
            _replace(db) if len(ports) > 64 else _remove(db, ports)
        return ports

    return store.atomically(work)


def _remove(db: sqlite3.Connection, ports: Sequence[Port]) -> None:
    try:
        nft.delete_elements(TABLE, [port.packed for port in ports])
    except CniError:
        _replace(db)  # somebody flushed them: make the table what the store says


def published(store: Store, owner: Owner) -> tuple[Port, ...]:
    return store.read(lambda db: _ports(db, (owner.network, owner.container_id, owner.ifname)))


def differences(store: Store, owner: Owner, rules: bool = False) -> list[str]:
    """What of the owner's part of the table is not as the store has it; with `rules` also whether
    somebody took rules out of it, which are everybody's."""
    comment = nft.table_comment(TABLE)
    if comment is None:
        return [f"nft table inet {TABLE}: missing"]
    found = []
    if comment != store.read(_comment):
        found.append(f"nft table inet {TABLE}: not what this release would write")
    ports = published(store, owner)
    held = nft.contents(TABLE) if ports or rules else nft.Contents(_RULES, {})
    if not found and held.rules != _RULES:
        found.append(f"nft table inet {TABLE}: {held.rules} rules, expected {_RULES}")
    for port in ports:
        name, key, target = port.element
        have = held.elements.get((name, key), "missing")
        if have != target:
            found.append(f"host port {port.protocol}/{port.host_port}: {have}, expected {target}")
    return found


def owners(store: Store, network: str) -> list[Owner]:
    """Who has host ports on a network."""
    rows = store.read(
        lambda db: db.execute(
            "SELECT DISTINCT network, container_id, ifname FROM port WHERE network = ?", (network,)
        ).fetchall()
    )
    return [Owner(*row) for row in rows]


def repair(store: Store) -> bool:
    """Make the table what the store says, if it is not; a node without networks needs none."""

    def work(db: sqlite3.Connection) -> bool:
        known = db.execute("SELECT 1 FROM firewall LIMIT 1").fetchone()
        if known is None or _is_whole(db):
            return False
        _replace(db)
        return True

    return not store.read(_is_whole) and store.atomically(work)


def is_whole(store: Store) -> bool:
    """Whether all of the table is as the store has it: its comment tells nothing of rules and
    elements that somebody took out."""
    return store.read(_is_whole)


def _is_whole(db: sqlite3.Connection) -> bool:
    if nft.table_comment(TABLE) != _comment(db):
        return False
    rows = db.execute("SELECT family, protocol, host_ip, host_port, pod_ip, pod_port FROM port")
    ports = [Port(*row).element for row in rows]
    return nft.contents(TABLE) == (_RULES, {(name, key): target for name, key, target in ports})


def is_current(store: Store) -> bool:
    return nft.table_comment(TABLE) == store.read(_comment)


def _ports(db: sqlite3.Connection, key: tuple[str, str, str]) -> tuple[Port, ...]:
    rows = db.execute(
        "SELECT family, protocol, host_ip, host_port, pod_ip, pod_port FROM port"
        " WHERE network = ? AND container_id = ? AND ifname = ?",
        key,
    )
    return tuple(Port(*row) for row in rows)


def _comment(db: sqlite3.Connection) -> str:
    """What the table's comment should be: a digest of all but the ports."""
    return _digest(_networks(db))


@lru_cache(maxsize=8)
def _digest(networks: _Networks) -> str:
    whole = "".join([_CHAINS, *_sets(networks)])
    return f"headcni {hashlib.sha256(whole.encode()).hexdigest()[:24]}"


def _networks(db: sqlite3.Connection) -> _Networks:
    return tuple(db.execute("SELECT pods, masqueraded, cluster FROM firewall"))


def _sets(networks: _Networks) -> Iterator[str]:
    sets: dict[str, set[str]] = {"pods": set(), "masqueraded": set(), "cluster": set()}
    for row in networks:
        for members, listed in zip(sets.values(), row):
            members.update(json.loads(listed))
    for name, members in sets.items():
        for family, kind in ((4, "ipv4_addr"), (6, "ipv6_addr")):
            chosen = sorted(n for n in members if (":" in n) == (family == 6))
            elements = f" elements = {{ {', '.join(chosen)} }};" if chosen else ""
            yield f"set {name}{family} {{ type {kind}; flags interval; auto-merge;{elements} }}\n"


def _maps(db: sqlite3.Connection) -> Iterator[str]:
    elements: dict[str, list[str]] = {}
    rows = db.execute("SELECT family, protocol, host_ip, host_port, pod_ip, pod_port FROM port")
    for row in rows:
        name, key, target = Port(*row).element
        elements.setdefault(name, []).append(f"{key} : {target}")
    for family, kind in ((4, "ipv4_addr"), (6, "ipv6_addr")):
        for name, at in ((f"ports{family}", ""), (f"ports_at{family}", f"{kind} . ")):
            inside = elements.get(name)
            body = f" elements = {{ {', '.join(inside)} }};" if inside else ""
            types = f"inet_proto . {at}inet_service : {kind} . inet_service"
            yield f"map {name} {{ type {types};{body} }}\n"


def _replace(db: sqlite3.Connection) -> None:
    nft.run(
        f"table inet {TABLE}\ndelete table inet {TABLE}\n"
        f'table inet {TABLE} {{ comment "{_comment(db)}"\n'
        f"{''.join(_sets(_networks(db)))}{''.join(_maps(db))}{_CHAINS}}}\n"
    )
