"""Our chains in somebody's own nftables table: jumped to before the rules that block pods."""

from __future__ import annotations

from .. import nft
from . import chains
from .chains import Chain, Table
from .needs import PodTraffic
from .our_chain import NOTE, OurChain

PREFIX = "headcni-"  # of our chains' names, before the hook's


def wanted(table: Table, traffic: PodTraffic) -> dict[Chain, OurChain]:
    """Our chain for each entry chain that blocks."""
    versions = {"ip": (4,), "ip6": (6,), "inet": (4, 6)}[table.family]
    return {
        chain: OurChain.of(
            f"{PREFIX}{chain.hook}",
            (one.as_nft() for v in versions for one in traffic.accepts(chain.hook, v)),
        )
        for chain in table.blocking()
    }


def differences(table: Table, traffic: PodTraffic) -> list[str]:
    """What of ours is missing from a table that blocks, in words."""
    found = []
    for chain, ours in wanted(table, traffic).items():
        if not ours.is_in(table):
            found.append(f"nft {chain}: chain {ours.name} is missing or differs")
        if chains.leads_to(table.rules.get(chain.name, ()), ours.name) != [0]:
            found.append(f"nft {chain} does not jump to {ours.name} first")
    return found


def ensure(table: Table, traffic: PodTraffic) -> None:
    """Write our chains, and the jumps to them, in one transaction."""
    place = f"{table.family} {table.name}"
    commands = []
    for chain, ours in wanted(table, traffic).items():
        commands += [
            f"add chain {place} {ours.name}",
            f"flush chain {place} {ours.name}",
            f'add rule {place} {ours.name} counter comment "{ours.comment}"',
            *(f"add rule {place} {ours.name} {rule}" for rule in ours.rules),
            *_delete_jumps(table, chain.name, ours.name),
            f'insert rule {place} {chain.name} jump {ours.name} comment "{NOTE}"',
        ]
    nft.run_here("\n".join(commands) + "\n")


def remove(table: Table) -> list[str]:
    """Take our chains out; which there were."""
    place = f"{table.family} {table.name}"
    ours = [name for name in table.chains if name.startswith(PREFIX)]
    commands = [
        line
        for name in ours
        for holder in table.chains
        for line in _delete_jumps(table, holder, name)
    ]
    commands += [f"delete chain {place} {name}" for name in ours]
    if ours:
        nft.run_here("\n".join(commands) + "\n")
    return [f"nft {place} {name}" for name in ours]


def _delete_jumps(table: Table, holder: str, name: str) -> list[str]:
    rules = table.rules.get(holder, ())
    place = f"{table.family} {table.name} {holder}"
    return [f"delete rule {place} handle {rules[at].handle}" for at in chains.leads_to(rules, name)]
