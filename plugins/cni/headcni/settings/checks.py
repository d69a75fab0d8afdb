"""Mistakes in the configuration that concern several keys at once."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import List

from ..problems import Problem
from ..tailnet_access import RANGES, allows
from .sections import DaemonConfig


def check_together(config: DaemonConfig, found: List[Problem]) -> None:
    """Find mistakes that show only when several keys are compared."""
    network, pod = config.network, config.network.pod_cidr
    for cidr in pod.node_local:
        bases = [base for base in pod.base if base.version == cidr.version]
        if bases and not any(b.prefixlen <= cidr.prefixlen and b.overlaps(cidr) for b in bases):
            expected = f"a range within network.podCIDR.base {', '.join(map(str, bases))}"
            found.append(Problem("network.podCIDR.nodeLocal", str(cidr), expected))
    for name, cidrs in (("nodeLocal", pod.node_local), ("base", pod.base)):
        for cidr in cidrs:
            for service in network.service_cidr:
                if service.version == cidr.version and service.overlaps(cidr):
                    expected = f"a range apart from network.serviceCIDR {service}"
                    found.append(Problem(f"network.podCIDR.{name}", str(cidr), expected))
    if network.mtu < 1280 and any(c.version == 6 for c in (*pod.node_local, *pod.base)):
        found.append(Problem("network.mtu", network.mtu, "at least 1280, as IPv6 needs it"))
    if config.headscale.api_key_file and not config.headscale.url:
        expected = "headscale.url beside it, to know whose key it is"
        found.append(Problem("headscale.apiKeyFile", config.headscale.api_key_file, expected))
    if config.monitoring.path.startswith(("/healthz", "/ready", "/debug/")):
        found.append(Problem("monitoring.path", config.monitoring.path, "a path of its own"))
    magic = config.dns.magic_dns
    said = magic.base_domain or magic.nameservers or magic.search_domains
    if magic.enabled and not said and not any(p.path.startswith("dns.magicDNS") for p in found):
        expected = "baseDomain, nameservers or searchDomains beside it"
        found.append(Problem("dns.magicDNS.enabled", True, expected))
    _check_resolvers(config, found)


def _check_resolvers(config: DaemonConfig, found: List[Problem]) -> None:
    """Pods must be allowed to reach their own nameservers, or DNS looks broken to them."""
    access, magic = config.network.tailnet_access, config.dns.magic_dns
    for text in magic.nameservers if magic.enabled else ():
        address = ip_address(text)
        tailnet = ip_network(RANGES[address.version])
        if address in tailnet and not all(allows(access, address, 53, p) for p in ("udp", "tcp")):
            entry = f"[{text}]:53" if address.version == 6 else f"{text}:53"
            expected = f"a list with {entry}, as pods resolve by it (dns.magicDNS.nameservers)"
            found.append(Problem("network.tailnetAccess", access, expected))
