"""Which nodes have one pod CIDR, whether this run touches them or not."""

from __future__ import annotations

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
    found = clashes(["alpha", "beta", "unheard-of"], known, "alpha")
    assert len(found) == count
    assert all("beta" in one and "headcni_node_pod_cidr" in one for one in found)


def test_a_node_does_not_clash_with_itself():
    assert clashes(["alpha"], {"alpha": {FOUND: {"pod_cidrs": ["10.1.1.0/24"]}}}, "alpha") == []
