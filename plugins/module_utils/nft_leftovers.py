# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which nft tables nobody needs any more when HeadCNI and Tailscale leave a node."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from typing import Any

ITS_MARK = re.compile(r"\b0x0*ff0000\b")  # the bits of packet marks that belong to tailscaled


def tables() -> list[tuple[str, str, bool]]:
    """Family, name, and whether the table holds anything that is not tailscaled's.

    tailscaled leaves its own rules behind. A chain without rules may still drop packets, by its
    policy."""
    said = run("nft", "-j", "list", "ruleset")
    listed = json.loads(said.stdout)["nftables"] if said.returncode == 0 else []
    marking = rules_with_its_mark(run("nft", "-a", "list", "ruleset").stdout)
    used = {
        (entry[kind]["family"], entry[kind]["table"])
        for entry in listed
        for kind in ("rule", "set", "map")
        if kind in entry and not (kind == "rule" and is_tailscales(entry["rule"], marking))
    }
    used |= {
        (entry["chain"]["family"], entry["chain"]["table"])
        for entry in listed
        if "chain" in entry and not is_idle(entry["chain"])
    }
    names = [
        (entry["table"]["family"], entry["table"]["name"]) for entry in listed if "table" in entry
    ]
    return [(family, name, (family, name) in used) for family, name in names]


def is_tailscales(rule: Mapping[str, Any], marking: set[tuple[str, str, int]]) -> bool:
    """Whether it is in a chain of tailscaled, jumps to one, or uses tailscaled's mark bits."""
    jumps = any(
        (part.get("jump") or {}).get("target", "").startswith("ts-") for part in rule["expr"]
    )
    return (
        jumps
        or rule["chain"].startswith("ts-")
        or (rule["family"], rule["table"], rule["handle"]) in marking
    )


def rules_with_its_mark(text: str) -> set[tuple[str, str, int]]:
    """Family, table and handle of each rule, from nft's text output: its JSON does not show the
    content of matches and targets that iptables has created."""
    found = set()
    family = table = ""
    for line in text.splitlines():
        if line.startswith("table "):
            family, table = line.split()[1:3]
        rule, handle = line.partition(" # handle ")[::2]
        if rule.startswith("\t\t") and ITS_MARK.search(rule):
            found.add((family, table, int(handle)))
    return found


def is_idle(chain: Mapping[str, Any]) -> bool:
    """Whether a chain without rules does nothing, and was created by iptables or tailscaled."""
    if "hook" in chain:
        return bool(chain.get("policy", "accept") == "accept")
    return bool(chain["name"].startswith("ts-"))


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
