# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether a Headscale policy lets the pods of one node reach those of another.

The judgement follows what Headscale 0.26 to 0.29 make of a policy (hscontrol/policy/v2) and what
tailscaled makes of the result (wgengine/filter). A newer Headscale is judged as 0.29. Rules only
allow, so a rule that is not understood can only make the judgement too strict; the verdict then
says "could not be judged" and never "allowed".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_network,
    summarize_address_range,
)
from typing import Any, Optional, Union

from ansible_collections.headcni.mesh.plugins.module_utils.hujson import Document, HujsonError

Network = Union[IPv4Network, IPv6Network]
Span = tuple[int, int]  # both ends belong to it
Number = tuple[int, int]

ALLOWED, MISSING, UNKNOWN = "allowed", "missing", "unknown"

PORTS: Span = (1, 65535)
TCP, UDP = 6, 17
TAILNET = (ip_network("100.64.0.0/10"), ip_network("fd7a:115c:a1e0::/48"))
MOST_RULES = 1000  # that concern pods
MOST_SENTENCES = 3

_LAST = {4: (1 << 32) - 1, 6: (1 << 128) - 1}
_EVERYTHING: dict[int, list[Span]] = {4: [(0, _LAST[4])], 6: [(0, _LAST[6])]}
_PROTOCOLS = {"": {TCP, UDP}, "tcp": {TCP}, "6": {TCP}, "udp": {UDP}, "17": {UDP}}
_OTHER_PROTOCOL = re.compile(
    r"icmp|igmp|ipv4|ip-in-ip|egp|igp|gre|esp|ah|ipv6-icmp|sctp|fc|[1-9][0-9]{0,2}"
)


@dataclass(frozen=True)
class Mesh:
    """The nodes whose pods must reach each other, as a policy sees them."""

    ranges: tuple[Network, ...]  # the whole ranges that pods get addresses from
    tags: tuple[str, ...]  # of the nodes
    user: str = ""  # the nodes' owner, if they have no tags
    pods: tuple[Network, ...] = ()  # parts of them that today's nodes have; empty if not known

    @property
    def name(self) -> str:
        """What a rule calls the nodes."""
        if self.tags:
            return self.tags[0]
        return self.user if "@" in self.user else f"{self.user}@"


@dataclass(frozen=True)
class Verdict:
    missing: tuple[str, ...] = ()  # what the rules that were understood do not allow
    unjudged: tuple[str, ...] = ()  # why the answer is not certain
    notes: tuple[str, ...] = ()
    form: str = "acls"  # where `rule` belongs: acls or grants
    rule: Mapping[str, Any] = field(default_factory=dict)  # allows everything that may be missing
    tag_owners: tuple[str, ...] = ()  # tags of the rule that the policy does not define

    @property
    def status(self) -> str:
        if self.unjudged:
            return UNKNOWN
        return MISSING if self.missing else ALLOWED

    def as_dict(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "missing": list(self.missing),
            "unjudged": list(self.unjudged),
            "notes": list(self.notes),
            "form": self.form,
            "rule": dict(self.rule),
            "remedy": self.remedy,
        }

    @property
    def remedy(self) -> str:
        """The rule to add, in one line to paste from."""
        text = f'add to "{self.form}" of the policy: {json.dumps(dict(self.rule))}'
        for tag in self.tag_owners:
            text += f' and to "tagOwners": {json.dumps(tag)}: []'
        return text


def rule_for(mesh: Mesh, form: str) -> dict[str, Any]:
    """The one rule that pods need: nodes and pod ranges reach each other, whatever the family."""
    names = [mesh.name, *map(str, mesh.ranges)]
    if form == "grants":
        return {"src": names, "dst": names, "ip": ["*"]}
    return {"action": "accept", "src": names, "dst": [f"{name}:*" for name in names]}


def judge(text: str, version: Number, mesh: Mesh) -> Verdict:
    """Whether all pods reach all pods by TCP and UDP on all ports; ICMP then passes as well."""
    if not text.strip():
        return Verdict(rule=rule_for(mesh, "acls"))
    try:
        policy = _Policy(Document(text).data, version, mesh)
    except HujsonError as wrong:
        return Verdict(
            unjudged=(f"the policy cannot be read: {wrong}",), rule=rule_for(mesh, "acls")
        )
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unjudged = [*policy.steering]
    if version < (0, 26):
        unjudged.append(f"Headscale {version[0]}.{version[1]} judges policies in another way")
    elif not policy.allows_all:
        missing = policy.gaps(mesh.ranges)
        if missing and mesh.pods and not policy.gaps(mesh.pods):
            missing = ()
            notes = (
                "Headscale's policy names the pod ranges of today's nodes, not all of "
                f"{', '.join(map(str, mesh.ranges))}: a node that is added later is cut off",
            )
        if missing:
            unjudged += policy.unclear
    return Verdict(
        missing=_few(missing),
        unjudged=_few(unjudged),
        notes=notes,
        form=policy.form,
        rule=rule_for(mesh, policy.form),
        tag_owners=tuple(
            tag for tag in (mesh.name,) if mesh.tags and tag not in policy.table("tagowners")
        ),
    )


