"""Other firewalls on the node, and what pods need of them.

A packet must pass every filter on its way: an accept in our own table does not help against a drop
in somebody else's. So every filter that lets nothing through by default is told about pods, in its
own way: a chain of ours in iptables' tables (Docker, ufw and operators write there) and in
nftables' tables, zone members in firewalld. Filters that accept by default are left alone.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Protocol

from ...errors import KERNEL, CniError
from . import chains, firewalld, iptables, nftables, ts_input
from .chains import Chain, Table, Way
from .needs import PodTraffic
from .our_chain import OurChain

__all__ = ["Cooperation", "Found", "PodTraffic", "look", "remove"]

OURS = "headcni"  # begins the names of our own tables
TELLABLE = ("forward", "input", "output")  # the hooks where a firewall can be told about pods


class Found(NamedTuple):
    """A firewall that blocks what it does not know. `missing` is what it has to be told."""

    name: str
    blocks: tuple[Chain, ...]  # none if it could not be looked at
    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    problem: str = ""  # why it could not be told
    blocks_node: bool = False  # what tailnet peers send to the node itself, and not pods

    def in_words(self) -> str:
        if self.blocks_node:
            return self._about_node()
        hooks = ", ".join(sorted({chain.hook for chain in self.blocks}))
        said = f"{self.name} blocks {hooks} by default" if hooks else f"{self.name} may block pods"
        if self.problem:
            return f"{said}, and could not be told about pods: {self.problem}"
        if self.missing:
            return f"{said}, and was not told about pods: {'; '.join(self.missing)}"
        return f"{said}; HeadCNI added {', '.join(self.added) or 'nothing: pods are let through'}"

    def _about_node(self) -> str:
        said = f"{self.name} drops the IPv4 addresses of tailnet peers"
        if self.problem:
            return f"{said}, so this node does not answer them: {self.problem}"
        if self.missing:
            return f"{said}, so this node does not answer them without {'; '.join(self.missing)}"
        return f"{said}; HeadCNI added {', '.join(self.added)}"


class Cooperation:
    """What one process has seen: a look at rules that did not change is not repeated."""

    def __init__(self, manage: bool) -> None:
        self.manage = manage
        self._calm: Optional[tuple[object, ...]] = None
        self._firewalld: Optional[tuple[object, ...]] = None
        self.found: tuple[Found, ...] = ()
        self.repaired: tuple[str, ...] = ()
        self.legacy = False  # whether the older iptables blocks
        self.has_tailscale_rules = True  # of a tailscaled in the node's own network namespace

    def ensure(self, traffic: PodTraffic) -> tuple[Found, ...]:
        """Tell each firewall what it has not been told; how they all stand now."""
        self.repaired = ()
        legacy, found = _legacy()
        with chains.open_netlink() as kernel:
            view = (chains.generation(kernel), traffic)
            if view == self._calm and not legacy and not found:
                return self.found
            every = [*_others(chains.tables(kernel)), *legacy]
        self.legacy = any(ts_input.drops(table) or any(table.blocking()) for table in legacy)
        self.has_tailscale_rules = _has_tailscale_rules(every)
        self.found = (*found, *self._pass(every, traffic), *self._open_to_peers(every, traffic))
        # By the generation from before the look: whatever changes meanwhile is looked at again.
        troubled = any(one.problem for one in self.found)
        self._calm = None if troubled or self.repaired else view
        return self.found

    def _pass(self, every: list[Table], traffic: PodTraffic) -> list[Found]:
        found = []
        for table in every:
            blocking = tuple(table.blocking())
            if not blocking:
                continue
            missing, problem = [], ""
            try:
                _refuse_what_cannot_be_told(table, blocking)
                missing = self._missing(table, traffic)
                if missing and self.manage:
                    _tell(table, traffic)
                    self.repaired += tuple(missing)
                    missing = []
            except (CniError, OSError) as failure:
                problem, missing = str(failure), []
            added = () if missing or problem else _added(table, traffic)
            found.append(Found(_name(table), blocking, tuple(missing), added, problem))
        return found

    def _open_to_peers(self, every: list[Table], traffic: PodTraffic) -> list[Found]:
        """Past a tailscaled of the node's own that drops what tailnet peers send to the node."""
        found = []
        for table in every:
            missing, problem = ts_input.differences(table, traffic), ""
            if missing and self.manage:
                try:
                    ts_input.ensure(table, traffic)
                    self.repaired += tuple(missing)
                except (CniError, OSError) as failure:
                    problem = str(failure)
                missing = []
            if ts_input.drops(table) and traffic.answers_for_node and traffic.node:
                added = () if missing or problem else (f"a RETURN to {ts_input.CHAIN}",)
                name = f"the node's own tailscaled (chain {ts_input.CHAIN})"
                found.append(Found(name, (), tuple(missing), added, problem, blocks_node=True))
        return found

    def _missing(self, table: Table, traffic: PodTraffic) -> list[str]:
        if not self.manage and _is_allowed(table, traffic):
            return []
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
    """Take everything out that we added, wherever it is; what that was, in words. All of it is
    tried; the first failure is raised in the end."""
    removed: list[str] = []
    problems: list[Exception] = []
    with chains.open_netlink() as kernel:
        every = _others(chains.tables(kernel))
    legacy, _unused = _legacy()
    steps = [firewalld.remove]
    for table in (*every, *legacy):
        module = iptables if iptables.writes(table) else nftables
        steps.append(lambda module=module, table=table: module.remove(table))  # type: ignore[misc]
        steps.append(lambda table=table: ts_input.remove(table))  # type: ignore[misc]
    for step in steps:
        try:
            removed += step()
        except (CniError, OSError) as problem:
            problems.append(problem)
    if problems:
        raise problems[0]
    return removed


