"""After upgrade.yml."""

from __future__ import annotations

from mesh_state import runs
from tailscale_site import NEWER
from traffic import assert_unharmed
from two_versions import LATER


def test_no_connection_has_ended(traffic):
    """A new tailscaled interrupts traffic for one to two seconds, which TCP survives."""
    assert_unharmed(traffic.stop(), gap=20)


def test_what_was_asked_for_is_what_runs(host):
    assert runs(host) == {"runtime": LATER, "tailscale": NEWER}


def test_pods_go_on_talking(traffic):
    traffic.start()