@dataclass
class _Side:
    """The source or the destination of a rule."""

    spans: dict[int, list[Span]] = field(default_factory=lambda: {4: [], 6: []})
    nodes: Optional[bool] = False  # whether the nodes' own addresses are in it; None: unclear

    def add(self, other: _Side) -> None:
        for family in (4, 6):
            self.spans[family] += other.spans[family]
        if self.nodes is not True and other.nodes is not False:
            self.nodes = other.nodes

    def touches(self, ranges: Iterable[Network]) -> bool:
        return any(
            low <= int(network.broadcast_address) and int(network.network_address) <= high
            for network in ranges
            for low, high in self.spans[network.version]
        )


@dataclass(frozen=True)
class _Rule:
    source: _Side
    target: _Side
    protocols: frozenset[int]
    ports: Sequence[Span]


class _Policy:
    def __init__(self, data: Mapping[str, Any], version: Number, mesh: Mesh) -> None:
        self._data = _lowered(data)
        self._version, self._mesh = version, mesh
        self.rules: list[_Rule] = []
        self.unclear: list[str] = []  # rules that might allow what is missing
        self.steering: list[str] = []  # rules that might send pods' traffic elsewhere
        acls, grants = self._list("acls"), self._list("grants")
        if version < (0, 29):
            grants = None  # 0.27 and 0.28 refuse them, 0.26 ignores them
        self.form = "grants" if grants and not acls else "acls"
        # Up to 0.26 a policy without rules allows nothing.
        self.allows_all = acls is None and grants is None and version >= (0, 27)
        for name, rules, read in (("acls", acls, self._acl), ("grants", grants, self._grant)):
            for number, rule in enumerate(rules or ()):
                try:
                    self.rules += read(_lowered(rule), f"{name}[{number}]")
                except _Unclear as why:
                    self.unclear.append(f"{name}[{number}] could not be judged: {why}")

    def table(self, name: str) -> Mapping[str, Any]:
        found = self._data.get(name)
        return found if isinstance(found, Mapping) else {}

    def _list(self, name: str) -> Optional[list[Any]]:
        found = self._data.get(name)
        if found is None or isinstance(found, list):
            return found
        raise HujsonError(f"{name} is no list")

    # What rules say

    def _acl(self, rule: Mapping[str, Any], _name: str) -> list[_Rule]:
        _expect(rule, {"action", "proto", "src", "dst"})
        if rule.get("action") != "accept":
            raise _Unclear(f"action {rule.get('action')!r}")
        source = self._side(rule.get("src"))
        protocols = self._protocols(str(rule.get("proto") or "").lower())
        found = []
        for text in _texts(rule.get("dst")):
            alias, ports = _split(text)
            found.append(_Rule(source, self._alias(alias), protocols, _ports(ports)))
        return found

    def _grant(self, rule: Mapping[str, Any], name: str) -> list[_Rule]:
        _expect(rule, {"src", "dst", "ip", "app", "via"})
        source, target = self._side(rule.get("src")), self._side(rule.get("dst"))
        if rule.get("via"):
            if target.touches(self._mesh.ranges):
                self.steering.append(
                    f"{name} could not be judged: it sends traffic to pod ranges via "
                    f"{', '.join(_texts(rule['via']))}"
                )
            return []
        found = []
        for text in _texts(rule.get("ip") or []):
            protocol, _colon, ports = text.rpartition(":")
            protocols = self._protocols(protocol)
            found.append(_Rule(source, target, protocols, _ports(ports)))
        return found

    def _protocols(self, name: str) -> frozenset[int]:
        if name in _PROTOCOLS:
            return frozenset(_PROTOCOLS[name])
        if _OTHER_PROTOCOL.fullmatch(name):
            return frozenset()
        raise _Unclear(f"protocol {name!r}")

    def _side(self, names: Any) -> _Side:
        side = _Side()
        for name in _texts(names):
            side.add(self._alias(name))
        return side

    def _alias(self, name: str) -> _Side:
        """As Headscale resolves it. Only ranges and `*` have pods in them: all else is devices."""
        name = name.strip()
        if name == "*":
            # Since 0.29 a source of this kind is the tailnet and every approved route. The pods'
            # ranges are approved routes, so it makes no difference to them.
            return _Side({4: [*_EVERYTHING[4]], 6: [*_EVERYTHING[6]]}, True)
        network = _network(name)
        if network is not None:
            return self._range(network)
        if "@" in name:
            return _Side(nodes=self._is_owner(name))
        kind, _colon, _rest = name.partition(":")
        if kind == "group":
            members = self.table("groups").get(name)
            side = _Side()
            for member in _texts(members if members is not None else []):
                side.add(_Side(nodes=self._is_owner(member)))
            return side
        if kind == "tag":
            return _Side(nodes=name in self._mesh.tags)
        if kind == "autogroup":
            return self._autogroup(name)
        if ":" in name:
            raise _Unclear(f"{name!r} is unknown here")
        network = _network(str(self.table("hosts").get(name, "")))
        if network is None:
            raise _Unclear(f"host {name!r} has no address in the policy")
        return self._range(network)

    def _range(self, network: Network) -> _Side:
        side = _Side()
        first, last = int(network.network_address), int(network.broadcast_address)
        side.spans[network.version].append((first, last))
        tailnet = next(one for one in TAILNET if one.version == network.version)
        if network.overlaps(tailnet):
            # Which part of the tailnet the nodes have, or will have, is not known here.
            side.nodes = True if network.prefixlen <= tailnet.prefixlen else None
        return side

    def _autogroup(self, name: str) -> _Side:
        tagged = bool(self._mesh.tags)
        if name == "autogroup:danger-all":
            return self._alias("*")
        if name == "autogroup:internet":
            if all(network.is_private for network in self._mesh.ranges):
                return _Side()
            raise _Unclear(f"{name} may or may not contain the pod ranges")
        known = {"autogroup:member": not tagged, "autogroup:tagged": tagged}
        if name == "autogroup:self":
            return _Side(nodes=not tagged)
        if name not in known:
            raise _Unclear(f"{name!r} is unknown here")
        return _Side(nodes=known[name])

    def _is_owner(self, name: str) -> Optional[bool]:
        """Whether a user's devices are the nodes. Devices with tags belong to nobody."""
        if self._mesh.tags:
            return False
        if (name[:-1] if name.endswith("@") else name) == self._mesh.user:
            return True
        return False if name.endswith("@") else None  # it may be the owner's e-mail address

    # What follows from them

    def gaps(self, ranges: Iterable[Network]) -> tuple[str, ...]:
        """What pods of these ranges are not allowed, in words."""
        wanted: dict[int, list[Span]] = {4: [], 6: []}
        for network in ranges:
            span = int(network.network_address), int(network.broadcast_address)
            wanted[network.version].append(span)
        found: list[str] = []
        for family, spans in wanted.items():
            if spans:
                spans = _joined(spans)
                found += self._closed(family, spans)
                if self._version < (0, 29):
                    found += self._unseen(family, spans)
        return tuple(found)

    def _closed(self, family: int, spans: Sequence[Span]) -> list[str]:
        closed: dict[tuple[Span, ...], list[str]] = {}
        for protocol, name in ((TCP, "tcp"), (UDP, "udp")):
            boxes = [
                (rule.source.spans[family], rule.target.spans[family], rule.ports)
                for rule in self.rules
                if protocol in rule.protocols
                and rule.source.touches(self._mesh.ranges)
                and rule.target.touches(self._mesh.ranges)
            ]
            if len(boxes) > MOST_RULES:
                self.unclear.append(f"more than {MOST_RULES} rules concern pods")
                boxes = boxes[:MOST_RULES]
            for gap in _uncovered([spans, spans, [PORTS]], boxes):
                closed.setdefault(gap, []).append(name)
        return [
            f"no rule lets {_written(source, family)} reach {_written(target, family)}"
            + ("" if len(names) == 2 and ports == PORTS else f" by {' and '.join(names)}")
            + ("" if ports == PORTS else f" on ports {ports[0]} to {ports[1]}")
            for (source, target, ports), names in closed.items()
        ]

    def _unseen(self, family: int, spans: Sequence[Span]) -> list[str]:
        """Before 0.29 Headscale tells a node only of peers and routes that the node itself, not
        its pods, may reach; since 0.27 also of those that may reach the node."""
        reached = [[r.target.spans[family]] for r in self.rules if r.source.nodes]
        if not _uncovered([spans], reached):
            return []
        if self._version >= (0, 27):
            reaching = [[r.source.spans[family]] for r in self.rules if r.target.nodes]
            met = any(
                rule.source.nodes and (rule.target.nodes or rule.target.touches(self._mesh.ranges))
                for rule in self.rules
            )
            if met and not _uncovered([spans], reaching):
                return []
        if any(None in (rule.source.nodes, rule.target.nodes) for rule in self.rules):
            self.unclear.append(
                f"a rule has addresses that may be those of nodes with {self._mesh.name}"
            )
        ranges = ", ".join(_written(span, family) for span in spans)
        return [
            f"no rule lets {self._mesh.name} reach {ranges}, and Headscale {self._version[0]}."
            f"{self._version[1]} tells nodes only of ranges that they may reach themselves"
        ]


