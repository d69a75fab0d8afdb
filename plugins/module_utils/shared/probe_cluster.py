# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What kubelet tells pods about their cluster: the DNS servers and the domain.

This comes from the arguments and files of the node's own kubelet, so no credentials for the cluster
are needed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import NamedTuple

from . import container_runtimes
from .container_runtimes import Process

_RANCHER = ("/var/lib/rancher/k3s", "/var/lib/rancher/rke2")
_EMBEDDED = ("k3s", "k3s-server", "k3s-agent")  # these processes include kubelet
_MOST_FILES = 64
_MOST_BYTES = 512 << 10
_TENTH = 10  # kubeadm, k3s and RKE2 give this address of the service range to the cluster's DNS


class ClusterNames(NamedTuple):
    servers: tuple[str, ...]
    domain: str


def names(service_ranges: Sequence[str], root: str = "/") -> ClusterNames | None:
    """None if no kubelet runs on this node. Without servers if nothing names them."""
    kubelets = container_runtimes.processes(("kubelet", *_EMBEDDED), root)
    if not kubelets:
        return None
    servers: list[str] = []
    domain = ""
    for process in kubelets:
        servers = servers or _addresses(process.option("--cluster-dns"))
        domain = domain or process.option("--cluster-domain")
        for text in _files(process, root):
            its_servers, its_domain = _settings(text)
            servers, domain = its_servers or servers, its_domain or domain
    if not servers:
        with suppress(ValueError, IndexError):
            servers = [str(ip_network(one)[_TENTH]) for one in service_ranges]
    return ClusterNames(tuple(servers), domain or "cluster.local")


def kubernetes_service(service_ranges: Sequence[str]) -> list[str]:
    """The address of the service `kubernetes`: always the first address of the range."""
    with suppress(ValueError, IndexError):
        return [str(ip_network(one)[1]) for one in service_ranges]
    return []


def _files(process: Process, root: str) -> Iterator[str]:
    """Later files take precedence."""
    config = process.option("--config")
    if not config and process.name == "kubelet":
        config = "/var/lib/kubelet/config.yaml"
    folders = [process.option("--config-dir")]
    if process.name != "kubelet":
        config = ""  # of k3s itself
        folders = [f"{home}/agent/etc/kubelet.conf.d" for home in _RANCHER]
    paths = [config] if config else []
    for folder in filter(None, folders):
        with suppress(OSError):
            listed = sorted(os.listdir(os.path.join(root, folder.lstrip("/"))))
            paths += [os.path.join(folder, name) for name in listed if name.endswith(".conf")]
    for path in paths[:_MOST_FILES]:
        with (
            suppress(OSError),
            open(
                os.path.join(root, path.lstrip("/")), encoding="utf-8", errors="replace"
            ) as stream,
        ):
            yield stream.read(_MOST_BYTES)


def _settings(text: str) -> tuple[list[str], str]:
    """clusterDNS and clusterDomain of a kubelet's configuration, in JSON or YAML."""
    with suppress(ValueError):
        found = json.loads(text)
        found = found if isinstance(found, dict) else {}
        return _addresses(str(found.get("clusterDNS", ""))), str(found.get("clusterDomain") or "")
    domain = re.search(r"(?m)^clusterDomain:[ \t]*[\"']?([\w.-]+)", text)
    # A list in brackets, or one entry per line.
    servers = re.search(r"(?m)^clusterDNS:\s*(\[[^]]*\]|(?:\s*-[^\n]*)+)", text)
    return _addresses(servers[1] if servers else ""), domain[1] if domain else ""


def _addresses(text: str) -> list[str]:
    found = []
    for word in re.split(r"[\s,\"'\[\]]+", text):
        with suppress(ValueError):
            found.append(str(ip_address(word)))
    return found
