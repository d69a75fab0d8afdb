"""The node's packet filters as they are: chains and rules of every program, and what they block.

nftables, which iptables-nft writes to as well, is read by netlink: no program is started, so the
daemon can look after each change. The older iptables has tables of its own, which only its own
program can list.
"""

from __future__ import annotations

import re
import shlex
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

from ..netlink import NETLINK_NETFILTER, Netlink, Request, attributes, text
from ..nft import NFNL_SUBSYS_NFTABLES

FAMILIES = {1: "inet", socket.AF_INET: "ip", socket.AF_INET6: "ip6"}
HOOKS = {1: "input", 2: "forward", 3: "output"}
ACCEPT, DROP, JUMP, GOTO, RETURN, GO_ON = "accept", "drop", "jump", "goto", "return", ""

_GETCHAIN, _GETRULE, _GETGEN = 4, 7, 16
_CHAIN_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _CHAIN_POLICY, _CHAIN_TYPE = 1, 3, 4, 5, 7
_RULE_TABLE, _RULE_CHAIN, _RULE_HANDLE, _RULE_EXPRESSIONS, _RULE_USERDATA = 1, 2, 3, 4, 7
_EXPRESSION_NAME, _EXPRESSION_DATA, _EXTENSION_NAME = 1, 2, 1
_IMMEDIATE_DATA, _DATA_VERDICT, _VERDICT_CODE, _VERDICT_CHAIN = 2, 2, 1, 2
_VERDICTS = {0: DROP, 1: ACCEPT, -3: JUMP, -4: GOTO, -5: RETURN}
# Expressions that let every packet pass on to the verdict behind them.
_UNCONDITIONAL = {"counter", "log", "target", "notrack"}
_DROPPING_TARGETS = {"DROP", "REJECT", "TARPIT"}
_DEEPEST = 16  # jumps that are followed: the kernel allows as many


class Rule(NamedTuple):
    """A rule, as far as it matters here. `note` holds the rule's comment somewhere."""

    verdict: str
    target: str = ""  # the chain that a jump leads to
    conditional: bool = True
    handle: int = 0
    note: bytes = b""


class Chain(NamedTuple):
    """A chain; `hook` is empty unless packets enter the filter there."""

    family: str
    table: str
    name: str
    hook: str = ""
    drops: bool = False  # what no rule has decided on

    def __str__(self) -> str:
        return f"{self.family} {self.table} {self.name}"


class Table(NamedTuple):
    """All of one table: its chains, and the rules of each."""

    family: str
    name: str
    chains: Mapping[str, Chain]
    rules: Mapping[str, Sequence[Rule]]
    legacy: bool = False

    def blocking(self) -> Iterator[Chain]:
        """The entry chains that let no packet through that nobody has allowed."""
        for chain in self.chains.values():
            if not chain.hook:
                continue
            end = self._end_of(chain.name, 0)
            if end == DROP or (end == GO_ON and chain.drops):
                yield chain

    def _end_of(self, name: str, depth: int) -> str:
        """What becomes of a packet that no condition applies to."""
        for rule in self.rules.get(name, ()) if depth < _DEEPEST else ():
            if rule.conditional:
                continue
            if rule.verdict in (JUMP, GOTO):
                end = self._end_of(rule.target, depth + 1)
                if end != GO_ON or rule.verdict == GOTO:
                    return end
            elif rule.verdict == RETURN:
                return GO_ON
            elif rule.verdict:
                return rule.verdict
        return GO_ON


def generation(kernel: Netlink) -> int:
    """Grows with each change of any nftables rule."""
    answer = kernel.ask(Request(_kind(_GETGEN), 0, _general(0), "ask for the ruleset's generation"))
    return int.from_bytes(dict(attributes((answer or b"")[4:])).get(1, b""), "big")


def tables(kernel: Netlink) -> list[Table]:
    """Every nftables table that has a filter which packets enter."""
    chains: dict[tuple[int, str], dict[str, Chain]] = {}
    for body in kernel.dump(Request(_kind(_GETCHAIN), 0, _general(0), "list the nft chains")):
        family, chain = body[0], _chain(body)
        if chain is not None:
            chains.setdefault((family, chain.table), {})[chain.name] = chain
    return [
        Table(FAMILIES[family], name, found, _rules(kernel, family, name))
        for (family, name), found in chains.items()
        if any(chain.hook for chain in found.values())
    ]


