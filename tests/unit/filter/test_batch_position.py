"""How far a play has come."""

from __future__ import annotations

import pytest
from ansible_collections.headcni.mesh.plugins.filter.batch_position import position

EVERY = [f"node{number}" for number in range(1, 1001)]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (["node31"], "node 31 of 1,000"),
        (["node1000"], "node 1,000 of 1,000"),
        (EVERY[30:35], "nodes 31 to 35 of 1,000"),
        (["node31", "node33", "node35"], "nodes 31 to 35 of 1,000"),  # two of them failed
        (EVERY, "nodes 1 to 1,000 of 1,000"),
        ([], "no node of 1,000"),
    ],
)
def test_a_batch_says_where_it_stands(batch, said):
    assert position(batch, EVERY) == said


def test_the_only_node_is_the_first_of_one():
    assert position(["node31"], ["node31"]) == "node 1 of 1"
