"""From policies, pods and namespaces to the desired nft table, no more of it anew than has changed.

Each pod of this node has a profile for each direction: the policies that isolate it. A profile is a
chain for each IP version, and pods with the same policies share it. The ports of its rules are
divided into spans (ports.py), so that a packet's port is looked up once, in a verdict map; each
span leads to a chain with the peers that may use it. If ranges overlap so much that the spans would
be too large, every few peers have a map of their own. Chains never change: other policies are other
chains, and the addresses of the pods are led to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Dict, FrozenSet, List, NamedTuple, Optional, Set, Tuple, TypeVar

from ..datapath import nft_objects as nft
from ..datapath.nft_objects import ACCEPT, DROP, Chain, Verdict
from ..model import Address, Owner
from . import blocks, layout
from .bindings import Binding
from .desired import Desired
from .layout import PEER_FIELD, PROTOCOL_NAMES, VERSIONS
from .objects import (
    EGRESS,
    EVERYTHING,
    INGRESS,
    Block,
    Key,
    Labels,
    Namespace,
    Peer,
    Pod,
    Policy,
    Port,
    Rule,
    World,
)
from .peers import Peers, PodPeer, PortName, digest
from .ports import LAST_PORT, Allowed, Sources, Span, TooMany, spans

ANYONE = "anyone"  # a source beside PodPeer and Block
MOST_SETS = 4  # of pods in one chain; more are joined to one set
DIRECTIONS = (INGRESS, EGRESS)
MOST_PAIRS = 256  # of a peer and a port in one rule; beyond, its peers are one source
MOST_SPREAD = 8192  # what the groups of sources of one map may weigh together
FEW_JOINED = 8  # sets of joined peers that a profile may have, however large they are
MOST_JOINED = 200_000  # addresses in more of them
# What a profile may need. A policy that goes beyond it isolates its pods and allows nothing.
MOST_ALLOWED = 20_000  # sources with ranges of ports
MOST_ELEMENTS = 1_000_000  # addresses of the pods that its peers select
MOST_UNUSED = 250  # profiles that may wait for their next pod
LONGEST_PREFIX = 120  # of a line of the kernel's log


class Profile(NamedTuple):
    """The chains for the policies that isolate a pod in one direction."""

    name: str
    direction: str
    policies: Tuple[Key, ...]
    is_open: bool  # some rule allows everything
    sets: Tuple[FrozenSet[PodPeer], ...]  # those that its chains use
    numbers: FrozenSet[Tuple[PodPeer, PortName]]
    shared: Tuple[str, ...]  # chains and sets that other profiles may use, too
    maps: Tuple[str, ...]
    too_large: Tuple[Key, ...]  # policies whose rules it leaves out


class _ProfileKey(NamedTuple):
    """Pods with the same share a profile."""

    direction: str
    policies: Tuple[Key, ...]
    allowed: FrozenSet[Allowed]  # who may use which ports
    everywhere: FrozenSet[object]  # who may use all of them
    # The names of ports whose numbers decide about `allowed`. Two rules with different names may
    # allow the same today, and something else as soon as a pod has one of them.
    numbers: FrozenSet[Tuple[PodPeer, PortName]]
    too_large: Tuple[Key, ...]


class _Joined:
    """Peers of a rule with many ports, as one source."""

    __slots__ = ("name", "sources")

    def __init__(self, sources: Iterable[object]) -> None:
        self.sources = frozenset(sources)
        self.name = f"joined {digest(sorted(map(repr, self.sources)))}"

    def __repr__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Joined) and self.name == other.name


class _Rules:
    """What policies allow a pod in one direction."""

    def __init__(self) -> None:
        self.allowed: Set[Allowed] = set()
        self.everywhere: Set[object] = set()  # sources that may use all ports
        self.numbers: Dict[Tuple[PodPeer, PortName], Tuple[int, ...]] = {}  # of names of ports
        self.too_large: List[Key] = []

    def taken(self, more: _Rules) -> None:
        self.allowed |= more.allowed
        self.everywhere |= more.everywhere


_T = TypeVar("_T")


class Compiler:
    """Holds the world and the bindings. Each method changes `desired` at once."""

    def __init__(self, deny_unknown: bool = True, log_per_second: int = 0, node: str = "") -> None:
        """Profiles for pods of the node `node` are made before their ADD comes."""
        self._node = node
        self.world = World.of(complete=False)
        self.bindings: Dict[Owner, Binding] = {}
        self.desired = Desired()
        self._deny_unknown, self._log_per_second = deny_unknown, log_per_second
        self._peers = Peers(self.desired, self._labels_of, self._numbers_changed)
        self._by_pod: Dict[Key, Set[Owner]] = {}
        self._by_namespace: Dict[str, Set[Owner]] = {}  # of bindings
        self._owners: Dict[bytes, Owner] = {}  # whose an address of this node is
        self._last: Dict[Owner, Pod] = {}  # as it was when it was known
        self._policies_of: Dict[str, Set[Key]] = {}  # by namespace
        self._links: Counter[str] = Counter()
        self._profiles: Dict[_ProfileKey, Profile] = {}
        self._users: Counter[_ProfileKey] = Counter()  # of those that are used
        self._isolating = 0  # how many of these do not allow everything
        self._fixed: Optional[Tuple[Verdict, Verdict]] = None  # on unknown pods, and on groups
        self._of: Dict[Tuple[Owner, str], Optional[_ProfileKey]] = {}  # None: open
        self._shared: Counter[str] = Counter()
        self._stale: Set[Owner] = set()
        self._unknown: Set[Owner] = set()  # bindings whose pods are not known
        self._awaited: Set[Owner] = set()  # that other processes are adding
        self._found: Dict[object, Optional[_ProfileKey]] = {}  # by what a pod looks like
        for one in layout.sets().values():
            self.desired.add_set(one)
        self.desired.add_counter(layout.UNKNOWN, "packets of pods that are not known")
        for chain in layout.chains(self._verdict_on_unknown, ACCEPT).values():
            self.desired.add_chain(chain)

    # What is known

    def load(self, world: World, bindings: Iterable[Binding]) -> None:
        """Of an empty compiler."""
        self.world = world
        for policy in world.policies.values():
            self._note_policy(policy)
        for binding in bindings:
            self._note_binding(binding)
        for pod in world.pods.values():
            self._place(pod)
        self._stale.update(self.bindings)
        self.settle()

    def pod_changed(self, key: Key, pod: Optional[Pod]) -> None:
        before = self.world.pods.get(key)
        if pod is None:
            self.world.pods.pop(key, None)
            self._peers.remove(key)
        else:
            self.world.pods[key] = pod
            self._place(pod)
        if before is None or pod is None or _matters_here(before, pod):
            self._stale |= self._by_pod.get(key, set())
            if pod is not None and self._node and pod.node == self._node:
                self._prepare(pod)
        self.settle()

    def namespace_changed(self, name: str, namespace: Optional[Namespace]) -> None:
        before = self._labels_of(name)
        if namespace is None:
            self.world.namespaces.pop(name, None)
        else:
            self.world.namespaces[name] = namespace
        if self._labels_of(name) != before:
            self._peers.namespace_changed(name)
        self.settle()

    def policy_changed(self, key: Key, policy: Optional[Policy]) -> None:
        before = self.world.policies.get(key)
        if before == policy:
            return
        self._found.clear()
        if policy is None:
            del self.world.policies[key]
            self._policies_of[key[0]].discard(key)
        else:
            self.world.policies[key] = policy
            self._note_policy(policy)
        selectors = [one.pods for one in (before, policy) if one is not None]
        for owner in self._by_namespace.get(key[0], ()):
            pod = self._pod_of(self.bindings[owner])
            if pod is not None and any(one.matches(pod.labels) for one in selectors):
                self._stale.add(owner)
        self.settle()

    def bind(self, binding: Binding) -> None:
        """A pod that is added. Whoever had its addresses has them no more."""
        others = {self._owners.get(one.packed) for one in (*binding.addresses, *binding.more)}
        for owner in (*others, binding.owner):
            if owner in self.bindings:
                self._take_away(self.bindings[owner])
        losers = {self._peers.holder(one.packed) for one in binding.addresses}
        self._note_binding(binding)
        for key in (*losers, binding.key):
            pod = self.world.pods.get(key) if key is not None else None
            if pod is not None:
                self._place(pod)
        self._stale.add(binding.owner)
        self.settle()

    def expect(self, link: str) -> None:
        """Close what is not known behind this link from now on: a pod will be added there."""
        self.desired.put(layout.LINKS, layout.link_key(link))

    def awaits(self, owner: Owner) -> None:
        """Until it has arrived, the pod may be there without being known."""
        self._awaited.add(owner)
        self._set_fixed_chains()

    def arrived(self, owner: Owner) -> None:
        """The process that was to add it has ended."""
        self._awaited.discard(owner)
        self._set_fixed_chains()

    def unbind(self, owner: Owner) -> None:
        binding = self.bindings.get(owner)
        if binding is not None:
            self._take_away(binding)
            self.settle()

    def deny_unknown(self, deny: bool) -> None:
        self._deny_unknown = deny
        self.settle()

    # Answers

    @property
    def denies_unknown(self) -> bool:
        return self._verdict_on_unknown == DROP

    @property
    def peers(self) -> int:
        return self._peers.count

    @property
    def profiles(self) -> Sequence[Profile]:
        return tuple(self._profiles.values())

    def isolating(self, owner: Owner, direction: str) -> Tuple[Key, ...]:
        """The policies that isolate the pod."""
        key = self._of.get((owner, direction))
        return self._profiles[key].policies if key is not None else ()

    def left_out(self, owner: Owner, direction: str) -> Tuple[Key, ...]:
        """Of these, those that are too large: they isolate the pod, and allow nothing."""
        key = self._of.get((owner, direction))
        return self._profiles[key].too_large if key is not None else ()

    def is_known(self, binding: Binding) -> bool:
        return binding.exempt or self._pod_of(binding) is not None

    # The work

    def settle(self) -> None:
        """Lead the addresses of pods to their profiles."""
        while self._stale:
            owner = self._stale.pop()
            binding = self.bindings.get(owner)
            if binding is not None:
                self._lead(binding)
        if len(self._profiles) - len(self._users) > MOST_UNUSED:
            self._drop_unused()
        self._set_fixed_chains()

    def sweep(self) -> None:
        """Drop profiles that nobody uses. Between two sweeps they stay, since the next pod often
        has the policies of one that has just gone."""
        self._drop_unused()

    @property
    def _verdict_on_unknown(self) -> Verdict:
        return DROP if self._deny_unknown and self.world.policies else ACCEPT

    def _set_fixed_chains(self) -> None:
        unknown = self.denies_unknown and bool(self._unknown or self._awaited)
        on_groups = DROP if self._isolating or unknown else ACCEPT
        verdicts = self._verdict_on_unknown, on_groups
        if verdicts != self._fixed:
            self.desired.add_chain(layout.unknown_chain(self._verdict_on_unknown))
            self.desired.add_chain(layout.groups_chain(on_groups))
            self._fixed = verdicts

    def _labels_of(self, namespace: str) -> Labels:
        return self.world.labels_of(namespace)

    def _note_policy(self, policy: Policy) -> None:
        self._policies_of.setdefault(policy.namespace, set()).add(policy.key)

    def _note_binding(self, binding: Binding) -> None:
        owner = binding.owner
        self.bindings[owner] = binding
        self._by_pod.setdefault(binding.key, set()).add(owner)
        self._by_namespace.setdefault(binding.key[0], set()).add(owner)
        self._owners.update((one.packed, owner) for one in (*binding.addresses, *binding.more))
        if binding.link and not binding.exempt:
            self._links[binding.link] += 1
            self.desired.put(layout.LINKS, layout.link_key(binding.link))

    def _take_away(self, binding: Binding) -> None:
        """All that the pod had. The link stays while others use it: addresses that are not known
        are closed there."""
        owner, key = binding.owner, binding.key
        del self.bindings[owner]
        self._stale.discard(owner)
        self._unknown.discard(owner)
        self._last.pop(owner, None)
        _discard(self._by_pod, key, owner)
        _discard(self._by_namespace, key[0], owner)
        for one in (*binding.addresses, *binding.more):
            if self._owners.get(one.packed) == owner:
                del self._owners[one.packed]
        for name, element in layout.keys_of((*binding.addresses, *binding.more)):
            self.desired.remove(name, element)
        for direction in DIRECTIONS:
            self._release(owner, direction)
        if binding.link and not binding.exempt:
            self._links[binding.link] -= 1
            if not self._links[binding.link]:
                del self._links[binding.link]
                self.desired.remove(layout.LINKS, layout.link_key(binding.link))
        pod = self.world.pods.get(key)
        if pod is not None:
            self._place(pod)

    def _place(self, pod: Pod) -> None:
        """Have the pod in the sets of the peers that select it."""
        if not pod.counts:
            self._peers.remove(pod.key)
            return
        self._peers.put(pod, self._addresses_of(pod))

    def _addresses_of(self, pod: Pod) -> List[Address]:
        """On this node, what the pod really has counts. An address that another pod of this node
        has is not the pod's any more, whatever the API server still says."""
        own = [self.bindings[owner] for owner in self._by_pod.get(pod.key, ())]
        here = [one for one in own if pod.is_sandbox(one.ref.uid)]
        if here:
            return [address for binding in here for address in binding.addresses]
        return [one for one in pod.addresses if self._is_free(one, pod.key)]

    def _is_free(self, address: Address, key: Key) -> bool:
        owner = self._owners.get(address.packed)
        return owner is None or self.bindings[owner].key == key

    def _pod_of(self, binding: Binding) -> Optional[Pod]:
        """One that was deleted while its sandbox runs is treated as it was."""
        pod = self.world.pods.get(binding.key)
        if pod is not None and pod.is_sandbox(binding.ref.uid):
            self._last[binding.owner] = pod
        return self._last.get(binding.owner)

    def _numbers_changed(self, peer: PodPeer, name: PortName) -> None:
        self._found.clear()
        for (owner, _unused), key in self._of.items():
            if key is not None and (peer, name) in self._profiles[key].numbers:
                self._stale.add(owner)

    # Profiles

    def _lead(self, binding: Binding) -> None:
        """Write the elements of a pod's addresses."""
        pod = self._pod_of(binding)
        self._unknown.discard(binding.owner)
        if pod is None and not binding.exempt:
            self._unknown.add(binding.owner)
            for name, element in layout.keys_of((*binding.addresses, *binding.more)):
                self.desired.remove(name, element)
            for direction in DIRECTIONS:
                self._release(binding.owner, direction)
            return
        isolated = False
        for direction in DIRECTIONS:
            profile = None
            if pod is not None and not binding.exempt and not pod.host_network:
                profile = self._take(binding.owner, direction, pod)
            else:
                self._release(binding.owner, direction)
            isolated = isolated or profile is not None
            for address in (*binding.addresses, *binding.more):
                verdict = ACCEPT
                if profile is not None:
                    verdict = Verdict("goto", f"{profile.name}_{address.version}")
                name = layout.pods_map(direction, address.version)
                self.desired.put(name, address.packed, verdict)
        for address in (*binding.addresses, *binding.more):
            name, element = layout.self_set(address.version), layout.self_key(address)
            if isolated:
                self.desired.put(name, element)
            else:
                self.desired.remove(name, element)

    def _take(self, owner: Owner, direction: str, pod: Pod) -> Optional[Profile]:
        """The profile of a pod, which is made if no other pod has it; None if it is open."""
        key = self._profile_for(direction, pod)
        if key is None:
            self._release(owner, direction)
            return None
        if self._of.get((owner, direction)) != key:
            self._count_user(key, 1)
            self._release(owner, direction)
            self._of[owner, direction] = key
        profile = self._profiles[key]
        return None if profile.is_open else profile

    def _prepare(self, pod: Pod) -> None:
        """Have the profiles of a pod whose ADD will come, so that it need not wait for them."""
        if pod.counts and pod.key not in self._by_pod:
            for direction in DIRECTIONS:
                self._profile_for(direction, pod)

    def _profile_for(self, direction: str, pod: Pod) -> Optional[_ProfileKey]:
        """None if no policy isolates the pod. The profile is made if no other pod has it. What was
        found for a pod holds for all that look the same, until a policy or a number changes."""
        look = direction, pod.namespace, frozenset(pod.labels.items()), pod.ports
        if look not in self._found:
            self._found[look] = self._find_profile(direction, pod)
        return self._found[look]

    def _find_profile(self, direction: str, pod: Pod) -> Optional[_ProfileKey]:
        policies = [
            self.world.policies[key]
            for key in sorted(self._policies_of.get(pod.namespace, ()))
            if self.world.policies[key].rules(direction) is not None
            and self.world.policies[key].pods.matches(pod.labels)
        ]
        if not policies:
            return None
        rules = self._allowed(policies, direction, pod)
        key = _ProfileKey(
            direction,
            tuple(policy.key for policy in policies),
            frozenset(rules.allowed),
            frozenset(rules.everywhere),
            frozenset(rules.numbers),
            tuple(rules.too_large),
        )
        if key not in self._profiles:
            self._profiles[key] = self._build(*key)
            return key
        for peer, name in rules.numbers:  # the profile counts them once
            self._peers.leave_numbers(peer, name)
        return key

    def _release(self, owner: Owner, direction: str) -> None:
        key = self._of.pop((owner, direction), None)
        if key is not None:
            self._count_user(key, -1)

    def _count_user(self, key: _ProfileKey, by: int) -> None:
        before = self._users[key]
        self._users[key] = before + by
        if not before or not before + by:
            self._isolating += 0 if self._profiles[key].is_open else by
        if not before + by:
            del self._users[key]

    def _allowed(self, policies: Iterable[Policy], direction: str, pod: Pod) -> _Rules:
        """What they allow together, without those that are too large for the rest."""
        found = _Rules()
        for policy in policies:
            more = _Rules()
            more.numbers = found.numbers
            for rule in policy.rules(direction) or ():
                self._allow_by(rule, policy, direction, pod, more)
                if len(more.allowed) > MOST_ALLOWED:
                    break
            if self._has_room(found, more):
                found.taken(more)
            else:
                found.too_large.append(policy.key)
        return found

    def _allow_by(
        self, rule: Rule, policy: Policy, direction: str, pod: Pod, found: _Rules
    ) -> None:
        sources = _sources(rule.peers, policy.namespace)
        if rule.ports is None:
            found.everywhere.update(sources)
        ports = rule.ports or ()
        together = sources
        if len(sources) > 1 and len(sources) * len(ports) > MOST_PAIRS:
            together = [_Joined(sources)]
        for port in ports:
            if not isinstance(port.port, str):
                spans_of_port = [_span(port)]
            elif direction == INGRESS:
                spans_of_port = [(number, number) for number in _numbers_of(pod, port)]
            else:
                found.allowed.update(self._allowed_by_name(sources, port, found.numbers))
                continue
            found.allowed.update(
                Allowed(one, port.protocol, first, last)
                for one in together
                for first, last in spans_of_port
            )

    def _has_room(self, found: _Rules, more: _Rules) -> bool:
        """Whether a profile may have both."""
        if len(found.allowed) + len(more.allowed) > MOST_ALLOWED:
            return False
        sources = {one.source for rules in (found, more) for one in rules.allowed}
        listed = _flat(sources | found.everywhere | more.everywhere)
        peers = {one for one in listed if isinstance(one, PodPeer)}
        if len(peers) * self._peers.count <= MOST_ELEMENTS:
            return True
        return sum(map(self._peers.selected_by, peers)) <= MOST_ELEMENTS

    def _allowed_by_name(
        self,
        sources: Iterable[object],
        port: Port,
        numbers: Dict[Tuple[PodPeer, PortName], Tuple[int, ...]],
    ) -> List[Allowed]:
        """A port's name means something only with pods, and not the same with each. Blocks have no
        names, and anyone who has one is a pod."""
        found = []
        for source in sources:
            if source == ANYONE:
                source = PodPeer(EVERYTHING, namespaces=EVERYTHING)
            if not isinstance(source, PodPeer):
                continue
            name = port.protocol, str(port.port)
            if (source, name) not in numbers:
                numbers[source, name] = self._peers.use_numbers(source, name)
            for number in numbers[source, name]:
                peer = source._replace(port=(*name, number))
                found.append(Allowed(peer, port.protocol, number, number))
        return found

    def _build(
        self,
        direction: str,
        keys: Tuple[Key, ...],
        allowed: FrozenSet[Allowed],
        everywhere: FrozenSet[object],
        numbers: FrozenSet[Tuple[PodPeer, PortName]],
        too_large: Tuple[Key, ...],
    ) -> Profile:
        # In the name is what the chain says and for whom, so that the same has the same name.
        said = *(sorted(map(repr, one)) for one in (allowed, everywhere, numbers)), keys
        name = f"{direction.lower()}_{digest(said)}"
        if ANYONE in everywhere:
            return Profile(name, direction, keys, True, (), numbers, (), (), too_large)
        parts = _Parts()
        by_ports = self._by_ports([one for one in allowed if one.source not in everywhere])
        self.desired.add_counter(name, f"denied {direction} of {_listed(keys)}")
        for version in VERSIONS:
            rules = self._rules(everywhere, direction, version, parts)
            for number, (protocol, listed) in enumerate(by_ports):
                elements: Dict[nft.Key, Optional[Verdict]] = {}
                for span in listed:
                    verdict = self._verdict(span.sources, direction, version, parts)
                    if verdict is not None:
                        elements[_port(span.first), _port(span.last)] = verdict
                if elements:
                    leads = f"{name}_{version}_{PROTOCOL_NAMES[protocol]}_{number}"
                    self.desired.add_set(_ports_map(leads, elements), _plain(elements))
                    parts.maps.append(leads)
                    rules.append(nft.port_verdict(protocol, leads))
            rules += self._denied(name, direction, keys)
            comment = f"{direction}: {_listed(keys)}"
            self.desired.add_chain(Chain(f"{name}_{version}", tuple(rules), comment=comment))
        return Profile(
            name,
            direction,
            keys,
            False,
            tuple(parts.sets),
            numbers,
            tuple(parts.shared),
            tuple(parts.maps),
            too_large,
        )

    def _by_ports(self, allowed: Sequence[Allowed]) -> List[Tuple[int, Tuple[Span, ...]]]:
        """The spans of each map, with the protocol: one map for a protocol, or several with a few
        sources each, which need no more than the rules together."""
        try:
            whole = spans(allowed, MOST_SPREAD, _weight)
        except TooMany:
            whole = None
        if whole is not None and self._may_join(whole):
            return list(whole.items())
        by_source: Dict[str, List[Allowed]] = {}
        for one in allowed:
            by_source.setdefault(repr(one.source), []).append(one)
        names = sorted(by_source)
        found: List[Tuple[int, Tuple[Span, ...]]] = []
        for at in range(0, len(names), MOST_SETS):
            few = [one for name in names[at : at + MOST_SETS] for one in by_source[name]]
            found += spans(few).items()
        return found

    def _may_join(self, by_protocol: Dict[int, Tuple[Span, ...]]) -> bool:
        groups = {span.sources for listed in by_protocol.values() for span in listed}
        joined = [one for one in groups if len(one) > MOST_SETS]
        return len(joined) <= FEW_JOINED or len(joined) * self._peers.count <= MOST_JOINED

    def _denied(self, name: str, direction: str, keys: Tuple[Key, ...]) -> List[bytes]:
        rules = []
        if self._log_per_second:
            prefix = f"headcni denies {direction} {_listed(keys)}"[:LONGEST_PREFIX] + " "
            rules.append(nft.limit(self._log_per_second) + nft.log(prefix))
        return [*rules, nft.count(name) + nft.verdict(DROP)]

    def _verdict(
        self, sources: Sources, direction: str, version: int, parts: _Parts
    ) -> Optional[Verdict]:
        """What a span of ports leads to; None if nobody of this IP version may use it."""
        if ANYONE in sources:
            return ACCEPT
        if (sources, version) not in parts.verdicts:
            parts.verdicts[sources, version] = self._leads_to(sources, direction, version, parts)
        return parts.verdicts[sources, version]

    def _leads_to(
        self, sources: Sources, direction: str, version: int, parts: _Parts
    ) -> Optional[Verdict]:
        rules = self._rules(sources, direction, version, parts)
        if not rules:
            return None
        name = f"{'from' if direction == INGRESS else 'to'}_{digest(rules)}"
        if parts.share(name, self._shared):
            self.desired.add_chain(Chain(name, tuple(rules)))
        return Verdict("jump", name)

    def _rules(
        self, sources: Iterable[object], direction: str, version: int, parts: _Parts
    ) -> List[bytes]:
        """That accept what comes from these sources, or goes to them."""
        listed = frozenset(_flat(sources))
        pods = frozenset(one for one in listed if isinstance(one, PodPeer))
        rules = []
        field = PEER_FIELD[direction]
        for together in [pods] if len(pods) > MOST_SETS else [frozenset([one]) for one in pods]:
            name = parts.pods(together, self._peers)
            rules.append(nft.address_in(version, field, f"{name}_{version}"))
        of_blocks = [one for one in listed if isinstance(one, Block)]
        ranges = blocks.ranges(of_blocks, version)
        if ranges:
            name = f"blocks_{digest(ranges)}_{version}"
            if parts.share(name, self._shared):
                kind = (layout.ADDRESS_TYPES[version],)
                one = nft.Set(name, kind, interval=True)
                self.desired.add_set(one, dict.fromkeys(ranges))
            rules.append(nft.address_in(version, field, name))
        return [rule + nft.verdict(ACCEPT) for rule in sorted(rules)]

    def _drop_unused(self) -> None:
        """Chains that lead to others go first, then what only they used."""
        self._found.clear()
        for key in [key for key in self._profiles if key not in self._users]:
            profile = self._profiles.pop(key)
            for peer, port_name in profile.numbers:
                self._peers.leave_numbers(peer, port_name)
            if profile.is_open:
                continue
            for version in VERSIONS:
                self.desired.drop_chain(f"{profile.name}_{version}")
            self.desired.drop_counter(profile.name)
            for name in profile.maps:
                self.desired.drop_set(name)
            for name in profile.shared:
                self._shared[name] -= 1
                if self._shared[name]:
                    continue
                del self._shared[name]
                if name in self.desired.chains:
                    self.desired.drop_chain(name)
                else:
                    self.desired.drop_set(name)
            for peers in profile.sets:
                self._peers.leave_set(peers)


