"""Which nodes have one pod CIDR, whether this run touches them or not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_network
from random import Random
from typing import Any

import pytest
from ansible_collections.headcni.mesh.plugins.filter.pod_cidr_clashes import clashes

FOUND, GIVEN = "headcni_node_preflight", "headcni_node_pod_cidr"


@pytest.mark.parametrize(
    ("others", "count"),
    [
        ({FOUND: {"pod_cidrs": ["10.1.1.0/24"]}}, 1),
        ({FOUND: {"pod_cidrs": ["10.1.2.0/24"]}}, 0),
        ({FOUND: {"pod_cidrs": ["10.1.0.0/16"]}}, 1),
        ({FOUND: {"pod_cidrs": ["10.1.2.0/24", "fd00:1::/64"]}}, 1),
        ({FOUND: {"pod_cidrs": ["10.1.1.0/25", "fd00:1::/72"]}}, 2),
        ({GIVEN: "10.1.1.0/24"}, 1),  # not in this run: as the inventory has it
        (
            {FOUND: {"pod_cidrs": ["10.1.2.0/24"]}, GIVEN: "10.1.1.0/24"},
            0,
        ),  # what is found out wins
        ({GIVEN: "nonsense"}, 0),  # its own check says so
        ({}, 0),
    ],
)
def test_clashes_with_another_node(others, count):
    known = {"alpha": {FOUND: {"pod_cidrs": ["10.1.1.0/24", "fd00:1::/64"]}}, "beta": others}
    found = clashes(["alpha", "beta", "unheard-of"], known).get("alpha", [])
    assert len(found) == count
    assert all("beta" in one and "headcni_node_pod_cidr" in one for one in found)


def test_a_node_does_not_clash_with_itself():
    assert clashes(["alpha"], {"alpha": {FOUND: {"pod_cidrs": ["10.1.1.0/24"]}}}) == {}


def known_by(cidrs: Mapping[str, str]) -> dict[str, Any]:
    return {host: {FOUND: {"pod_cidrs": [cidr]}} for host, cidr in cidrs.items()}


def test_both_nodes_of_a_clash_are_told():
    found = clashes(["a", "b"], known_by({"a": "10.1.0.0/16", "b": "10.1.7.0/24"}))
    advice = "give one of them another by headcni_node_pod_cidr"
    assert found == {
        "a": [f"pod CIDR: 10.1.0.0/16 of a overlaps 10.1.7.0/24 of b: {advice}"],
        "b": [f"pod CIDR: 10.1.7.0/24 of b overlaps 10.1.0.0/16 of a: {advice}"],
    }


def test_five_are_named_and_the_rest_is_counted():
    hosts = [f"node{number}" for number in range(9)]
    found = clashes(hosts, known_by(dict.fromkeys(hosts, "10.1.1.0/24")))
    for host, said in found.items():
        assert len(said) == 6
        assert "overlaps those of 3 more nodes" in said[-1]
        assert all(f"of {host} overlaps" in one for one in said)
        assert not any(f"10.1.1.0/24 of {host}:" in one for one in said)
    assert len(found) == 9


def test_it_finds_the_same_pairs_as_comparing_each_with_each():
    random = Random(18)
    for _ in range(200):
        cidrs = {}
        for number in range(random.randrange(2, 7)):
            prefix = random.choice([16, 20, 23, 24])
            address = f"10.{random.randrange(2)}.{random.randrange(8)}.0"
            cidrs[f"n{number}"] = str(ip_network(f"{address}/{prefix}", strict=False))
        expected = {
            (a, b)
            for a in cidrs
            for b in cidrs
            if a != b and ip_network(cidrs[a]).overlaps(ip_network(cidrs[b]))
        }
        found = clashes(list(cidrs), known_by(cidrs))
        told = {(host, one.split(" of ")[2].split(":")[0]) for host in found for one in found[host]}
        assert told == expected


class Counted(Mapping[str, Any]):
    """Everyone's variables, and how often they were asked for: with Ansible each costs a
    millisecond."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known, self.reads = known, 0

    def __getitem__(self, host: str) -> Any:
        self.reads += 1
        return self.known[host]

    def __contains__(self, host: object) -> bool:
        return host in self.known

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


def test_each_nodes_variables_are_read_once():
    hosts = [f"node{number}" for number in range(300)]
    known = Counted(known_by({host: f"10.{n}.0.0/24" for n, host in enumerate(hosts[:200])}))
    clashes(hosts, known)
    assert known.reads == 200


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of Python it takes: a measure of its cost that no other load changes."""
    count = 0

    def trace(_frame: Any, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize(
    "cidr",
    [
        lambda number: f"10.{number // 256}.{number % 256}.0/24",
        lambda number: "10.1.1.0/24",  # all clash
        lambda number: "10.0.0.0/8" if number == 0 else f"10.{number // 256}.{number % 256}.0/24",
        lambda number: f"10.0.0.0/{8 + number % 16}",  # within one another
    ],
    ids=["apart", "the same", "one around all", "nested"],
)
def test_ten_times_the_nodes_cost_ten_times_the_work(cidr):
    def cost(count: int) -> int:
        cidrs = {f"node{number}": cidr(number) for number in range(count)}
        known = known_by(cidrs)
        return lines_run(lambda: clashes(list(cidrs), known))

    assert cost(1000) < 11 * cost(100)
