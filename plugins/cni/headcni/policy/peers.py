"""Which pods of the cluster each peer of a rule selects, kept up to date as pods come and go.

Pods with the same labels in the same namespace are a group: selectors are compared with groups, of
which there are far fewer than pods. A set of the nft table holds the addresses of the pods that a
peer selects, and all rules with that peer share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Dict, FrozenSet, NamedTuple, Optional, Set, Tuple

from ..datapath import nft_objects as nft
from ..model import Address
from ..sha import sha256
from .desired import Desired
from .layout import ADDRESS_TYPES, PEERS, VERSIONS
from .objects import Key, Labels, Pod, Requirement, Selector


class PodPeer(NamedTuple):
    """Pods of one namespace, or of those that a selector selects."""

    pods: Selector
    namespace: str = ""
    namespaces: Optional[Selector] = None
    port: Optional[Tuple[int, str, int]] = None  # only pods whose port of this name has the number

    @property
    def anyhow(self) -> PodPeer:
        """Whatever ports the pods have."""
        return self._replace(port=None)

    def __str__(self) -> str:
        where = self.namespace or f"namespaces ({self.namespaces})"
        named = f" with {self.port[1]}={self.port[2]}" if self.port else ""
        return f"pods ({self.pods}) of {where}{named}"


PortName = Tuple[int, str]  # protocol and name
_GroupKey = Tuple[str, FrozenSet[Tuple[str, str]]]


class _Group:
    __slots__ = ("labels", "namespace", "peers", "pods")

    def __init__(self, namespace: str, labels: Labels) -> None:
        self.namespace, self.labels = namespace, labels
        self.pods: Set[Key] = set()
        self.peers: Set[PodPeer] = set()  # those that select it, without ports


class _Member:
    """A pod that selectors can select, with the addresses that are its own."""

    __slots__ = ("addresses", "group", "lost", "pod")

    def __init__(self, pod: Pod, group: _Group) -> None:
        self.pod, self.group = pod, group
        self.addresses: Dict[bytes, int] = {}  # and their IP versions
        # Addresses that it still claims, and that a later pod has; None in most pods.
        self.lost: Optional[Dict[bytes, int]] = None

    def numbers(self, name: PortName) -> Set[int]:
        return {one.number for one in self.pod.ports if (one.protocol, one.name) == name}


class _PeerSet:
    """Addresses of pods that any of these peers selects."""

    __slots__ = ("name", "peers", "uses")

    def __init__(self, name: str, peers: FrozenSet[PodPeer]) -> None:
        self.name, self.peers, self.uses = name, peers, 0


class _Numbers:
    """Which numbers a port's name has with the pods that a peer selects."""

    __slots__ = ("name", "pods", "uses")

    def __init__(self, name: PortName) -> None:
        self.name, self.uses = name, 0
        self.pods: Counter[int] = Counter()


