"""After HeadCNI has been removed."""

from __future__ import annotations

import json

from mesh_state import accepted_routes, at_headscale, owners
from patience import until


def test_the_other_network_has_charge_of_the_pods_again(host):
    folder = host.file("/etc/cni/net.d")
    assert folder.listdir() == ["05-other.conflist"]
    assert host.file("/etc/cni/net.d/05-other.conflist").content_string == (
        '{"cniVersion":"1.0.0","name":"other","plugins":[{"type":"bridge"}]}'
    )


def test_the_owners_tailscaled_is_untouched(nodes, between_steps):
    before = json.loads((between_steps / "owners.json").read_text())
    for node, host in nodes.items():
        assert owners(host) == before[node]


def test_it_has_the_routes_that_it_had_and_no_others(nodes, between_steps):
    before = json.loads((between_steps / "routes.json").read_text())
    for node, host in nodes.items():
        until(lambda host=host, node=node: accepted_routes(host) == before[node], 30)


def test_our_tailscaled_its_namespace_and_its_identity_are_gone(lab, host):
    assert not host.service("headcni-tailscaled").is_running
    assert not host.interface("headcni01").exists
    assert "headcni" not in host.check_output("ip netns")
    assert sorted(one["givenName"] for one in at_headscale(lab)) == ["node1", "node2"]
