"""The part of the node's nft table that limits what pods reach of the tailnet.

It is there only while somebody is limited. A pod is known by its address, which anti-spoofing keeps
honest. The node's value applies to all ranges of pods. Pods of namespaces that differ, and those
whose network has no range in the table, are elements of the set of what they may reach.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from ipaddress import collapse_addresses, ip_address, ip_interface, ip_network

from .. import light_json as json
from ..model import Address, Network, Owner
from ..record import TYPE_CHECKING
from ..sha import sha256
from ..shared.modes import LINKS
from ..tailnet_access import (
    ALL,
    OPEN,
    PODS,
    RANGES,
    Destination,
    Policy,
    destinations,
    from_text,
)
from . import nft_messages
from .netlink import Request, netfilter

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping
    from typing import Any, Tuple, TypeAlias

# The set of an access, and the addresses in it.
Members: TypeAlias = "Mapping[str, Tuple[Address, ...]]"

_KEPT_AS = "tailnet_access"  # the key of the store's table `meta`
_KINDS = {4: "ipv4_addr", 6: "ipv6_addr"}
_FAMILIES = {4: "ip", 6: "ip6"}
_SUBSYSTEM = 10  # nf_tables


def _name(access: str) -> str:
    """Of an access's chain, and the beginning of its sets' names."""
    which = access if access in (ALL, PODS) else sha256(access.encode()).hexdigest()[:8]
    return f"tailnet_{which}"


def _set_name(access: str, version: int) -> str:
    return f"{_name(access)}_{version}"


def set_names(policy: Policy) -> list[str]:
    return [_set_name(access, version) for access in _with_sets(policy) for version in (4, 6)]


def _with_sets(policy: Policy) -> list[str]:
    """The node's value comes last: its rules apply to all pods."""
    found = [access for access in policy.accesses if access != policy.node]
    return found if policy.node == ALL else [*found, policy.node]


def policy_of(db: sqlite3.Connection) -> Policy:
    """Who may reach what, by the store."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (_KEPT_AS,)).fetchone()
    return from_text(row[0]) if row is not None else OPEN


def record(db: sqlite3.Connection, policy: Policy) -> None:
    db.execute("DELETE FROM meta WHERE key = ?", (_KEPT_AS,))
    if not policy.is_open:
        db.execute("INSERT INTO meta VALUES (?, ?)", (_KEPT_AS, policy.as_text()))


def members(
    policy: Policy, ranges: Sequence[Network], pods: Iterable[tuple[str, Address]]
) -> Members:
    """Who is in which set, of pods by their namespace; `ranges` are those that the table has."""
    found: dict[str, set[Address]] = {}
    differing = dict(policy.namespaces)
    for namespace, address in () if policy.is_open else pods:
        in_range = any(address.version == one.version and address in one for one in ranges)
        access = differing.get(namespace, policy.node)
        if access != policy.node or not (in_range or access == ALL):
            found.setdefault(_set_name(access, address.version), set()).add(address)
    return {name: tuple(sorted(those, key=int)) for name, those in found.items()}


def pods(
    db: sqlite3.Connection, being_added: str, deleted: Collection[Owner]
) -> Iterator[tuple[str, Address]]:
    """The namespace and an address of each pod, and of those whose ADD is at work."""
    rows = db.execute("SELECT network, container_id, ifname, pod_namespace, result FROM attachment")
    for network, container_id, ifname, namespace, result in rows:
        if Owner(network, container_id, ifname) in deleted:
            continue
        with suppress(ValueError, TypeError, KeyError, AttributeError):  # CHECK names the damage
            for ip in json.loads(result).get("ips", ()):
                yield namespace, ip_interface(ip["address"]).ip
    for pod, address in db.execute(being_added):
        yield pod.partition("/")[0], ip_address(address)


def sets(policy: Policy, members: Members) -> Iterator[str]:
    for name in set_names(policy):
        addresses = ", ".join(map(str, members.get(name, ())))
        elements = f" elements = {{ {addresses} }};" if addresses else ""
        yield f"set {name} {{ type {_KINDS[int(name[-1])]};{elements} }}\n"


def chains(policy: Policy) -> str:
    """Each packet that a pod sends is judged, not only the first of a connection: a limit that is
    set later ends what it does not allow. Answers to whoever has called the pod always pass."""
    if policy.is_open:
        return ""
    links = ", ".join(f'"{name}"' for name in sorted({*LINKS.values(), *policy.links}))
    limited = [access for access in policy.accesses if access != ALL]
    judged = "\n".join(f"        {line}" for line in _judged(policy))
    return f"""
    {"".join(map(_chain, limited)).strip()}
    chain from_pods {{
        ct direction reply return comment "answers"
{_mesh(policy)}
{judged}
    }}
    chain tailnet {{
        comment "what pods reach of the tailnet"
        type filter hook forward priority 0; policy accept;
        oifname {{ {links} }} goto from_pods comment "by an interface of the tailnet"
        ip daddr {RANGES[4]} goto from_pods comment "to the tailnet, IPv4"
        ip6 daddr {RANGES[6]} goto from_pods comment "to the tailnet, IPv6"
    }}
