"""What of a node's firewall goes with a Tailscale that goes."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import nft_leftovers

TAILSCALES = "meta mark & 0xff0000 == 0x40000 accept"


@pytest.fixture
def tables(monkeypatch):
    """Whether each table of a firewall is somebody else's too, in a namespace of its own."""
    if shutil.which("nft") is None:
        pytest.fail("nft makes the firewall: install nftables")

    def asked(rules: str) -> dict[str, bool]:
        def run(*argv: str) -> subprocess.CompletedProcess[str]:
            shown = subprocess.run(
                ["unshare", "--net", "sh", "-c", 'nft -f /dev/stdin && "$@"', "sh", *argv],
                input=rules,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            assert shown.returncode == 0, shown.stderr
            return shown

        monkeypatch.setattr(nft_leftovers, "run", run)
        return {name: used for _family, name, used in nft_leftovers.tables()}

    return asked


HOOK = "type filter hook forward priority 0; policy"


@pytest.mark.parametrize(
    ("inside", "used"),
    [
        ("", False),
        (f"chain FORWARD {{ {HOOK} accept; }}", False),
        (f"chain FORWARD {{ {HOOK} accept; {TAILSCALES}; }}", False),
        (f"chain ts-forward {{ }} chain FORWARD {{ {HOOK} accept; }}", False),
        ("chain ts-forward { tcp dport 22 accept; }", False),
        (f"chain ts-forward {{ }} chain FORWARD {{ {HOOK} accept; jump ts-forward; }}", False),
        (f"chain FORWARD {{ {HOOK} accept; meta mark & 0xff == 0x4 accept; }}", True),
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


LEFT_BY_IPTABLES = """\
table ip mangle { # handle 29
\tchain PREROUTING { # handle 1
\t\ttype filter hook prerouting priority mangle; policy accept;
\t\tct state related,established ct mark and 0xff0000 != 0x0 counter packets 24 bytes 6005 meta mark set ct mark and 0xff0000 # handle 2
\t\tct mark and 0xff00 != 0x0 counter packets 1 bytes 60 accept # handle 5
\t}
}
table ip6 mangle { # handle 30
\tchain OUTPUT { # handle 3
\t\ttype route hook output priority mangle; policy accept;
\t\tct state new meta mark & 0x00ff0000 != 0x00000000 counter packets 7 bytes 651 ct mark set mark and 0xff0000 # handle 4
\t}
}
"""  # noqa: E501


def test_a_rule_of_iptables_tells_by_its_text_that_it_is_about_tailscales_mark():
    found = nft_leftovers.rules_with_its_mark(LEFT_BY_IPTABLES)
    assert found == {("ip", "mangle", 2), ("ip6", "mangle", 4)}
