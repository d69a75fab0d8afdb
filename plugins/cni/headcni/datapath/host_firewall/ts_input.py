"""The chain ts-input of a tailscaled in the node's own network namespace, beside HeadCNI's.

It drops the tailnet's IPv4 addresses on every link but its own, so it would drop what tailnet
peers send to the node in daemon mode. One rule of ours returns exactly these packets to INPUT,
where the operator's own rules come next. tailscaled empties the chain when it starts.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, Optional

from .. import nft
from . import iptables
from .chains import DROP, RETURN, Rule, Table
from .needs import PodTraffic
from .our_chain import NOTE

CHAIN = "ts-input"
DROPPED = "100.64.0.0/10"


class _Passed(NamedTuple):
    """The packets to return."""

    link: str
    node: str

    @property
    def comment(self) -> str:
        return f"{NOTE}:{hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:16]}"

    def as_iptables(self) -> str:
        return f"-i {self.link} -s {DROPPED} -d {self.node}"

    def as_nft(self) -> str:
        return f'iifname "{self.link}" ip saddr {DROPPED} ip daddr {self.node}'


def drops(table: Table) -> bool:
    """Whether packets get there, and some are dropped."""
    rules = table.rules.get(CHAIN, ())
    led = any(rule.target == CHAIN for rule in table.rules.get("INPUT", ()))
    return table.family == "ip" and led and any(rule.verdict == DROP for rule in rules)


def differences(table: Table, traffic: PodTraffic) -> list[str]:
    """What of ours is missing or left over, in words."""
    wanted, ours = _wanted(table, traffic), _ours(table)
    if wanted is None:
        return [f"{CHAIN} has a former rule of HeadCNI's"] if ours else []
    rules = list(table.rules[CHAIN])
    drop = next((at for at, rule in enumerate(rules) if rule.verdict == DROP), len(rules))
    right = len(ours) == 1 and wanted.comment.encode() in ours[0].note
    if right and rules.index(ours[0]) < drop:
        return []
    program = "iptables-legacy" if table.legacy else "iptables"
    return [f"{program} -I {CHAIN} {wanted.as_iptables()} -j RETURN"]


def ensure(table: Table, traffic: PodTraffic) -> None:
    _replace(table, _wanted(table, traffic))


def remove(table: Table) -> list[str]:
    if not _ours(table):
        return []
    _replace(table, None)
    return [f"iptables {CHAIN} RETURN"]


def _wanted(table: Table, traffic: PodTraffic) -> Optional[_Passed]:
    addresses = traffic.node if traffic.answers_for_node and drops(table) else ()
    return next(
        (_Passed(traffic.own_link, str(one)) for one in addresses if one.version == 4), None
    )


def _ours(table: Table) -> list[Rule]:
    note = f"{NOTE}:".encode()
    rules = table.rules.get(CHAIN, ())
    return [rule for rule in rules if rule.verdict == RETURN and note in rule.note]


def _replace(table: Table, wanted: Optional[_Passed]) -> None:
    """By nft, in the form in which iptables-nft writes it: tailscaled may do without iptables."""
    if table.legacy:
        lines = [rule.note.decode().replace("-A", "-D", 1) for rule in _ours(table)]
        if wanted is not None:
            comment = f"-m comment --comment {wanted.comment}"
            lines.append(f"-I {CHAIN} {wanted.as_iptables()} {comment} -j RETURN")
        iptables.restore(table, lines)
        return
    place = f"{table.family} {table.name} {CHAIN}"
    lines = [f"delete rule {place} handle {rule.handle}" for rule in _ours(table)]
    if wanted is not None:
        rule = f'{wanted.as_nft()} counter return comment "{wanted.comment}"'
        lines.append(f"insert rule {place} {rule}")
    nft.run_here("\n".join(lines) + "\n")
