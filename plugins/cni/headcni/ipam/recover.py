"""After the store was lost: adopt the addresses that libcni remembers having been given.

containerd, CRI-O and cnitool keep each ADD's answer in a file until its DEL. What the kernel shows
knows no container ids; these files do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..model import Lease, LeasedAddress, Owner
from ..store import Store
from .config import TYPE, parse_address

RESULTS_DIR = "/var/lib/cni/results"
PLUGIN = "headcni"


def adopt_remembered(store: Store, directory: str = "") -> list[Lease]:
    """Adopt what our IPAM gave out according to libcni's cache; say what was new to the store."""
    adopted = []
    directory = directory or RESULTS_DIR
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    for name in names:
        lease = _remembered(os.path.join(directory, name))
        if lease is None:
            continue
        new = store.adopt(lease.owner, lease.pod, lease.addresses)
        if new:
            adopted.append(Lease(lease.owner, lease.pod, new))
    return adopted


def _remembered(path: str) -> Lease | None:
    """One cache file as a lease; None if it is not ours or cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            entry = json.load(file)
        if not _is_ours(_config(entry["config"])):
            return None
        owner = Owner(str(entry["networkName"]), str(entry["containerId"]), str(entry["ifName"]))
        addresses = [_leased(ip) for ip in entry["result"]["ips"]]
        args = dict(pair for pair in entry.get("cniArgs") or () if len(pair) == 2)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    namespace, pod = args.get("K8S_POD_NAMESPACE", ""), args.get("K8S_POD_NAME", "")
    return Lease(owner, f"{namespace}/{pod}" if pod else "", tuple(addresses))


def _config(text: str) -> Any:
    import binascii

    return json.loads(binascii.a2b_base64(text))


def _is_ours(config: Mapping[str, Any]) -> bool:
    """A netconf or conflist that has its addresses from us."""
    for plugin in config.get("plugins") or [config]:
        if plugin.get("type") == PLUGIN or (plugin.get("ipam") or {}).get("type") == TYPE:
            return True
    return False


def _leased(ip: Mapping[str, Any]) -> LeasedAddress:
    text, _unused, prefix = ip["address"].partition("/")
    address = parse_address(text)
    if address is None:
        raise ValueError(text)
    return LeasedAddress(address, int(prefix), parse_address(ip.get("gateway")))
