"""The owner's tailscaled and the other network, before HeadCNI."""

from __future__ import annotations

import json

from mesh_state import accepted_routes, owners


def test_the_owners_state_is_written_down(nodes, between_steps):
    for number, host in enumerate(nodes.values(), 1):
        other = 3 - number
        host.check_output(
            f"for i in $(seq 30); do ip route show table 52 | grep -q 192.168.7{other}.0/24"
            " && exit; sleep 1; done; exit 1"
        )
    found = {node: owners(host) for node, host in nodes.items()}
    (between_steps / "owners.json").write_text(json.dumps(found))
    routes = {node: accepted_routes(host) for node, host in nodes.items()}
    (between_steps / "routes.json").write_text(json.dumps(routes))
