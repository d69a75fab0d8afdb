"""site.yml on bare machines."""

from __future__ import annotations

from mesh_state import at_headscale, pod_ranges


def test_headscale_has_approved_each_nodes_own_ranges_and_no_others(lab, nodes):
    known = {one["givenName"]: one for one in at_headscale(lab)}
    assert sorted(known) == sorted(nodes)
    for node in nodes:
        own = [*pod_ranges(node)]
        assert sorted(known[node]["approvedRoutes"]) == own
        assert sorted(known[node]["subnetRoutes"]) == own


def test_no_key_is_left_on_a_node(host):
    assert host.run("grep -rl hskey- /run /etc /root /tmp /var/log /var/tmp /opt").stdout == ""
