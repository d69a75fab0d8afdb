"""What the tests of store, pool and IPAM share: small configurations, and the invariants."""

from __future__ import annotations

import os
import tempfile
from ipaddress import ip_address
from typing import Any

from headcni.ipam.config import parse_ipam
from headcni.model import IpamConfig, Owner
from headcni.problems import Problem
from headcni.store import Store

# Tests that open hundreds of stores do so in memory.
FAST_DIR = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def ipam_config(**section: Any) -> IpamConfig:
    """An ipam section as a value; `requested` stands for runtimeConfig.ips."""
    requested = section.pop("requested", [])
    problems: list[Problem] = []
    config = parse_ipam(section, "ipam", problems, {"ips": requested})
    assert problems == []
    return config


def owner(container_id: str, network: str = "pods", ifname: str = "eth0") -> Owner:
    return Owner(network, container_id, ifname)


def nobody_has(address: object) -> bool:
    return False


def addresses(lease: Any) -> list[str]:
    return [str(leased.address) for leased in lease.addresses]


def audit(store: Store) -> None:
    """The invariants of the store, checked from the tables alone.

    For each range: free ∪ held ∪ held back = usable; no two of them meet; free is in order, in
    the fewest intervals. No address is both held and held back.
    """
    with store.transaction() as db:
        held = {row[0] for row in db.execute("SELECT address FROM allocation")}
        back = {row[0] for row in db.execute("SELECT address FROM conflict")}
        assert not held & back, "held and held back at once"
        taken = held | back
        for pool, first, last in db.execute(
            "SELECT id, first, last FROM pool JOIN network ON name = network WHERE ranges != ''"
        ).fetchall():
            usable, free = _intervals(db, "usable", pool), _intervals(db, "free", pool)
            ours = {
                int.from_bytes(address, "big") for address in taken if len(address) == len(first)
            }
            used = {point for point in ours if _inside(point, usable)}
            assert all(
                int.from_bytes(first, "big") <= a <= b <= int.from_bytes(last, "big")
                for a, b in usable
            )
            assert all(_inside(a, usable) and _inside(b, usable) for a, b in free)
            assert not [point for point in ours if _inside(point, free)], "free though taken"
            assert _size(free) + len(used) == _size(usable), "an address is lost or doubled"
            for intervals in (usable, free):
                assert all(b + 1 < c for (_, b), (c, _) in zip(intervals, intervals[1:]))
        stray = db.execute("SELECT count(*) FROM span WHERE pool NOT IN (SELECT id FROM pool)")
        assert stray.fetchone() == (0,)


def free_addresses(store: Store, network: str = "pods") -> list[str]:
    """Every free address of a network with small pools."""
    with store.transaction() as db:
        rows = db.execute(
            "SELECT span.first, span.last FROM span JOIN pool ON id = pool"
            " WHERE network = ? AND kind = 'free' ORDER BY set_index, range_index, span.first",
            (network,),
        ).fetchall()
    return [
        str(ip_address(number.to_bytes(len(first), "big")))
        for first, last in rows
        for number in range(int.from_bytes(first, "big"), int.from_bytes(last, "big") + 1)
    ]


def _intervals(db: Any, kind: str, pool: int) -> list[tuple[int, int]]:
    rows = db.execute(
        "SELECT first, last FROM span WHERE pool = ? AND kind = ? ORDER BY first", (pool, kind)
    )
    return [(int.from_bytes(a, "big"), int.from_bytes(b, "big")) for a, b in rows]


def _inside(point: int, intervals: list[tuple[int, int]]) -> bool:
    return any(a <= point <= b for a, b in intervals)


def _size(intervals: list[tuple[int, int]]) -> int:
    return sum(b - a + 1 for a, b in intervals)
