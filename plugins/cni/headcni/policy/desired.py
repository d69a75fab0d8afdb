"""What the nft table should hold, as data, and what has changed since the kernel last had it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Dict, List, NamedTuple, Optional

from ..datapath import nft_objects as nft
from ..datapath.netlink import Request
from ..datapath.nft_objects import Chain, Key, Set, Verdict

_ABSENT = Verdict("absent")  # what an element was that was not there

Elements = Dict[Key, Optional[Verdict]]


class Change(NamedTuple):
    """The requests of one transaction, and how many elements they touch."""

    requests: List[Request]
    elements: int


class Desired:
    """Sets with their elements, chains and counters."""

    def __init__(self) -> None:
        self.sets: Dict[str, Set] = {}
        self.elements: Dict[str, Elements] = {}
        self.chains: Dict[str, Chain] = {}
        self.counters: Dict[str, str] = {}  # and what each counts
        self._new_sets: Dict[str, None] = {}
        self._dead_sets: Dict[str, None] = {}
        self._touched: Dict[str, Elements] = {}  # the elements as the kernel has them
        self._new_chains: Dict[str, None] = {}
        self._rewritten: Dict[str, None] = {}
        self._dead_chains: Dict[str, None] = {}
        self._new_counters: Dict[str, None] = {}
        self._dead_counters: Dict[str, None] = {}

    def add_set(self, one: Set, elements: Optional[Elements] = None) -> None:
        self.sets[one.name] = one
        self.elements[one.name] = elements if elements is not None else {}
        self._new_sets[one.name] = None

    def drop_set(self, name: str) -> None:
        """To be called last before `taken`, as all that drops: a name that comes back before the
        kernel knows that it went would be the old object."""
        del self.sets[name], self.elements[name]
        self._touched.pop(name, None)
        if name in self._new_sets:
            del self._new_sets[name]
        else:
            self._dead_sets[name] = None

    def put(self, name: str, key: Key, verdict: Optional[Verdict] = None) -> None:
        held = self.elements[name]
        before = held.get(key, _ABSENT)
        if before != verdict:
            self._note(name, key, before)
            held[key] = verdict

    def remove(self, name: str, key: Key) -> None:
        held = self.elements[name]
        if key in held:
            self._note(name, key, held.pop(key))

    def _note(self, name: str, key: Key, before: Optional[Verdict]) -> None:
        if name not in self._new_sets:
            self._touched.setdefault(name, {}).setdefault(key, before)

    def add_chain(self, one: Chain) -> None:
        """Or write one that is there anew."""
        if self.chains.get(one.name) == one:
            return
        if one.name not in self.chains:
            self._new_chains[one.name] = None
        elif one.name not in self._new_chains:
            self._rewritten[one.name] = None
        self.chains[one.name] = one

    def drop_chain(self, name: str) -> None:
        del self.chains[name]
        self._rewritten.pop(name, None)
        if name in self._new_chains:
            del self._new_chains[name]
        else:
            self._dead_chains[name] = None

    def add_counter(self, name: str, counts: str) -> None:
        self.counters[name] = counts
        self._new_counters[name] = None

    def drop_counter(self, name: str) -> None:
        del self.counters[name]
        if name in self._new_counters:
            del self._new_counters[name]
        else:
            self._dead_counters[name] = None

    def everything(self, table: str) -> Change:
        """The requests that fill an empty table."""
        requests = _created(table, self.counters, self.chains.values())
        requests += self._sets(table, self.sets)
        for chain in self.chains.values():
            requests += nft.new_rules(table, chain)
        return Change(requests, self.size)

    def _sets(self, table: str, names: Iterable[str]) -> List[Request]:
        requests = []
        for number, name in enumerate(names, 1):
            requests.append(nft.new_set(table, self.sets[name], number))
            requests += nft.add_elements(table, name, self.elements[name])
        return requests

    def changes(self, table: str) -> Change:
        """The requests that make what the kernel last had to what is desired. What is needed comes
        first, then what leads to it, then what is needed no more goes."""
        new_chains = [self.chains[name] for name in self._new_chains]
        requests = _created(table, self._new_counters, new_chains)
        requests += self._sets(table, self._new_sets)
        for chain in new_chains:
            requests += nft.new_rules(table, chain)
        for name in self._rewritten:
            requests.append(nft.flush_chain(table, name))
            requests += nft.new_rules(table, self.chains[name])
        count = sum(len(self.elements[name]) for name in self._new_sets)
        for name, touched in self._touched.items():
            gone, come = _difference(touched, self.elements[name])
            count += len(gone) + len(come)
            if gone:
                requests += nft.remove_elements(table, name, gone)
            if come:
                requests += nft.add_elements(table, name, come)
        for name in self._dead_chains:
            requests.append(nft.flush_chain(table, name))
        requests += [nft.delete_set(table, name) for name in self._dead_sets]
        requests += [nft.delete_chain(table, name) for name in self._dead_chains]
        requests += [nft.delete_counter(table, name) for name in self._dead_counters]
        return Change(requests, count)

    def follow(self, before: Desired) -> None:
        """The kernel has what was desired before: only the difference is to be sent."""
        self.taken()
        self._new_sets = dict.fromkeys(name for name in self.sets if name not in before.sets)
        self._dead_sets = dict.fromkeys(name for name in before.sets if name not in self.sets)
        for name, had in before.elements.items():
            now = self.elements.get(name)
            if now is not None and now != had:
                touched = {key: had.get(key, _ABSENT) for key in {*had, *now}}
                self._touched[name] = {
                    key: was for key, was in touched.items() if now.get(key, _ABSENT) != was
                }
        for name, chain in self.chains.items():
            if name not in before.chains:
                self._new_chains[name] = None
            elif before.chains[name].rules != chain.rules:
                self._rewritten[name] = None
        self._dead_chains = dict.fromkeys(name for name in before.chains if name not in self.chains)
        for name in {*self.counters, *before.counters}:
            if name not in before.counters:
                self._new_counters[name] = None
            elif name not in self.counters:
                self._dead_counters[name] = None

    @property
    def drops_counters(self) -> bool:
        return bool(self._dead_counters)

    def taken(self) -> None:
        """The kernel has it now."""
        for pending in (
            *(self._new_sets, self._dead_sets, self._touched, self._new_chains),
            *(self._rewritten, self._dead_chains, self._new_counters, self._dead_counters),
        ):
            pending.clear()

    @property
    def size(self) -> int:
        return sum(map(len, self.elements.values()))


def _created(table: str, counters: Iterable[str], chains: Iterable[Chain]) -> List[Request]:
    requests = [nft.new_counter(table, name) for name in counters]
    for chain in chains:
        requests += nft.new_chain(table, chain)
    return requests


def _difference(
    before: Elements, now: Mapping[Key, Optional[Verdict]]
) -> tuple[list[Key], Elements]:
    """What has to go, and what has to come; an element with another verdict does both."""
    gone: list[Key] = []
    come: Elements = {}
    for key, was in before.items():
        wanted = now.get(key, _ABSENT)
        if wanted == was:
            continue
        if was != _ABSENT:
            gone.append(key)
        if wanted != _ABSENT:
            come[key] = wanted
    return gone, come
