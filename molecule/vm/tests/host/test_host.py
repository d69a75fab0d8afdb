"""Virtual machines in host mode."""

from __future__ import annotations

from real_reboot import Mesh, assert_only_pods_are_gone, reboot_itself


def test_after_a_reboot_the_pods_of_before_are_gone_and_nothing_else_is(lab):
    assert_only_pods_are_gone(Mesh(lab), "vm1", reboot_itself)


def test_a_restart_of_networkd_does_not_cut_pods_off(lab):
    mesh = Mesh(lab)
    there, here = mesh.add("node1", "there"), mesh.add("vm1", "here")
    mesh.reaches("vm1", "here", there)
    lab.on("vm1", "systemctl restart systemd-networkd")
    mesh.settled("vm1")
    mesh.reaches("vm1", "here", there)
    mesh.reaches("node1", "there", here)
    mesh.remove("node1", "there")
    mesh.remove("vm1", "here")
