"""Everything of a node that an installation could change, line by line."""

from __future__ import annotations

import json
import re

from lab_command import LabCommand

SCRIPT = r"""
export SYSTEMD_BUS_TIMEOUT=240  # seconds; a machine with much to do needs more than the usual 25
prune="-path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /var/tmp \
  -o -path /var/log -o -path /root/.ansible \
  -o -path /var/lib/tailscale"
find / \( $prune \) -prune -o -printf '%y %m %u:%g %p -> %l\n' 2>/dev/null
find /run -printf '%y %m %u:%g %p\n' 2>/dev/null \
  | grep -vE ' /run/(systemd|user|udev|log|utmp|lock|netns)\b| /run/sudo'
find /etc /usr/local /opt/cni -type f 2>/dev/null | xargs -r sha256sum
systemctl list-unit-files --no-legend --no-pager | awk '{print "unit file", $1, $2}'
systemctl list-units --all --no-legend --no-pager --plain --type=service,socket,timer \
  | grep -vE '^(ssh@|session|user|run-|systemd-)' | awk '{print "unit", $1, $2, $3}'
ip -br link | awk '{print "link", $1}'
for family in -4 -6; do
  ip $family route show table all | sed "s/expires [0-9]*sec//; s/^/route $family /"
  ip $family rule | sed "s/^/rule $family /"
done
ip netns | awk '{print "netns", $1}'
nft list ruleset 2>/dev/null | sed 's/counter packets [0-9]* bytes [0-9]*/counter/; s/^/nft /'
sysctl -a 2>/dev/null | grep -E '^net\.(ipv4\.(ip_forward|conf)|ipv6\.conf|bridge)' \
  | sed 's/^/sysctl /'
sed 's/^/user /' /etc/passwd; sed 's/^/group /' /etc/group
tailscale debug prefs 2>/dev/null | sed 's/^/pref /'
"""
# Not ours: the kernel's own, and what changes by itself.
_NOISE = re.compile(
    r"sysctl net\.ipv6\.conf\.[^.]+\.stable_secret|pref +\"(PrivateNodeKey|OldPriv)"
)


def listing(lab: LabCommand, node: str) -> list[str]:
    lines = lab.on(node, SCRIPT, check=False).splitlines()
    assert len(lines) > 1000, lines[-20:]
    for part in ("unit file ", "unit ", "link ", "route -4 ", "rule -6 ", "sysctl ", "user "):
        assert any(line.startswith(part) for line in lines), f"{node} did not say: {part}"
    return sorted(line.rstrip() for line in lines if not _NOISE.search(line))


def differences(before: list[str], after: list[str]) -> list[str]:
    """What came, with a plus, and what went, with a minus."""
    was, now = set(before), set(after)
    return [
        *(f"+ {line}" for line in sorted(now - was)),
        *(f"- {one}" for one in sorted(was - now)),
    ]


def prefs(lab: LabCommand, node: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(lab.on(node, "tailscale debug prefs"))
    found.pop("Config", None)  # keys
    return found
