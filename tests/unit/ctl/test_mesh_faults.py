"""headcnictl diagnose in large tailnets."""

from __future__ import annotations

import json
import time

import pytest
from tailscaled_stub import Tailscaled, peer

from headcni import settings
from headcni.ctl import mesh_faults

NODES = 2000
PORTS = {"First": 0, "Last": 65535}


@pytest.fixture
def tailnet(tmp_path):
    """Nodes with a range of pods each, and tailscaled's rules as the test wants them."""
    server = Tailscaled(str(tmp_path / "sock"))
    own = ["10.0.0.0/24"]
    server.self_known = {"AllowedIPs": own, "PrimaryRoutes": own}
    for number in range(2, NODES):
        cidr = [f"10.{number >> 8}.{number & 255}.0/24"]
        known = {"TailscaleIPs": [f"100.64.{number >> 8}.{number & 255}"]}
        server.peers.append(peer(number, AllowedIPs=cidr, PrimaryRoutes=cidr, **known))
    sections = {
        "tailscale": {"socket": {"path": str(tmp_path / "sock")}},
        "network": {"podCIDR": {"nodeLocal": own[0], "base": "10.0.0.0/8"}},
    }
    server.config, mistakes = settings.parse(json.dumps(sections).encode())
    assert not mistakes
    yield server
    server.end()


def test_the_policy_is_asked_about_the_pods_of_every_node(tailnet):
    every = [str(one["AllowedIPs"][0]) for one in tailnet.peers]
    to_nodes = {"Srcs": every, "Dsts": [{"Net": "100.64.0.1/32", "Ports": PORTS}], "IPProto": [6]}
    to_pods = {"Srcs": every, "Dsts": [{"Net": "10.0.0.0/24", "Ports": PORTS}], "IPProto": [6]}
    tailnet.filter = [*[to_nodes] * 50, to_pods]
    began = time.process_time()
    assert list(mesh_faults.policy(tailnet.config)) == []
    took = time.process_time() - began
    print(f"{took:.2f} s")
    assert took < 10
    tailnet.filter = [to_nodes, {**to_pods, "Srcs": every[:-1]}]
    [finding] = mesh_faults.policy(tailnet.config)
    assert every[-1] in finding.found
