"""The settings of daemon mode's network namespace, and where they are read from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any, Callable, Optional, Tuple

from ... import port_ranges
from ... import settings as configuration
from ...errors import INVALID_CONFIG, IO_FAILURE, CniError
from ...model import Address, Network
from ...port_ranges import Answered
from ...settings import DaemonConfig
from ...shared.podcidr import PodCidrError


@dataclass(frozen=True)
class MeshConfig:
    """`answer_for_node` says on which ports the tailnet address leads to the node. Unless it is
    False, the node itself reaches the tailnet. Pods reach it in any case."""

    namespace: str = "headcni"
    interface: str = "headcni01"
    port: int = 41642
    link4: Optional[IPv4Network] = None  # None: the first network that is in no route of the host
    link6: Optional[IPv6Network] = None
    mtu: int = 0  # 0: the same as the underlay's
    tailnet: Tuple[Network, ...] = (
        ip_network("100.64.0.0/10"),
        ip_network("fd7a:115c:a1e0::/48"),
    )
    pod_cidrs: Tuple[Network, ...] = ()  # this node's own
    cluster_cidrs: Tuple[Network, ...] = ()  # of all pods; (): unknown
    answer_for_node: Answered = True
    underlay: Tuple[
        Address, ...
    ] = ()  # where peers find the node; (): the addresses on the default routes
    nameservers: Tuple[Address, ...] = ()  # (): the host's
    run_dir: str = "/run/headcni"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> MeshConfig:
        """From decoded JSON or YAML; a single error names all mistakes."""
        known = {field.name for field in fields(cls)}
        wrong = [f"{key}: not one of {', '.join(sorted(known))}" for key in {*values} - known]
        read: dict[str, Any] = {}
        for key in sorted(known & set(values)):
            if values[key] is None:
                continue
            try:
                reader: Callable[[Any], Any] = _READERS.get(key, _text)
                read[key] = reader(values[key])
            except (TypeError, ValueError) as problem:
                wrong.append(f"{key} is {json.dumps(values[key], default=str)}: {problem}")
        if wrong:
            raise CniError(INVALID_CONFIG, "the mesh configuration is wrong", "; ".join(wrong))
        return cls(**read)

    @classmethod
    def of_daemon(cls, config: DaemonConfig, pod_cidrs: Iterable[Network]) -> MeshConfig:
        """From the daemon's configuration."""
        chosen = config.tailscale
        links = {cidr.version: cidr for cidr in chosen.link_cidr}
        return cls.of(
            {
                "interface": chosen.interface_name or cls.interface,
                "port": chosen.port,
                "link4": str(links[4]) if 4 in links else None,
                "link6": str(links[6]) if 6 in links else None,
                "pod_cidrs": [str(cidr) for cidr in pod_cidrs],
                "cluster_cidrs": [str(cidr) for cidr in config.network.pod_cidr.base],
                "answer_for_node": _plain(chosen.answer_for_node),
            }
        )


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("expected a name")
    return value


def _number(low: int, high: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"expected a number from {low} to {high}")
        return value

    return read


def _answered(value: Any) -> Answered:
    if isinstance(value, bool):
        return value
    if not isinstance(value, list) or len(value) > port_ranges.MOST_ANSWERED:
        most = port_ranges.MOST_ANSWERED
        raise ValueError(f"expected true, false or a list of up to {most} ports")
    return tuple(port_ranges.parse(port, port_ranges.ANSWERED_PROTOCOLS) for port in value) or False


def _plain(answered: Answered) -> Any:
    return answered if isinstance(answered, bool) else [str(ports) for ports in answered]


def _link(version: int) -> Callable[[Any], Network]:
    def read(value: Any) -> Network:
        network = ip_network(value)
        if network.version != version or network.num_addresses < 4 or not network.is_private:
            raise ValueError(f"expected a private IPv{version} network of four addresses or more")
        if network.is_link_local:
            raise ValueError("tailscaled takes link-local addresses for no network at all")
        return network

    return read


def _several(read: Callable[[Any], Any]) -> Callable[[Any], Tuple[Any, ...]]:
    def all_of(value: Any) -> Tuple[Any, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError("expected a list")
        return tuple(map(read, value))

    return all_of


_READERS: dict[str, Callable[[Any], Any]] = {
    "port": _number(1, 65535),
    "mtu": _number(0, 65535),
    "link4": _link(4),
    "link6": _link(6),
    "tailnet": _several(ip_network),
    "pod_cidrs": _several(ip_network),
    "cluster_cidrs": _several(ip_network),
    "answer_for_node": _answered,
    "underlay": _several(ip_address),
    "nameservers": _several(ip_address),
}


def from_json(path: str) -> MeshConfig:
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except OSError as problem:
        raise CniError(IO_FAILURE, f"{path} cannot be read", problem.strerror or "") from None
    except ValueError as problem:
        raise CniError(INVALID_CONFIG, f"{path} is not JSON", str(problem)) from None
    if not isinstance(values, dict):
        raise CniError(INVALID_CONFIG, f"{path} is not JSON", "it is not an object {…}")
    return MeshConfig.of(values)


def from_daemon(path: str) -> MeshConfig:
    config = configuration.load(path, missing_ok=True)
    try:
        return MeshConfig.of_daemon(config, configuration.pod_cidrs(config).cidrs)
    except PodCidrError as problem:
        raise CniError(INVALID_CONFIG, "no pod CIDR", str(problem)) from None
