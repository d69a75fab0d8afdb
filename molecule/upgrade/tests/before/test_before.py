"""Nodes with the old versions."""

from __future__ import annotations

import json

from mesh_state import runs
from tailscale_site import OLDER


def test_the_former_versions_run(nodes, between_steps):
    """The version of the runtime is recorded, because it depends on the checkout."""
    found = {node: runs(host) for node, host in nodes.items()}
    assert {one["tailscale"] for one in found.values()} == {OLDER}
    (between_steps / "former.json").write_text(json.dumps(found))


def test_pods_talk_and_go_on_talking(traffic):
    traffic.pods()
    traffic.start()
