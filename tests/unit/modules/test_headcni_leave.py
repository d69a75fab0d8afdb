"""What of a node's firewall goes with a Tailscale that goes."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from ansible_collections.headcni.mesh.plugins.modules import headcni_leave

TAILSCALES = "meta mark & 0xff0000 == 0x40000 accept"


@pytest.fixture
def tables(monkeypatch):
    """Whether each table of a firewall is somebody else's too, in a namespace of its own."""
    if shutil.which("nft") is None:
        pytest.fail("nft makes the firewall: install nftables")

    def asked(rules: str) -> dict[str, bool]:
        script = "nft -f /dev/stdin && nft -j list ruleset"
        shown = subprocess.run(
            ["unshare", "--net", "sh", "-c", script],
            input=rules,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
        monkeypatch.setattr(headcni_leave, "run", lambda *_: shown)
        return {name: used for _family, name, used in headcni_leave.tables()}

    return asked


HOOK = "type filter hook forward priority 0; policy"


@pytest.mark.parametrize(
    ("inside", "used"),
    [
        ("", False),
        (f"chain FORWARD {{ {HOOK} accept; }}", False),
        (f"chain FORWARD {{ {HOOK} accept; {TAILSCALES}; }}", False),
        (f"chain ts-forward {{ }} chain FORWARD {{ {HOOK} accept; }}", False),
        (f"chain FORWARD {{ {HOOK} accept; tcp dport 22 accept; }}", True),
        ("set mine { type ipv4_addr; }", True),
        # To delete these would let through what was dropped, or take away what somebody made.
        (f"chain FORWARD {{ {HOOK} drop; }}", True),
        ("chain mine { }", True),
    ],
)
def test_a_table_is_left_if_anything_in_it_is_somebody_elses(tables, inside, used):
    lines = f"table ip filter {{ {inside} }}".replace("{", "{\n").replace("}", "\n}\n")
    assert tables(lines) == {"filter": used}
