"""Which nodes test which."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.pair_choice import ALL_UP_TO, chosen


def names(size):
    return [f"node{number}" for number in range(size)]


@pytest.mark.parametrize("size", [2, 3, ALL_UP_TO])
def test_few_nodes_all_ask_each_other(size):
    for name, others in chosen(names(size)).items():
        assert sorted(others) == sorted({*names(size)} - {name})


@pytest.mark.parametrize("size", [ALL_UP_TO + 1, 32, 33, 100, 1000])
def test_many_nodes_are_sampled_and_each_is_covered_in_both_directions(size):
    found = chosen(names(size))
    asked = {(name, other) for name, others in found.items() for other in others}
    assert all((other, name) in asked for name, other in asked)
    assert all(name != other for name, other in asked)
    assert {name for name, _ in asked} == {*names(size)}
    assert sum(map(len, found.values())) == len(asked)  # none twice
    assert {len(others) for others in found.values()} == {len(found["node0"])}
    assert len(found["node0"]) in (10, 12)


def test_every_pair_can_be_asked_for():
    assert {len(others) for others in chosen(names(50), every=True).values()} == {49}


def test_one_node_or_none_has_nobody_to_ask():
    assert chosen(["node1"]) == {"node1": []}
    assert chosen([]) == {}