class Peers:
    """The pods of the cluster and the sets with their addresses in the desired table."""

    def __init__(
        self,
        desired: Desired,
        labels_of: Callable[[str], Labels],
        on_numbers: Callable[[PodPeer, PortName], None],
    ) -> None:
        """`labels_of` a namespace; `on_numbers` is told when a port's name means other numbers."""
        self._desired, self._labels_of, self._on_numbers = desired, labels_of, on_numbers
        self._members: Dict[Key, _Member] = {}
        self._holders: Dict[bytes, Key] = {}  # whose an address is
        self._losers: Dict[bytes, Dict[Key, None]] = {}  # who claims it, too; the last one at last
        self._groups: Dict[_GroupKey, _Group] = {}
        self._of_namespace: Dict[str, Dict[_GroupKey, _Group]] = {}
        self._labelled: Dict[Tuple[str, str], Set[_GroupKey]] = {}
        self._known: Counter[PodPeer] = Counter()  # peers without ports, and how many use each
        self._own: Dict[str, Set[PodPeer]] = {}  # those of one namespace
        self._everywhere: Set[PodPeer] = set()  # those with a selector for namespaces
        self._sets: Dict[FrozenSet[PodPeer], _PeerSet] = {}
        self._sets_of: Dict[PodPeer, Set[_PeerSet]] = {}  # by peers without ports
        self._numbers: Dict[Tuple[PodPeer, PortName], _Numbers] = {}
        self._names_of: Dict[PodPeer, Set[PortName]] = {}

    @property
    def count(self) -> int:
        return len(self._holders)

    # Pods

    def put(self, pod: Pod, addresses: Iterable[Address]) -> None:
        """A pod as it is now. An address that another pod had is taken from that, which does not
        get it back by saying again that it has it: it is about to be deleted."""
        group = self._group_of(pod.namespace, pod.labels)
        before = self._members.get(pod.key)
        had: Dict[bytes, int] = {}
        if before is not None and before.pod.ports == pod.ports and before.group is group:
            member = before
            member.pod = pod
        else:
            lost: Dict[bytes, int] = {}
            if before is not None:
                had, lost = dict(before.addresses), dict(before.lost or {})
            self.remove(pod.key, keep_group=group, pass_on=False)
            member = self._members[pod.key] = _Member(pod, group)
            for packed, version in lost.items():
                self._lose(member, packed, version)
            group.pods.add(pod.key)
            self._count_numbers(member, 1)
        self._assign(member, {one.packed: one.version for one in addresses})
        self._pass_on(had)

    def remove(self, key: Key, keep_group: Optional[_Group] = None, pass_on: bool = True) -> None:
        """With `pass_on`, others that claim its addresses get them."""
        member = self._members.get(key)
        if member is None:
            return
        self._assign(member, {}, pass_on)
        self._count_numbers(member, -1)
        del self._members[key]
        member.group.pods.discard(key)
        if not member.group.pods and member.group is not keep_group:
            self._forget_group(member.group)

    def holder(self, packed: bytes) -> Optional[Key]:
        return self._holders.get(packed)

    def _assign(self, member: _Member, addresses: Dict[bytes, int], pass_on: bool = True) -> None:
        key, had = member.pod.key, member.addresses
        gone = {packed: had[packed] for packed in had.keys() - addresses.keys()}
        come = {packed: addresses[packed] for packed in addresses.keys() - had.keys()}
        for packed in list(member.lost or ()):
            if packed in come and packed in self._holders:
                del come[packed]
            else:
                self._find(member, packed)
        self._write(member, gone, False)
        for packed in gone:
            del had[packed]
            self._holders.pop(packed, None)
        for packed, version in come.items():
            other = self._members.get(self._holders.get(packed, ("", "")))
            if other is not None:
                self._write(other, {packed: version}, False)
                other.addresses.pop(packed, None)
                self._lose(other, packed, version)
            self._holders[packed] = key
            had[packed] = version
        self._write(member, come, True)
        if pass_on:
            self._pass_on(gone)

    def _pass_on(self, addresses: Dict[bytes, int]) -> None:
        """To the last one that claims them, if nobody has them."""
        for packed, version in addresses.items():
            claimants = self._losers.get(packed)
            if claimants and packed not in self._holders:
                heir = self._members[next(reversed(claimants))]
                self._find(heir, packed)
                self._holders[packed] = heir.pod.key
                heir.addresses[packed] = version
                self._write(heir, {packed: version}, True)

    def _lose(self, member: _Member, packed: bytes, version: int) -> None:
        member.lost = {**(member.lost or {}), packed: version}
        self._losers.setdefault(packed, {})[member.pod.key] = None

    def _find(self, member: _Member, packed: bytes) -> None:
        """No longer lost."""
        lost = dict(member.lost or {})
        del lost[packed]
        member.lost = lost or None
        del self._losers[packed][member.pod.key]
        if not self._losers[packed]:
            del self._losers[packed]

    def _write(self, member: _Member, addresses: Dict[bytes, int], there: bool) -> None:
        if not addresses:
            return
        for one in self._sets_with(member):
            for packed, version in addresses.items():
                if there:
                    self._desired.put(f"{one.name}_{version}", packed)
                else:
                    self._desired.remove(f"{one.name}_{version}", packed)

    def _sets_with(self, member: _Member) -> Set[_PeerSet]:
        found = set()
        for peer in member.group.peers:
            for one in self._sets_of.get(peer, ()):
                if _is_in(member, one.peers):
                    found.add(one)
        return found

    # Groups

    def _group_of(self, namespace: str, labels: Labels) -> _Group:
        key = namespace, frozenset(labels.items())
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(namespace, labels)
            self._of_namespace.setdefault(namespace, {})[key] = group
            for label in labels.items():
                self._labelled.setdefault(label, set()).add(key)
            candidates = self._own.get(namespace, set()) | self._everywhere
            group.peers = {peer for peer in candidates if self._selects(peer, group)}
        return group

    def _forget_group(self, group: _Group) -> None:
        key = group.namespace, frozenset(group.labels.items())
        del self._groups[key]
        of_namespace = self._of_namespace[group.namespace]
        del of_namespace[key]
        if not of_namespace:
            del self._of_namespace[group.namespace]
        for label in group.labels.items():
            self._labelled[label].discard(key)
            if not self._labelled[label]:
                del self._labelled[label]

    def _selects(self, peer: PodPeer, group: _Group) -> bool:
        if peer.namespaces is not None:
            if not peer.namespaces.matches(self._labels_of(group.namespace)):
                return False
        elif peer.namespace != group.namespace:
            return False
        return peer.pods.matches(group.labels)

    def _groups_with(self, peer: PodPeer) -> Iterator[_Group]:
        """All that a peer may select, found by one of the labels that it wants, if it wants any."""
        if peer.namespaces is None:
            yield from self._of_namespace.get(peer.namespace, {}).values()
            return
        wanted = [one for one in peer.pods.requirements if one.operator == "In"]
        if not wanted:
            for namespace, groups in self._of_namespace.items():
                if peer.namespaces.matches(self._labels_of(namespace)):
                    yield from groups.values()
            return
        rarest = min(wanted, key=lambda one: sum(1 for _unused in self._labelled_with(one)))
        for key in set(self._labelled_with(rarest)):
            yield self._groups[key]

    def _labelled_with(self, wanted: Requirement) -> Iterator[_GroupKey]:
        for value in wanted.values:
            yield from self._labelled.get((wanted.key, value), ())

    def namespace_changed(self, name: str) -> None:
        """Its labels have: peers that select namespaces may select other groups now."""
        for group in self._of_namespace.get(name, {}).values():
            now = {peer for peer in self._everywhere if self._selects(peer, group)}
            now |= {peer for peer in group.peers if peer.namespaces is None}
            if now == group.peers:
                continue
            members = [self._members[key] for key in group.pods]
            had = {member.pod.key: self._sets_with(member) for member in members}
            for member in members:
                self._count_numbers(member, -1)
            group.peers = now
            for member in members:
                self._count_numbers(member, 1)
                before, after = had[member.pod.key], self._sets_with(member)
                for packed, version in member.addresses.items():
                    for one in before - after:
                        self._desired.remove(f"{one.name}_{version}", packed)
                    for one in after - before:
                        self._desired.put(f"{one.name}_{version}", packed)

    # Peers

    def _use(self, peer: PodPeer) -> None:
        """Have the groups know the peer, which has no port."""
        self._known[peer] += 1
        if self._known[peer] > 1:
            return
        if peer.namespaces is None:
            self._own.setdefault(peer.namespace, set()).add(peer)
        else:
            self._everywhere.add(peer)
        for group in self._groups_with(peer):
            if self._selects(peer, group):
                group.peers.add(peer)

    def _leave(self, peer: PodPeer) -> None:
        self._known[peer] -= 1
        if self._known[peer]:
            return
        del self._known[peer]
        for group in self._groups_with(peer):
            group.peers.discard(peer)
        if peer.namespaces is not None:
            self._everywhere.discard(peer)
            return
        self._own[peer.namespace].discard(peer)
        if not self._own[peer.namespace]:
            del self._own[peer.namespace]

    # Sets

    def use_set(self, peers: FrozenSet[PodPeer]) -> str:
        """The name of the set, which is made if nobody uses it yet; without the IP version."""
        one = self._sets.get(peers)
        if one is None:
            one = self._sets[peers] = _PeerSet(_name(peers), peers)
            for peer in {peer.anyhow for peer in peers}:
                self._use(peer)
                self._sets_of.setdefault(peer, set()).add(one)
            self._fill(one)
        one.uses += 1
        return one.name

    def leave_set(self, peers: FrozenSet[PodPeer]) -> None:
        one = self._sets[peers]
        one.uses -= 1
        if one.uses:
            return
        del self._sets[peers]
        for peer in {peer.anyhow for peer in peers}:
            self._sets_of[peer].discard(one)
            if not self._sets_of[peer]:
                del self._sets_of[peer]
            self._leave(peer)
        for version in VERSIONS:
            self._desired.drop_set(f"{one.name}_{version}")

    def _fill(self, one: _PeerSet) -> None:
        elements: Dict[int, Dict[nft.Key, Optional[nft.Verdict]]] = {4: {}, 6: {}}
        for member in self._selected({peer.anyhow for peer in one.peers}):
            if _is_in(member, one.peers):
                for packed, version in member.addresses.items():
                    elements[version][packed] = None
        comment = "; ".join(sorted(map(str, one.peers)))
        for version in VERSIONS:
            name, kind = f"{one.name}_{version}", (ADDRESS_TYPES[version],)
            self._desired.add_set(nft.Set(name, kind, comment=comment), elements[version])

    def _selected(self, peers: Iterable[PodPeer]) -> Iterator[_Member]:
        seen: Set[Key] = set()
        for peer in peers:
            for group in self._groups_with(peer):
                if peer in group.peers:
                    yield from (self._members[key] for key in group.pods - seen)
                    seen |= group.pods

    def selected_by(self, peer: PodPeer) -> int:
        """How many addresses the peer's set has or would have, whatever ports the pods have."""
        return sum(
            len(self._members[key].addresses)
            for group in self._groups_with(peer)
            if self._selects(peer, group)
            for key in group.pods
        )

    # Names of ports

    def use_numbers(self, peer: PodPeer, name: PortName) -> Tuple[int, ...]:
        """Those that the pods have for the name; `on_numbers` tells of changes from now on."""
        numbers = self._numbers.get((peer, name))
        if numbers is None:
            numbers = self._numbers[peer, name] = _Numbers(name)
            self._use(peer)
            self._names_of.setdefault(peer, set()).add(name)
            for member in self._selected([peer]):
                numbers.pods.update(member.numbers(name))
        numbers.uses += 1
        return tuple(sorted(numbers.pods))

    def leave_numbers(self, peer: PodPeer, name: PortName) -> None:
        numbers = self._numbers[peer, name]
        numbers.uses -= 1
        if numbers.uses:
            return
        del self._numbers[peer, name]
        self._names_of[peer].discard(name)
        if not self._names_of[peer]:
            del self._names_of[peer]
        self._leave(peer)

    def _count_numbers(self, member: _Member, by: int) -> None:
        if not member.pod.ports or not self._names_of:
            return
        for peer in member.group.peers:
            for name in self._names_of.get(peer, ()):
                counted = self._numbers[peer, name].pods
                before = set(counted)
                for number in member.numbers(name):
                    counted[number] += by
                    if not counted[number]:
                        del counted[number]
                if set(counted) != before:
                    self._on_numbers(peer, name)


def _is_in(member: _Member, peers: Iterable[PodPeer]) -> bool:
    """Of a member in a group that some peers select."""
    return any(
        peer.anyhow in member.group.peers
        and (peer.port is None or peer.port[2] in member.numbers(peer.port[:2]))
        for peer in peers
    )


def _name(peers: FrozenSet[PodPeer]) -> str:
    return PEERS + digest(sorted(map(repr, peers)))


def digest(of: object) -> str:
    """A name for something, by what it says. It is so long that nobody can write a policy whose
    parts get the names of another policy's parts."""
    return sha256(repr(of).encode()).hexdigest()[:24]