"""


def _mesh(policy: Policy) -> str:
    """Pods and services of the mesh are always reached. As long as the daemon has not said where
    they are, they are what networks of this node say, but for the tailnet itself."""
    lines = []
    for version, family in _FAMILIES.items():
        known: Any = [one for one in map(ip_network, policy.mesh) if one.version == version]
        ranges = list(map(str, collapse_addresses(known)))
        where = f"{family} daddr {{ {', '.join(ranges)} }}"
        if not policy.mesh:
            where = f"{family} daddr != {RANGES[version]} {family} daddr @cluster{version}"
        if ranges or not policy.mesh:
            lines.append(f'        {where} return comment "pods of the mesh, IPv{version}"')
    return "\n".join(lines)


def _judged(policy: Policy) -> Iterator[str]:
    for access in _with_sets(policy):
        verdict = "return" if access == ALL else f"goto {_name(access)}"
        for version, family in _FAMILIES.items():
            name = _set_name(access, version)
            yield f'{family} saddr @{name} {verdict} comment "{name}"'
    if policy.node != ALL:
        for version, family in _FAMILIES.items():
            goes = f"goto {_name(policy.node)}"
            yield f'{family} saddr @pods{version} {goes} comment "all pods, IPv{version}"'


def _chain(access: str) -> str:
    allowed = [f'        {_match(one)} accept comment "{one}"\n' for one in destinations(access)]
    return f"""    chain {_name(access)} {{
{"".join(allowed)}        counter drop comment "nothing else of the tailnet"
    }}
"""


def _match(one: Destination) -> str:
    version = one.network.version
    where = f"{_FAMILIES[version]} daddr {one.network}"
    if not one.network.prefixlen:
        where = f"meta nfproto ipv{version}"
    if not one.first:
        return where
    protocols = one.protocol or "{ tcp, udp, sctp }"
    span = str(one.first) if one.first == one.last else f"{one.first}-{one.last}"
    return f"{where} meta l4proto {protocols} th dport {span}"


def settle(table: str, policy: Policy, wanted: Members, addresses: Iterable[Address]) -> None:
    """Have the addresses in these sets and in no other: one that somebody left behind is added and
    deleted in one transaction, so that it need not be known."""
    requests: list[Request] = []
    for address in addresses:
        key = [address.packed]
        for name in set_names(policy):
            if int(name[-1]) != address.version:
                continue
            requests += nft_messages.new_elements(table, name, key)
            if address not in wanted.get(name, ()):
                requests += nft_messages.delete_elements(table, name, key)
    if requests:
        with netfilter() as kernel:
            kernel.commit(_SUBSYSTEM, requests)
