# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether the machine itself can be a node: its clock, user, Python, kernel, systemd and ports."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from . import kernel, node, node_config, node_platform, node_release
from .shared import podcidr

SYSCTL = {4: "/proc/sys/net/ipv4/ip_forward", 6: "/proc/sys/net/ipv6/conf/all/forwarding"}


def clock(given: Mapping[str, Any], arrived: float) -> list[str]:
    if given["now"] is None:
        return []
    skew = arrived - given["now"]
    if abs(skew) <= given["max_clock_skew"]:
        return []
    which = "ahead of" if skew > 0 else "behind"
    return [
        f"clock: {abs(skew):.0f} s {which} the controller's, at most {given['max_clock_skew']} are "
        "allowed: "
        "keys and certificates will be refused; run a time service (chrony, systemd-timesyncd)"
    ]


def root() -> list[str]:
    if os.geteuid() == 0:
        return []
    return [f"user: {os.geteuid()} is not root: set ansible_become to true"]


def python() -> tuple[node_release.Python | None, list[str]]:
    try:
        return node_release.ask_python(), []
    except node_release.ReleaseError as problem:
        return None, [f"python: {problem}"]


def kernel_features(given: Mapping[str, Any]) -> list[str]:
    kind = node_platform.container()

    def load(name: str) -> str:
        return node_platform.module_fix(name, kind)

    asked = [
        ("TUN devices (/dev/net/tun)", kernel.lacks_tun(), node_platform.tun_fix(kind)),
        ("veth links", kernel.lacks_link("veth"), load("veth")),
        ("nftables", kernel.lacks_nftables(), load("nf_tables")),
        ("policy routing", kernel.lacks_rules(), "use a kernel with IP_MULTIPLE_TABLES"),
    ]
    if given["datapath"] == "bridge":
        asked.append(("bridges", kernel.lacks_link("bridge"), load("bridge")))
        if (given.get("conflist") or {}).get("network_policy"):
            fix = f"{load('br_netfilter')}; or set headcni_node_datapath: routed"
            asked.append(("network policies on a bridge", kernel.lacks_bridge_filter(), fix))
    if (given.get("conflist") or {}).get("anti_spoofing", True):
        fix = f"{load('sch_ingress')}; {load('cls_bpf')}; or set headcni_node_anti_spoofing: false"
        asked.append(("filters of tc for anti-spoofing", kernel.lacks_frame_filters(), fix))
    return [f"kernel: no {what}: {why}; {fix}" for what, why, fix in asked if why]


def policies(given: Mapping[str, Any]) -> list[str]:
    """Policies know a pod by its address."""
    conflist = given.get("conflist") or {}
    if not conflist.get("network_policy") or conflist.get("anti_spoofing", True):
        return []
    return [
        "network policies: a pod that may send from any address gets around them: "
        "set headcni_node_anti_spoofing: true"
    ]


def forwarding(cidrs: Sequence[podcidr.Network]) -> list[str]:
    wrong = []
    for version in sorted({4, *(cidr.version for cidr in cidrs)}):
        path = SYSCTL[version]
        try:
            with open(path, "r+"):
                pass
        except FileNotFoundError:
            wrong.append(f"forwarding: this kernel has no IPv{version}: leave such ranges out")
        except OSError as problem:
            wrong.append(
                f"forwarding: {path} cannot be written ({problem.strerror}): "
                "the node must be able to forward packets"
            )
    return wrong


def services(config: Mapping[str, Any]) -> list[str]:
    """systemd, and the ports of our services."""
    wrong = []
    if not node.has_systemd():
        wrong.append("systemd: does not run this machine: HeadCNI's services need it")
    monitoring = node_config.section(config, "monitoring")
    tailscale = node_config.section(config, "tailscale")
    ports = []
    if monitoring.get("enabled", True):
        address = str(monitoring.get("address", "127.0.0.1"))
        ports.append((address, monitoring.get("port", 9001), "tcp", "monitoring_port"))
    if tailscale.get("mode") == "daemon":
        anywhere = "0.0.0.0"  # noqa: S104 – to find who listens, not to listen
        ports.append((anywhere, tailscale.get("port", 41642), "udp", "tailscaled_port"))
    for address, port, protocol, variable in ports:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            continue  # the check of the configuration reports it
        try:
            holder = kernel.port_holder(address, port, protocol)
        except (OSError, OverflowError) as problem:
            wrong.append(f"port: {protocol} {address} port {port} cannot be had: {problem}")
            continue
        # Our own tailscaled has its own network namespace, so another program holds the port here.
        if holder and not (protocol == "tcp" and holder.command == "headcni-daemon"):
            wrong.append(
                f"port: {protocol} port {port} is held by {holder}: "
                f"choose another by headcni_node_{variable}"
            )
    return wrong
