"""HeadCNI in daemon mode, together with the owner's tailscaled and the other network."""

from __future__ import annotations

import json

from mesh_state import accepted_routes, assert_in_mode, assert_pods_leave_by, owners


def test_the_owners_tailscaled_is_untouched(nodes, between_steps):
    before = json.loads((between_steps / "owners.json").read_text())
    for node, host in nodes.items():
        assert owners(host) == before[node]


def test_it_has_the_routes_that_it_had(nodes, between_steps):
    """Also the identities of the mesh's nodes, which are new in its tailnet."""
    before = json.loads((between_steps / "routes.json").read_text())
    for node, host in nodes.items():
        assert set(before[node]) <= set(accepted_routes(host))


def test_it_still_reaches_the_other_node(nodes):
    for node, host in nodes.items():
        key = owners(host)["key"]
        peers = json.loads(host.check_output("tailscale status --json"))["Peer"].values()
        his = [one for one in peers if "192.168.7" in str(one.get("PrimaryRoutes"))]
        assert len(his) == 1 and his[0]["PublicKey"] != key, node
        ping = f"tailscale ping --until-direct=false -c 3 {his[0]['TailscaleIPs'][0]}"
        assert "pong" in host.run(ping).stdout


def test_pods_have_our_network_and_leave_by_our_tailscaled(lab, nodes, pods):
    pods.reached()
    for node, host in nodes.items():
        assert_in_mode(lab, node, "daemon")
        assert_pods_leave_by("headcni01", node, host, pods.addresses)
        files = host.file("/etc/cni/net.d").listdir()
        assert [one for one in files if one.endswith(".conflist")] == ["10-headcni.conflist"]


def test_stopping_the_owners_tailscaled_costs_pods_nothing(nodes, pods, between_steps):
    first, second = nodes
    lasting = f"ping -q -c 200 -i 0.1 -W 2 {pods.addresses[second]} >/run/lasting.log"
    unit = "systemd-run --quiet --collect --unit=lasting ip netns exec pod"
    nodes[first].check_output(f"{unit} sh -c '{lasting}'")
    for host in nodes.values():
        host.check_output("systemctl stop tailscaled; sleep 1; systemctl start tailscaled")
    nodes[first].run("while systemctl -q is-active lasting; do sleep 0.5; done")
    assert "200 received" in nodes[first].file("/run/lasting.log").content_string
    for host in nodes.values():
        host.check_output(
            "for i in $(seq 60); do ip rule | grep -q ^5270: && exit; sleep 0.5; done; exit 1"
        )
    # This is a new process. The next step checks that it is still the same.
    found = {node: owners(host) for node, host in nodes.items()}
    (between_steps / "owners.json").write_text(json.dumps(found))
