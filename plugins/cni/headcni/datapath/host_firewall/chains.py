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
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

from ..netlink import NETLINK_NETFILTER, Netlink, Request, attributes, text
from ..nft import NFNL_SUBSYS_NFTABLES

FAMILIES = {1: "inet", socket.AF_INET: "ip", socket.AF_INET6: "ip6", 7: "bridge"}
VERSIONS = {"inet": (4, 6), "ip": (4,), "ip6": (6,), "bridge": (4, 6)}
HOOKS = {0: "prerouting", 1: "input", 2: "forward", 3: "output", 4: "postrouting"}
ACCEPT, DROP, JUMP, GOTO, RETURN, GO_ON = "accept", "drop", "jump", "goto", "return", ""

_GETCHAIN, _GETRULE, _GETGEN = 4, 7, 16
_CHAIN_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _CHAIN_POLICY = 1, 3, 4, 5
_RULE_TABLE, _RULE_CHAIN, _RULE_HANDLE, _RULE_EXPRESSIONS, _RULE_USERDATA = 1, 2, 3, 4, 7
_EXPRESSION_NAME, _EXPRESSION_DATA, _EXTENSION_NAME = 1, 2, 1
_IMMEDIATE_DATA, _DATA_VALUE, _DATA_VERDICT, _VERDICT_CODE, _VERDICT_CHAIN = 2, 1, 2, 1, 2
_META_KEY, _META_SOURCE, _CT_SOURCE, _NFPROTO = 2, 3, 4, 15
_IIFNAME, _OIFNAME = 6, 7
_CMP_OPERATION, _CMP_DATA, _EQUAL = 2, 3, 0
_VERDICTS = {0: DROP, 1: ACCEPT, -3: JUMP, -4: GOTO, -5: RETURN}
# Statements that every packet passes on its way to the verdict behind them.
_STATEMENTS = {"counter", "log", "target", "notrack", "objref", "last", "dynset", "immediate"}
_DROPPING_TARGETS = {"DROP", "REJECT", "TARPIT"}
_LINKS = ("-i", "-o")
_DEEPEST = 16  # jumps that are followed: the kernel allows as many


class Rule(NamedTuple):
    """A rule, as far as it matters here. `note` holds the rule's comment somewhere. `came_by` and
    `leaves_by` are links; a rule has one if that is its only condition."""

    verdict: str
    target: str = ""  # the chain that a jump leads to
    conditional: bool = True
    version: int = 0  # 4 or 6 if it is about this IP version alone
    handle: int = 0
    note: bytes = b""
    came_by: str = ""
    leaves_by: str = ""


class Way(NamedTuple):
    """What is known of a packet: by which link it came, or by which it leaves."""

    came_by: str = ""
    leaves_by: str = ""

    def meets(self, rule: Rule) -> bool:
        """Whether the rule applies to every such packet."""
        if not rule.conditional:
            return True
        return any(mine and mine == asked for mine, asked in zip(self, rule[-2:]))


ANY = Way()


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
            if chain.hook and any(self._blocks(chain, v) for v in VERSIONS[self.family]):
                yield chain

    def _blocks(self, chain: Chain, version: int) -> bool:
        end = self._end_of(chain.name, version, 0)
        return end == DROP or (end == GO_ON and chain.drops)

    def first_block(self, chain: Chain) -> int:
        """How many rules come before the one that drops all that is left."""
        rules = self.rules.get(chain.name, ())
        for at, rule in enumerate(rules):
            if any(self._end_by(rule, v, 0) == DROP for v in VERSIONS[self.family]):
                return at
        return len(rules)

    def lets_pass(self, chain: Chain, way: Way) -> bool:
        """Whether all packets of which only the way is known get through the chain."""
        ends = {self._end_of(chain.name, version, 0, way) for version in VERSIONS[self.family]}
        return ends <= ({ACCEPT} if chain.drops else {ACCEPT, GO_ON})

    def _end_of(self, name: str, version: int, depth: int, way: Way = ANY) -> str:
        """What becomes of a packet of this IP version that no other condition applies to."""
        for rule in self.rules.get(name, ()) if depth < _DEEPEST else ():
            if rule.verdict == RETURN and way.meets(rule) and rule.version in (0, version):
                return GO_ON
            end = self._end_by(rule, version, depth, way)
            if end != GO_ON or (rule.verdict == GOTO and way.meets(rule)):
                return end
        return GO_ON

    def _end_by(self, rule: Rule, version: int, depth: int, way: Way = ANY) -> str:
        if not way.meets(rule) or rule.version not in (0, version):
            return GO_ON
        if rule.verdict in (JUMP, GOTO):
            return self._end_of(rule.target, version, depth + 1, way)
        return rule.verdict if rule.verdict in (ACCEPT, DROP) else GO_ON


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
    if _CHAIN_HOOK in have:
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
    verdict, target, conditional, version, asks_version = GO_ON, "", False, 0, False
    asked_link, links = 0, []
    expressions = have.get(_RULE_EXPRESSIONS, b"")
    for _unused, item in attributes(expressions):
        expression = dict(attributes(item))
        name = _string(expression[_EXPRESSION_NAME])
        data = dict(attributes(expression.get(_EXPRESSION_DATA, b"")))
        extension = _string(data.get(_EXTENSION_NAME, b""))
        if name == "immediate":
            verdict, target = _immediate(data) or (verdict, target)
        elif name == "reject" or (name == "target" and extension in _DROPPING_TARGETS):
            verdict = DROP
        elif name == "match":  # of iptables
            conditional = conditional or extension != "comment"
        elif name == "meta" and _number(data.get(_META_KEY)) == _NFPROTO:
            asks_version = True
        elif name == "meta" and _number(data.get(_META_KEY)) in (_IIFNAME, _OIFNAME):
            asked_link = _number(data.get(_META_KEY))
        elif name == "cmp" and asked_link:
            links.append((asked_link, _compared_link(data)))
            asked_link = 0
        elif name == "cmp" and asks_version:
            asks_version, version = False, _compared_version(data)
            conditional = conditional or not version
        elif not _is_statement(name, data):
            conditional = True
    handle = _number(have.get(_RULE_HANDLE))
    note = have.get(_RULE_USERDATA, b"") + expressions
    came_by, leaves_by = "", ""
    if len(links) == 1 and not (conditional or asks_version or asked_link):
        [(key, link)] = links
        came_by, leaves_by = (link, "") if key == _IIFNAME else ("", link)
    conditional = conditional or asks_version or bool(links) or bool(asked_link)
    return Rule(verdict, target, conditional, version, handle, note, came_by, leaves_by)