class _Parts:
    """What a profile's chains use, while they are made."""

    def __init__(self) -> None:
        self.sets: Dict[FrozenSet[PodPeer], str] = {}
        self.shared: Dict[str, None] = {}
        self.maps: List[str] = []
        self.verdicts: Dict[Tuple[Sources, int], Optional[Verdict]] = {}

    def pods(self, peers: FrozenSet[PodPeer], known: Peers) -> str:
        """The name of the set with the addresses of these peers."""
        if peers not in self.sets:
            self.sets[peers] = known.use_set(peers)
        return self.sets[peers]

    def share(self, name: str, users: Counter[str]) -> bool:
        """Use a part of that name; whether it has to be made."""
        if name in self.shared:
            return False
        self.shared[name] = None
        users[name] += 1
        return users[name] == 1


def _discard(mapping: Dict[_T, Set[Owner]], key: _T, owner: Owner) -> None:
    mapping[key].discard(owner)
    if not mapping[key]:
        del mapping[key]


def _matters_here(before: Pod, now: Pod) -> bool:
    """Whether the pod's own rules may differ: its addresses come from its ADD."""
    return before._replace(addresses=(), phase="") != now._replace(addresses=(), phase="")


def _sources(peers: Optional[Tuple[Peer, ...]], namespace: str) -> List[object]:
    if peers is None:
        return [ANYONE]
    found: List[object] = []
    for peer in peers:
        if peer.block is not None:
            found.append(peer.block)
        elif peer.namespaces is None:
            found.append(PodPeer(peer.pods, namespace))
        else:
            found.append(PodPeer(peer.pods, namespaces=peer.namespaces))
    return found


