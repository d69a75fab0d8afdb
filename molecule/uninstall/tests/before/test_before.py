"""The nodes before HeadCNI."""

from __future__ import annotations

import json

from node_listing import listing


def test_everything_of_the_nodes_is_written_down(lab, nodes, between_steps):
    found = {node: listing(lab, node) for node in nodes}
    assert not [line for line in found["node1"] if "/opt/headcni" in line]
    assert [line for line in found["node2"] if line.startswith("pref") and "192.168.72" in line]
    (between_steps / "before.json").write_text(json.dumps(found))
