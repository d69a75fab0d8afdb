"""Other firewalls on the node, and what pods need of them.

A packet must pass every filter on its way: an accept in our own table does not help against a drop
in somebody else's. So every filter that lets nothing through by default is told about pods, in its
own way: a chain of ours in iptables' tables (Docker, ufw and operators write there) and in
nftables' tables, zone members in firewalld. Filters that accept by default are left alone.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Protocol

from ...errors import CniError
from . import chains, firewalld, iptables, nftables
from .chains import Chain, Table
from .needs import PodTraffic
from .our_chain import OurChain

__all__ = ["Cooperation", "Found", "PodTraffic", "look"]

_OURS = ("headcni", "headcni_mesh")


class Found(NamedTuple):
    """A firewall that blocks what it does not know. `missing` is what it has to be told."""

    name: str
    blocks: tuple[Chain, ...]
    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    problem: str = ""  # why it could not be told

    def in_words(self) -> str:
        hooks = ", ".join(sorted({chain.hook for chain in self.blocks}))
        said = f"{self.name} blocks {hooks} by default"
        if self.problem:
            return f"{said}, and could not be told about pods: {self.problem}"
        if self.missing:
            return f"{said}, and was not told about pods: {'; '.join(self.missing)}"
        return f"{said}; HeadCNI added {', '.join(self.added) or 'nothing: pods are let through'}"


class Cooperation:
    """What one process has seen: a look at rules that did not change is not repeated."""

    def __init__(self, manage: bool) -> None:
        self.manage = manage
        self._calm: Optional[tuple[object, ...]] = None
        self._firewalld: Optional[tuple[object, ...]] = None
        self.found: tuple[Found, ...] = ()
        self.repaired: tuple[str, ...] = ()
        self.legacy = False  # whether the older iptables blocks
        self.chain_names: frozenset[str] = frozenset()  # of every table of the node

    def ensure(self, traffic: PodTraffic) -> tuple[Found, ...]:
        """Tell each firewall what it has not been told; how they all stand now."""
        self.repaired = ()
        with chains.open_netlink() as kernel:
            view = (chains.generation(kernel), traffic)
            legacy = iptables.legacy_tables()
            self.legacy = any(True for table in legacy for _unused in table.blocking())
            if view == self._calm and not legacy:
                return self.found
            every = [*_others(chains.tables(kernel)), *legacy]
            self.chain_names = frozenset(name for table in every for name in table.chains)
            self.found = self._pass(every, traffic)
            self._calm = (chains.generation(kernel), traffic)
            if any(one.problem for one in self.found) or self.repaired:
                self._calm = None  # look again at the next pass
        return self.found

    def _pass(self, every: list[Table], traffic: PodTraffic) -> tuple[Found, ...]:
        found = []
        for table in every:
            blocking = tuple(table.blocking())
            if not blocking:
                continue
            try:
                missing = self._missing(table, traffic)
                if missing and self.manage:
                    _tell(table, traffic)
                    self.repaired += tuple(missing)
                    missing = []
                problem = ""
            except CniError as failure:
                problem, missing = str(failure), []
            added = () if missing or problem else _added(table, traffic)
            found.append(Found(_name(table), blocking, tuple(missing), added, problem))
        return tuple(found)

    def _missing(self, table: Table, traffic: PodTraffic) -> list[str]:
        if not firewalld.writes(table):
            return _rules_of(table).differences(table, traffic)
        seen = (firewalld.fingerprint(table), traffic)
        if seen == self._firewalld:  # its command takes a third of a second each time
            return []
        missing = firewalld.differences(traffic)
        self._firewalld = None if missing else seen
        return missing


def look(traffic: PodTraffic) -> tuple[Found, ...]:
    """How they stand; nothing is changed."""
    return Cooperation(manage=False).ensure(traffic)


def remove() -> list[str]:
    """Take everything out that we added, wherever it is; what that was, in words."""
    removed = firewalld.remove()
    with chains.open_netlink() as kernel:
        every = [*_others(chains.tables(kernel)), *iptables.legacy_tables()]
    for table in every:
        removed += iptables.remove(table)
        removed += [] if table.legacy else nftables.remove(table)
    return removed


def _others(every: list[Table]) -> list[Table]:
    return [table for table in every if table.name not in _OURS]


def _tell(table: Table, traffic: PodTraffic) -> None:
    if firewalld.writes(table):
        firewalld.ensure(traffic)
    else:
        _rules_of(table).ensure(table, traffic)


class _Rules(Protocol):
    """What both modules that write rules have."""

    def wanted(self, table: Table, traffic: PodTraffic) -> dict[Chain, OurChain]: ...
    def differences(self, table: Table, traffic: PodTraffic) -> list[str]: ...
    def ensure(self, table: Table, traffic: PodTraffic) -> None: ...


def _rules_of(table: Table) -> _Rules:
    return iptables if iptables.can_write(table) else nftables


def _added(table: Table, traffic: PodTraffic) -> tuple[str, ...]:
    if firewalld.writes(table):
        return firewalld.added()
    return tuple(f"chain {one.name}" for one in _rules_of(table).wanted(table, traffic).values())


def _name(table: Table) -> str:
    """Who wrote the rules, as far as the names of their chains tell."""
    if firewalld.writes(table):
        return "firewalld"
    family = " (IPv6)" if table.family == "ip6" else ""
    legacy = "-legacy" if table.legacy else ""
    known = [
        name
        for name, prefix in (("ufw", "ufw"), ("Docker", "DOCKER"))
        if any(chain.startswith(prefix) for chain in table.chains)
    ]
    if known:
        return " and ".join(known) + family
    if iptables.can_write(table):
        return ("ip6tables" if table.family == "ip6" else "iptables") + legacy
    return f"nftables table {table.family} {table.name}"
