"""Nodes with pods, before the reboot."""

from __future__ import annotations

BOOT = "/proc/sys/kernel/random/boot_id"


def test_pods_talk(nodes, traffic, between_steps):
    traffic.pods()
    traffic.reached()
    (between_steps / "boot").write_text(nodes["node1"].file(BOOT).content_string)