class _Unclear(Exception):
    """Why a rule is not understood."""


def _expect(rule: Mapping[str, Any], keys: set[str]) -> None:
    # headscale-admin keeps notes under keys that begin with #, and Headscale passes over them.
    strange = sorted(key for key in rule if key not in keys and not key.startswith("#"))
    if strange:
        raise _Unclear(f"it has {', '.join(strange)}")


def _lowered(data: Any) -> Mapping[str, Any]:
    """Headscale does not mind the case of keys."""
    if not isinstance(data, Mapping):
        raise _Unclear("it is no object")
    return {str(key).lower(): value for key, value in data.items()}


def _texts(given: Any) -> list[str]:
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise _Unclear(f"{given!r} is no list of names"[:200])
    return given


def _split(text: str) -> tuple[str, str]:
    """A destination and its ports, such as fd44::/48:* or [fd44::]/48:443."""
    alias, colon, ports = text.rpartition(":")
    if not colon or not alias:
        raise _Unclear(f"destination {text!r} has no ports")
    return re.sub(r"^\[([^]]*)\]", r"\1", alias), ports


def _ports(text: str) -> list[Span]:
    if text == "*":
        return [PORTS]
    found = []
    for part in text.split(","):
        numbers = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if not numbers:
            raise _Unclear(f"ports {text!r}"[:200])
        found.append((int(numbers[1]), int(numbers[2] or numbers[1])))
    return found


