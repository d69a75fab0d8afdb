"""The ranges that live pods need in the sets of the nft table, as the store records them.

A network has several needs if its configuration has changed, or if pods have ranges of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from ipaddress import ip_network

from .. import light_json as json
from ..model import LeasedAddress, Network, NetworkConfig
from ..record import TYPE_CHECKING
from ..store import attachment_states
from . import nft

if TYPE_CHECKING:
    import sqlite3
    from typing import Tuple, TypeAlias

# Oldest first: the network, and as JSON the ranges of its sets (pods, masqueraded and cluster).
Needs: TypeAlias = "Tuple[Tuple[str, str], ...]"

_SET_NAMES = ("pods", "masqueraded", "cluster")
# Owners that have an address, but neither an attachment nor a tombstone.
BEING_ADDED = """
    FROM allocation WHERE NOT EXISTS (
        SELECT 1 FROM attachment WHERE attachment.network = allocation.network
            AND attachment.container_id = allocation.container_id
            AND attachment.ifname = allocation.ifname)
    AND NOT EXISTS (
        SELECT 1 FROM tombstone WHERE tombstone.network = allocation.network
            AND tombstone.container_id = allocation.container_id
            AND tombstone.ifname = allocation.ifname)
"""


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


def needs_of(db: sqlite3.Connection) -> Needs:
    return tuple(db.execute("SELECT network, ranges FROM firewall_need ORDER BY place"))


def add(db: sqlite3.Connection, need: tuple[str, str]) -> None:
    db.execute(
        "INSERT OR REPLACE INTO firewall_need VALUES"
        " (?, ?, (SELECT coalesce(max(place) + 1, 0) FROM firewall_need))",
        need,
    )


@lru_cache(maxsize=64)
def is_met(needs: Needs, need: tuple[str, str]) -> bool:
    """Whether the sets would stay the same if the need were added as the newest."""
    latest = (*(one for one in needs if one != need), need)
    return need in needs and members(latest) == members(needs)


def changes(db: sqlite3.Connection) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The needs that no pod has any more, and the missing needs of pods that another release has
    added. A network keeps all of its needs while an ADD is in progress, or while it has pods of a
    release that did not record needs. Such a release wrote them into the table `firewall`."""
    needs = needs_of(db)
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
    return {row[0] for row in db.execute(f"SELECT DISTINCT network {BEING_ADDED}")}


def settle(db: sqlite3.Connection) -> bool:
    """Record exactly what live pods need; whether that was a change."""
    unused, missing = changes(db)
    db.executemany("DELETE FROM firewall_need WHERE network = ? AND ranges = ?", unused)
    for need in missing:
        add(db, need)
    if unused or missing:
        write_rows(db)
    return bool(unused or missing)


def _rows(db: sqlite3.Connection) -> dict[str, str]:
    """What each network needs according to the table `firewall`. Releases that do not know
    `firewall_need` read it, and write it when a node is rolled back to them."""
    rows = db.execute("SELECT network, pods, masqueraded, cluster FROM firewall")
    return {
        network: json.dumps(dict(zip(_SET_NAMES, map(json.loads, ranges))), sort_keys=True)
        for network, *ranges in rows
    }


def _rows_of(needs: Needs) -> dict[str, str]:
    """The same according to the needs."""
    return {
        network: json.dumps({name: sorted(ranges[name]) for name in _SET_NAMES}, sort_keys=True)
        for network, ranges in _by_network(needs).items()
    }


def rows_differ(db: sqlite3.Connection) -> bool:
    return bool(_rows_of(needs_of(db)).items() - _rows(db).items())


def write_rows(db: sqlite3.Connection) -> None:
    """For a rollback of the node to a release that reads the table `firewall`."""
    networks = _by_network(needs_of(db))
    at_work = _networks_at_work(db)  # perhaps by such a release
    unused = [(network,) for network in _rows(db) if network not in {*networks, *at_work}]
    db.executemany("DELETE FROM firewall WHERE network = ?", unused)
    for network, ranges in networks.items():
        row = (json.dumps(sorted(ranges[name])) for name in _SET_NAMES)
        db.execute("INSERT OR REPLACE INTO firewall VALUES (?, ?, ?, ?)", (network, *row))


def adopt(db: sqlite3.Connection, network: str, ranges: Mapping[str, Sequence[str]]) -> None:
    """Record the ranges of pods that were found running."""
    if any(ranges.values()):
        add(db, (network, json.dumps(ranges, sort_keys=True)))
        write_rows(db)


def members(needs: Needs) -> dict[str, list[str]]:
    """The members of each set: everything that live pods need."""
    networks = _by_network(needs).values()
    sets = {name: set[str]().union(*(one[name] for one in networks)) for name in _SET_NAMES}
    return {
        f"{name}{family}": sorted(one for one in members if (":" in one) == (family == 6))
        for name, members in sets.items()
        for family in (4, 6)
    }


def _by_network(needs: Needs) -> dict[str, dict[str, set[str]]]:
    """What all pods of each network need. The newest pod of a network decides for all of them
    whether a range is masqueraded."""
    networks: dict[str, dict[str, set[str]]] = {}
    for network, text in needs:
        ranges = json.loads(text)
        together = networks.setdefault(network, {name: set() for name in _SET_NAMES})
        together["masqueraded"].difference_update(ranges["pods"])
        for name, members in together.items():
            members.update(ranges[name])
    return networks


@lru_cache(maxsize=8)
def ranges_of_pods(needs: Needs) -> tuple[Network, ...]:
    held = members(needs)
    # A store that an earlier release recovered may have them as the kernel lists them.
    texts = (one for name in ("pods4", "pods6") for one in nft.networks(held[name]))
    return tuple(map(ip_network, texts))


def _texts(networks: Iterable[Network]) -> list[str]:
    return sorted(map(str, networks))


def missing(needs: Needs, ranges: Mapping[str, Sequence[str]] | None) -> Iterator[str]:
    """The pod's ranges that no need has. A newer pod of the network may have decided otherwise
    whether a range is masqueraded."""
    recorded: dict[str, set[str]] = {}
    for _unused, text in needs:
        for name, members in json.loads(text).items():
            recorded.setdefault(name, set()).update(members)
    for name, members in (ranges or {}).items():
        missing = sorted(set(members) - recorded.get(name, set()))
        if missing:
            yield f"nft set {name}: the pod needs {', '.join(missing)}, which nobody recorded"
