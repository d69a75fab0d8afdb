"""The nodes with HeadCNI."""

from __future__ import annotations

import json

from node_listing import differences, listing


def test_there_is_much_to_take_away(lab, nodes, between_steps):
    before = json.loads((between_steps / "before.json").read_text())
    for node in nodes:
        assert len(differences(before[node], listing(lab, node))) > 50


def test_pods_talk_and_go(nodes, traffic):
    traffic.pods()
    traffic.reached()
    traffic.no_pods()
    for host in nodes.values():
        host.check_output("rm -r /var/lib/cni/results")  # cnitool's own