def _network(text: str) -> Optional[Network]:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The same, in order, with those that meet made one."""
    found: list[Span] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def _uncovered(
    wanted: Sequence[Sequence[Span]], boxes: Sequence[Sequence[Sequence[Span]]]
) -> list[tuple[Span, ...]]:
    """The parts of the product of `wanted` that no box has. A box has spans in each dimension.

    The first dimension is cut wherever a box begins or ends. Between two edges the same boxes
    apply, and for each such set of boxes the other dimensions are looked at once.
    """
    # One box that has it all, as is usual, saves the work of looking closer.
    if any(all(map(_has_all, box, wanted)) for box in boxes):
        return []
    if not wanted:
        return [()]
    # Those who begin and end at each edge; the wanted spans are number -1.
    changes: dict[int, tuple[list[int], list[int]]] = {}
    for number, spans in enumerate([wanted[0], *(box[0] for box in boxes)], -1):
        for low, high in _joined(spans):
            changes.setdefault(low, ([], []))[0].append(number)
            changes.setdefault(high + 1, ([], []))[1].append(number)
    edges = sorted(changes)
    here: set[int] = set()
    seen: dict[frozenset[int], list[tuple[Span, ...]]] = {}
    found: list[tuple[Span, list[tuple[Span, ...]]]] = []
    for start, end in zip(edges, edges[1:]):
        begins, ends = changes[start]
        here = (here | set(begins)) - set(ends)
        if -1 not in here:
            continue
        those = frozenset(here)
        if those not in seen:
            seen[those] = _uncovered(
                wanted[1:], [boxes[number][1:] for number in those if number >= 0]
            )
        if found and found[-1][0][1] + 1 == start and found[-1][1] == seen[those]:
            found[-1] = ((found[-1][0][0], end - 1), seen[those])
        else:
            found.append(((start, end - 1), seen[those]))
    return [(span, *gap) for span, gaps in found for gap in gaps]


def _has_all(spans: Sequence[Span], wanted: Sequence[Span]) -> bool:
    """Whether one of the spans has all that is wanted, which is in order."""
    return any(low <= wanted[0][0] and wanted[-1][1] <= high for low, high in spans)


def _written(span: Span, family: int) -> str:
    kind: Any = IPv4Address if family == 4 else IPv6Address
    first, last = kind(span[0]), kind(span[1])
    networks = list(summarize_address_range(first, last))
    return str(networks[0]) if len(networks) == 1 else f"{first}-{last}"


def _few(sentences: Sequence[str]) -> tuple[str, ...]:
    few = tuple(dict.fromkeys(sentences))
    if len(few) <= MOST_SENTENCES:
        return few
    return (*few[:MOST_SENTENCES], f"and {len(few) - MOST_SENTENCES} more")