def _legacy() -> tuple[list[Table], tuple[Found, ...]]:
    """The tables of the older iptables, and what to say if they cannot be read."""
    try:
        return iptables.legacy_tables(), ()
    except CniError as problem:
        return [], (Found("iptables-legacy", (), problem=str(problem)),)


def _others(every: list[Table]) -> list[Table]:
    return [table for table in every if not table.name.startswith(OURS)]


def _refuse_what_cannot_be_told(table: Table, blocking: tuple[Chain, ...]) -> None:
    """Other hooks, and bridges' own filters, know neither the pods' links nor what answers what."""
    beyond = [chain for chain in blocking if chain.hook not in TELLABLE or table.family == "bridge"]
    if beyond and not firewalld.writes(table):
        raise CniError(
            KERNEL,
            f"{beyond[0]} drops at the hook {beyond[0].hook}, where HeadCNI adds nothing",
            f"let pods' addresses through there, before it drops: nft list chain {beyond[0]}",
        )


def _is_allowed(table: Table, traffic: PodTraffic) -> bool:
    """Whether the operator has let all packets of pods' bridges through, as docs/firewalls.md asks
    for with network.firewall: none."""
    ways = [way for link in traffic.bridges for way in (Way(came_by=link), Way(leaves_by=link))]
    return bool(ways) and all(
        chain.hook == "forward" and all(table.lets_pass(chain, way) for way in ways)
        for chain in table.blocking()
    )


def _has_tailscale_rules(every: list[Table]) -> bool:
    """Whether FORWARD leads to tailscaled's own chain, and there is something in it."""
    return any(
        table.rules.get("ts-forward")
        and any(rule.target == "ts-forward" for rule in table.rules.get("FORWARD", ()))
        for table in every
        if table.family == "ip"
    )


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
    return iptables if iptables.writes(table) else nftables


def _added(table: Table, traffic: PodTraffic) -> tuple[str, ...]:
    if firewalld.writes(table):
        return firewalld.added()
    return tuple(f"chain {one.name}" for one in _rules_of(table).wanted(table, traffic).values())


def _name(table: Table) -> str:
    """Who wrote the rules, as far as the names of their chains tell."""
    if firewalld.writes(table):
        return "firewalld"
    family = " (IPv6)" if table.family == "ip6" else ""
    known = [
        name
        for name, prefix in (("ufw", "ufw"), ("Docker", "DOCKER"))
        if any(chain.startswith(prefix) for chain in table.chains)
    ]
    if known:
        return " and ".join(known) + family
    if iptables.writes(table):
        program = "ip6tables" if table.family == "ip6" else "iptables"
        return f"{program}-legacy" if table.legacy else program
    return f"nftables table {table.family} {table.name}"
