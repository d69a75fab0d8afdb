# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Firewalls on the node: those that the daemon could not configure, and notes about the others."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from . import kernel, node, node_config, node_platform
from .preflight_network import cidrs_of
from .shared import podcidr

UNITS = {
    "docker.service": "Docker",
    "nftables.service": "nftables.service",
    "netfilter-persistent.service": "netfilter-persistent (iptables)",
}


def problems(config: Mapping[str, Any], own: Sequence[podcidr.Network]) -> list[str]:
    """Firewalls that the daemon could not configure to let pods through."""
    if _mode(config) == "none":
        return []
    wrong = []
    if kernel.legacy_filter() and not _has_legacy_iptables():
        wrong.append(
            "firewall: rules of iptables-legacy are in force, and the program is not on this node: "
            "install the package iptables"
        )
    if not _firewalld_runs():
        return wrong
    for cidr in cidrs_of(node_config.cluster_cidrs(config, own)):
        code, out, _unused = node.run_bounded(["firewall-cmd", f"--get-zone-of-source={cidr}"])
        zone = out.strip()
        if code == 0 and zone not in ("", "trusted"):
            wrong.append(
                f"firewall: firewalld has {cidr}, the pods' addresses, in its zone {zone}: "
                f"firewall-cmd --permanent --zone={zone} --remove-source={cidr}, then "
                "firewall-cmd --reload; or set headcni_node_firewall to none"
            )
    return wrong


def _has_legacy_iptables() -> bool:
    if shutil.which("iptables-legacy", path=node_platform.PROGRAMS):
        return True
    plain = shutil.which("iptables", path=node_platform.PROGRAMS)
    if not plain:
        return False
    code, out, _unused = node.run_bounded([plain, "--version"])
    return code == 0 and "nf_tables" not in out


def _mode(config: Mapping[str, Any]) -> str:
    return str(node_config.section(config, "network").get("firewall") or "auto")


def _firewalld_runs() -> bool:
    return node.has_systemd() and node.unit("firewalld.service").active == "active"


def notes(config: Mapping[str, Any]) -> list[str]:
    """The active firewalls, and what HeadCNI does about each."""
    does = "HeadCNI lets pods through it, see docs/firewalls.md"
    if _mode(config) == "none":
        does = "headcni_node_firewall is none, so let pods through it yourself: docs/firewalls.md"
    there = []
    if _firewalld_runs():
        there.append("firewalld")
    if "ENABLED=yes" in (node_config.read("/etc/ufw/ufw.conf") or "").split():
        there.append("ufw")
    for unit, name in UNITS.items():
        if node.has_systemd() and node.unit(unit).active == "active":
            there.append(name)
    return [f"firewall: {name} is active: {does}" for name in there]
