"""The systemd units: what must not be in them. tests/lab/test_daemon.py sees them at work."""

from __future__ import annotations

from pathlib import Path

import pytest

UNITS = Path(__file__).parents[3] / "plugins/cni/units"
NEW_PROC = ("ProtectControlGroups", "ProtectKernelTunables", "ProtectProc", "ProcSubset")


@pytest.mark.parametrize("name", ["headcni-daemon.service", "headcni-own-networks.service"])
def test_what_opens_the_store_sees_the_boot_id_that_everybody_sees(name):
    """systemd mounts a new /proc for each of these, without a container's own boot id over it."""
    settings = [line.partition("=")[0] for line in (UNITS / name).read_text().splitlines()]
    assert [one for one in settings if one in (*NEW_PROC, "MountAPIVFS")] == []
