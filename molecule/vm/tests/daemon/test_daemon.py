"""Virtual machines in daemon mode."""

from __future__ import annotations

from real_reboot import Mesh, assert_only_pods_are_gone, pull_the_plug


def test_after_a_pulled_plug_the_pods_of_before_are_gone_and_nothing_else_is(lab):
    assert_only_pods_are_gone(Mesh(lab), "vm2", pull_the_plug)
