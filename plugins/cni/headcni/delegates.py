"""Delegates in a configuration, and the configuration that each of them gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import config
from .model import NetworkConfig
from .problems import Section
from .record import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

# Plugins that change an interface and do not make one: they need no address and no MTU (tuning
# would even set the MTU).
_MAKE_NO_INTERFACE = frozenset(
    ("bandwidth", "firewall", "loopback", "portmap", "sbr", "tuning", "vrf")
)
_ALLOCATE_FROM_RANGES = frozenset(("host-local", "headcni-ipam"))


def read(top: Section) -> tuple[Mapping[str, Any], ...]:
    """`delegate` or `plugins` of a configuration."""
    single, chain = top.get("delegate"), top.get("plugins")
    if single is not None and chain is not None:
        top.wrong("delegate", single, "either delegate or plugins, not both")
    if chain is not None and chain == []:
        top.wrong("plugins", chain, "a list of at least one plugin")
    listed = [("delegate", single)] if single is not None else []
    listed += top.items("plugins", "a list of plugins")
    found = []
    for path, conf in listed:
        if not isinstance(conf, Mapping):
            top.wrong(path, conf, "an object with the type of a plugin")
            continue
        delegate = Section(conf, path, top.found)
        expected = "the name of a plugin's executable"
        kind = delegate.text("type", None, lambda v: bool(v) and "/" not in v, expected)
        if conf.get("name") not in (None, top.get("name")):
            delegate.wrong("name", conf["name"], "no name: a delegate has that of the network")
        config.check_capabilities(delegate.section("capabilities"))
        delegate.section("ipam")
        if kind:
            found.append(conf)
    return tuple(found)


def check_addresses(top: Section, delegates: Sequence[Mapping[str, Any]]) -> None:
    """A delegate that makes an interface needs ranges if our configuration has none."""
    for conf in delegates:
        if takes_addresses(conf) and conf["type"] != config.TYPE:
            in_chain = top.get("delegate") != conf
            path = f"plugins[{top.get('plugins').index(conf)}]" if in_chain else "delegate"
            expected = f"ranges of its own, or {config.EXPECTED_ADDRESSES}"
            top.wrong(f"{path}.ipam", conf.get("ipam"), expected)


def delegate_config(network: NetworkConfig, conf: Mapping[str, Any]) -> dict[str, Any]:
    """The delegate's own configuration, with our values for what it leaves open.

    Name and version are always ours. A plugin that makes an interface gets MTU, masquerading and
    addresses unless it has its own. Of the runtime's data, each plugin gets what it lists in
    ``capabilities``, as with libcni.
    """
    full: dict[str, Any] = {**conf, "name": network.name, "cniVersion": network.cni_version}
    if "args" in network.raw:
        full.setdefault("args", network.raw["args"])
    if makes_interface(conf):
        full.setdefault("mtu", network.mtu)
        full.setdefault("ipMasq", network.ip_masq)
        if conf.get("type") == "bridge":
            full.setdefault("isGateway", True)
        if conf.get("ipam") != {}:  # {} asks for a link without addresses
            ipam = _delegate_ipam(network, conf.get("ipam"))
            full.update({"ipam": ipam} if ipam else {})
    wanted = conf.get("capabilities") or {}
    passed_on = {
        name: network.runtime_config[name]
        for name, asked_for in wanted.items()
        if asked_for and name in network.runtime_config
    }
    if passed_on:
        full["runtimeConfig"] = {**(conf.get("runtimeConfig") or {}), **passed_on}
    return full


def makes_interface(conf: Mapping[str, Any]) -> bool:
    return conf.get("type") not in _MAKE_NO_INTERFACE


def takes_addresses(conf: Mapping[str, Any]) -> bool:
    """Whether the delegate gets its addresses from our configuration."""
    ipam = conf.get("ipam")
    if not makes_interface(conf) or ipam == {}:
        return False
    return ipam is None or (isinstance(ipam, Mapping) and _lacks_ranges(ipam))


def _lacks_ranges(ipam: Mapping[str, Any]) -> bool:
    ours_to_say = ipam.get("type", "host-local") in _ALLOCATE_FROM_RANGES
    return ours_to_say and not ipam.get("subnet") and not ipam.get("ranges")


def _delegate_ipam(network: NetworkConfig, own: Mapping[str, Any] | None) -> dict[str, Any]:
    """The delegate's own section, or else ours, completed by ranges and routes."""
    ipam = dict(network.ipam.raw if own is None else own)
    if not ipam and not network.pod_cidrs:
        return {}
    ipam.setdefault("type", "host-local")
    if _lacks_ranges(ipam):
        ipam["ranges"] = [[{"subnet": str(cidr)}] for cidr in network.pod_cidrs]
    if ipam["type"] in _ALLOCATE_FROM_RANGES:
        ipam.setdefault("routes", _delegate_routes(network))
    return ipam


def _delegate_routes(network: NetworkConfig) -> list[dict[str, str]]:
    """The default route, or without `default_route` the routes to the cluster."""
    if network.default_route:
        versions: Sequence[int] = sorted({cidr.version for cidr in network.pod_cidrs}) or [4]
        return [{"dst": "0.0.0.0/0" if version == 4 else "::/0"} for version in versions]
    return [{"dst": str(cidr)} for cidr in network.cluster_cidrs]
