"""The nodes after uninstall.yml."""

from __future__ import annotations

import json

from mesh_state import at_headscale
from node_listing import differences, listing


def test_every_node_is_as_it_was(lab, nodes, between_steps):
    before = json.loads((between_steps / "before.json").read_text())
    for node in nodes:
        assert differences(before[node], listing(lab, node)) == []


def test_headscale_knows_only_the_owners_node_and_only_his_route(lab):
    assert [(one["givenName"], one["approvedRoutes"]) for one in at_headscale(lab)] == [
        ("node2", ["192.168.72.0/24"])
    ]
