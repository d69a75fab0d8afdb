"""node1 has had a hard reboot; the pod on node2 is the one from before."""

from __future__ import annotations

import json

from mesh_state import assert_in_mode, assert_pods_leave_by
from traffic import Traffic

BOOT = "/proc/sys/kernel/random/boot_id"


def test_it_was_a_reboot(nodes, between_steps):
    assert nodes["node1"].file(BOOT).content_string != (between_steps / "boot").read_text()


def test_nothing_is_left_of_the_pods_of_before(lab, nodes):
    lab.wait("node1", "headcnictl status >/dev/null", 60)
    assert json.loads(nodes["node1"].check_output("headcnictl pods --json")) == []
    links = json.loads(nodes["node1"].check_output("ip -j link show master headcni0 || echo []"))
    assert links == []


def test_the_node_is_back_in_its_mode(lab):
    assert_in_mode(lab, "node1", "daemon")


def test_a_new_pod_and_the_one_from_before_talk(lab, nodes):
    new, old = Traffic(lab, ["node1"]), Traffic(lab, ["node2"])
    new.pods()
    old.find_pods()
    both = Traffic(lab, ["node1", "node2"], {**new.addresses, **old.addresses})
    both.reached()
    for node, host in nodes.items():
        assert_pods_leave_by("headcni01", node, host, both.addresses)