def _chain(body: bytes) -> Optional[Chain]:
    family = FAMILIES.get(body[0])
    if family is None:
        return None
    have = dict(attributes(body[4:]))
    hook = ""
    if _CHAIN_HOOK in have and _string(have.get(_CHAIN_TYPE, b"")) == "filter":
        number = dict(attributes(have[_CHAIN_HOOK])).get(1, bytes(4))
        hook = HOOKS.get(int.from_bytes(number, "big"), "")
    drops = int.from_bytes(have.get(_CHAIN_POLICY, b"\x01"), "big") == 0
    return Chain(
        family, _string(have[_CHAIN_TABLE]), _string(have[_CHAIN_NAME]), hook, bool(hook) and drops
    )


def _rules(kernel: Netlink, family: int, table: str) -> dict[str, list[Rule]]:
    found: dict[str, list[Rule]] = {}
    body = _general(family) + text(_RULE_TABLE, table)
    for one in kernel.dump(Request(_kind(_GETRULE), 0, body, f"list the rules of {table}")):
        have = dict(attributes(one[4:]))
        if _string(have[_RULE_TABLE]) == table:
            found.setdefault(_string(have[_RULE_CHAIN]), []).append(_rule(have))
    return found


def _rule(have: Mapping[int, bytes]) -> Rule:
    verdict, target, conditional = GO_ON, "", False
    expressions = have.get(_RULE_EXPRESSIONS, b"")
    for _unused, item in attributes(expressions):
        expression = dict(attributes(item))
        name, data = _string(expression[_EXPRESSION_NAME]), expression.get(_EXPRESSION_DATA, b"")
        extension = _string(dict(attributes(data)).get(_EXTENSION_NAME, b""))
        if name == "immediate":
            verdict, target = _immediate(data) or (verdict, target)
        elif name == "reject" or (name == "target" and extension in _DROPPING_TARGETS):
            verdict = DROP
        elif name == "match":  # of iptables
            conditional = conditional or extension != "comment"
        elif name not in _UNCONDITIONAL:
            conditional = True
    handle = int.from_bytes(have.get(_RULE_HANDLE, b""), "big")
    note = have.get(_RULE_USERDATA, b"") + expressions
    return Rule(verdict, target, conditional, handle, note)


def _immediate(data: bytes) -> Optional[tuple[str, str]]:
    value = dict(attributes(dict(attributes(data)).get(_IMMEDIATE_DATA, b""))).get(_DATA_VERDICT)
    if value is None:
        return None
    have = dict(attributes(value))
    (code,) = struct.unpack(">i", have[_VERDICT_CODE])
    return _VERDICTS.get(code, GO_ON), _string(have.get(_VERDICT_CHAIN, b""))


def from_listing(family: str, listed: str) -> Table:
    """The filter table of the older iptables, as `iptables-legacy -S` prints it."""
    chains: dict[str, Chain] = {}
    rules: dict[str, list[Rule]] = {}
    for line in listed.splitlines():
        words = shlex.split(line)
        if len(words) >= 2 and words[0] in ("-P", "-N"):
            hook = words[1].lower() if words[0] == "-P" else ""
            drops = words[2:3] == ["DROP"]
            chains[words[1]] = Chain(family, "filter", words[1], hook, drops)
        elif len(words) >= 2 and words[0] == "-A":
            rules.setdefault(words[1], []).append(_listed_rule(words[2:], line))
    return Table(family, "filter", chains, rules, legacy=True)


def _listed_rule(words: Sequence[str], line: str) -> Rule:
    """Options before the target are conditions, a comment excepted; those behind are its own."""
    at = next((i for i, word in enumerate(words) if word in ("-j", "-g")), len(words))
    conditions = re.sub(r"-m comment --comment \S+", "", " ".join(map(_joined, words[:at])))
    verdict, target = GO_ON, ""
    if at + 1 < len(words):
        target = words[at + 1]
        known = {"ACCEPT": ACCEPT, "RETURN": RETURN, **dict.fromkeys(_DROPPING_TARGETS, DROP)}
        verdict = known.get(target, GOTO if words[at] == "-g" else JUMP)
    return Rule(verdict, target, bool(conditions.strip()), 0, line.encode())


def _joined(word: str) -> str:
    return word.replace(" ", "_")


def _kind(message: int) -> int:
    return NFNL_SUBSYS_NFTABLES << 8 | message


def _general(family: int) -> bytes:
    return struct.pack("=BBH", family, 0, 0)


def _string(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")


def leads_to(rules: Iterable[Rule], target: str) -> list[int]:
    """Where in a chain the jumps to another one are."""
    return [i for i, rule in enumerate(rules) if rule.verdict == JUMP and rule.target == target]


def open_netlink() -> Netlink:
    return Netlink(NETLINK_NETFILTER)