def _flat(sources: Iterable[object]) -> Iterator[object]:
    for one in sources:
        if isinstance(one, _Joined):
            yield from one.sources
        else:
            yield one


def _weight(source: object) -> int:
    return sum(1 + len(one.exceptions) if isinstance(one, Block) else 1 for one in _flat([source]))


def _span(port: Port) -> Tuple[int, int]:
    if not isinstance(port.port, int):
        return 0, LAST_PORT
    return port.port, port.end or port.port


def _numbers_of(pod: Pod, port: Port) -> Set[int]:
    return {
        one.number for one in pod.ports if (one.protocol, one.name) == (port.protocol, port.port)
    }


def _port(number: int) -> bytes:
    return number.to_bytes(2, "big")


def _ports_map(name: str, elements: Iterable[nft.Key]) -> nft.Set:
    """Of single ports if it can be, as those are found quicker."""
    interval = any(key[0] != key[1] for key in elements)
    return nft.Set(name, ("inet_service",), is_map=True, interval=interval)


def _plain(elements: Dict[nft.Key, Optional[Verdict]]) -> Dict[nft.Key, Optional[Verdict]]:
    if any(key[0] != key[1] for key in elements):
        return elements
    return {key[0]: verdict for key, verdict in elements.items()}  # type: ignore[misc]


def _listed(keys: Iterable[Key]) -> str:
    return ", ".join("/".join(key) for key in keys)
