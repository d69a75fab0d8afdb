"""After rollback.yml, which changes only the runtime."""

from __future__ import annotations

import json

from mesh_state import runs
from tailscale_site import NEWER
from traffic import assert_unharmed
from two_versions import LATER


def test_nobody_missed_more_than_a_second(traffic):
    assert_unharmed(traffic.stop(), gap=1)


def test_the_former_runtime_runs(nodes, between_steps):
    former = json.loads((between_steps / "former.json").read_text())
    for node, host in nodes.items():
        assert runs(host) == {"runtime": former[node]["runtime"], "tailscale": NEWER}


def test_the_later_release_is_kept_on_the_node(host):
    assert [one for one in host.file("/opt/headcni/releases").listdir() if LATER in one]
