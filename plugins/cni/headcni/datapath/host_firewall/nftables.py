"""Our chains in somebody's own nftables table: jumped to before the rules that block pods."""

from __future__ import annotations

from .. import nft
from .chains import VERSIONS, Chain, Table
from .needs import PodTraffic
from .our_chain import NOTE, OurChain, has_other_jumps, is_ours, our_jumps

CHAINS = {hook: f"headcni-{hook}" for hook in ("forward", "input", "output")}


def wanted(table: Table, traffic: PodTraffic) -> dict[Chain, OurChain]:
    """Our chain for each entry chain that blocks."""
    return {
        chain: OurChain.of(
            CHAINS[chain.hook],
            (
                one.as_nft()
                for version in VERSIONS[table.family]
                for one in traffic.accepts(chain.hook, version)
            ),
        )
        for chain in table.blocking()
        if chain.hook in CHAINS
    }


def differences(table: Table, traffic: PodTraffic) -> list[str]:
    """What of ours is missing from a table that blocks, in words."""
    found = []
    for chain, ours in wanted(table, traffic).items():
        if not ours.is_in(table):
            found.append(f"nft {chain}: chain {ours.name} is missing or differs")
        jumps = our_jumps(table.rules.get(chain.name, ()), ours.name)
        if len(jumps) != 1 or jumps[0] > table.first_block(chain):
            found.append(f"nft {chain} does not jump to {ours.name} in time")
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
            _insert_jump(table, chain, ours.name),
        ]
    nft.run_here("\n".join(commands) + "\n")


def _insert_jump(table: Table, chain: Chain, name: str) -> str:
    """After the operator's own rules, and before the one that drops all that is left."""
    rules, at = table.rules.get(chain.name, ()), table.first_block(chain)
    jump = f'jump {name} comment "{NOTE}"'
    if at == len(rules):
        return f"add rule {chain} {jump}"
    return f"insert rule {chain} handle {rules[at].handle} {jump}"


def remove(table: Table) -> list[str]:
    """Take our chains out; which there were. One that other rules lead to stays, empty."""
    place = f"{table.family} {table.name}"
    ours = [name for name in CHAINS.values() if is_ours(table, name)]
    commands = []
    for name in ours:
        commands.append(f"flush chain {place} {name}")
        for holder in table.chains:
            commands += _delete_jumps(table, holder, name)
        if not has_other_jumps(table, name):
            commands.append(f"delete chain {place} {name}")
    if ours:
        nft.run_here("\n".join(commands) + "\n")
    return [f"nft {place} {name}" for name in ours]


def _delete_jumps(table: Table, holder: str, name: str) -> list[str]:
    rules = table.rules.get(holder, ())
    place = f"{table.family} {table.name} {holder}"
    return [f"delete rule {place} handle {rules[at].handle}" for at in our_jumps(rules, name)]