def _is_statement(name: str, data: Mapping[int, bytes]) -> bool:
    """Whether it does something with every packet, rather than to choose some."""
    if name in _STATEMENTS:
        return True
    return (name == "meta" and _META_SOURCE in data) or (name == "ct" and _CT_SOURCE in data)


def _compared_version(data: Mapping[int, bytes]) -> int:
    """4 or 6 if that is what a packet's protocol family has to be; 0 if it is put otherwise."""
    if _number(data.get(_CMP_OPERATION)) != _EQUAL:
        return 0
    value = dict(attributes(data.get(_CMP_DATA, b""))).get(_DATA_VALUE, b"")
    return {int(socket.AF_INET): 4, int(socket.AF_INET6): 6}.get(value[0] if value else 0, 0)


def _compared_link(data: Mapping[int, bytes]) -> str:
    """The name that a link must have; empty if only its beginning is compared, or otherwise."""
    value = dict(attributes(data.get(_CMP_DATA, b""))).get(_DATA_VALUE, b"")
    exact = _number(data.get(_CMP_OPERATION)) == _EQUAL and value.endswith(b"\0")
    return _string(value) if exact else ""


def _immediate(data: Mapping[int, bytes]) -> Optional[tuple[str, str]]:
    value = dict(attributes(data.get(_IMMEDIATE_DATA, b""))).get(_DATA_VERDICT)
    if value is None:
        return None
    have = dict(attributes(value))
    (code,) = struct.unpack(">i", have[_VERDICT_CODE])
    return _VERDICTS.get(code, GO_ON), _string(have.get(_VERDICT_CHAIN, b""))


def from_listing(family: str, listed: str) -> Table:
    """The filter table of the older iptables, as `iptables-legacy -S` prints it."""
    chains: dict[str, Chain] = {}
    rules: dict[str, list[Rule]] = {}
    for line in listed.split("\n"):  # comments may hold anything but a newline of their own
        words = line.split(" ")
        if len(words) < 2:
            continue
        if words[0] in ("-P", "-N"):
            hook = words[1].lower() if words[0] == "-P" else ""
            chains[words[1]] = Chain(family, "filter", words[1], hook, words[2:3] == ["DROP"])
        elif words[0] == "-A":
            rules.setdefault(words[1], []).append(_listed_rule(line))
    return Table(family, "filter", chains, rules, legacy=True)


def _listed_rule(line: str) -> Rule:
    """Options before the target are conditions, a comment excepted; those behind are its own."""
    note = line.encode(errors="surrogateescape")
    try:
        words = shlex.split(line)[2:]
    except ValueError:  # part of a comment with a newline in it, say
        return Rule(GO_ON, note=note)
    at = next((i for i, word in enumerate(words) if word in ("-j", "-g")), len(words))
    conditions = " ".join(word.replace(" ", "_") for word in words[:at])
    conditions = re.sub(r"-m comment --comment [^ ]+", "", conditions)
    verdict, target = GO_ON, ""
    if at + 1 < len(words):
        target = words[at + 1]
        known = {"ACCEPT": ACCEPT, "RETURN": RETURN, **dict.fromkeys(_DROPPING_TARGETS, DROP)}
        verdict = known.get(target, GOTO if words[at] == "-g" else JUMP)
    asked = conditions.split()
    came_by, leaves_by = (asked[1] if asked[:1] == [o] and len(asked) == 2 else "" for o in _LINKS)
    return Rule(verdict, target, bool(asked), 0, 0, note, came_by, leaves_by)


def _kind(message: int) -> int:
    return NFNL_SUBSYS_NFTABLES << 8 | message


def _general(family: int) -> bytes:
    return struct.pack("=BBH", family, 0, 0)


def _number(value: Optional[bytes]) -> int:
    return int.from_bytes(value or b"", "big")


def _string(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")


def open_netlink() -> Netlink:
    return Netlink(NETLINK_NETFILTER)
