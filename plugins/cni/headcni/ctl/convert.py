"""``headcnictl convert``: what the Go HeadCNI was configured with, as config.yaml and a conflist.

Its netconf or conflist and its daemon's YAML are read, in any order and number. A key keeps its
meaning, moves to another key, or has no equivalent; each of the last is named with its reason.
Nothing is written without --output, and nothing is ever overwritten.
"""

from __future__ import annotations

import argparse
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from .. import validation
from ..errors import INVALID_CONFIG, IO_FAILURE, CniError
from ..settings import DaemonConfig, as_dict, parse
from ..settings.file import decode, safe
from ..shared import conflist
from .conflist import options
from .main import NO, OK, read, show

# A key of the Go netconf, and where config.yaml has it.
OF_NETCONF = {
    "headscale_url": "headscale.url",
    "tailscale_socket": "tailscale.socket.path",
    "mode": "tailscale.mode",
    "pod_cidr": "network.podCIDR.nodeLocal",
    "cluster_cidr": "network.podCIDR.base",
    "service_cidr": "network.serviceCIDR",
    "mtu": "network.mtu",
    "bridge": "network.bridge",
    "enable_ipv6": "network.enableIPv6",
    "enable_network_policy": "network.enableNetworkPolicy",
    "data_dir": "daemon.dataDir",
    "dataDir": "daemon.dataDir",
    "ipam.type": "ipam.type",
    "ipam.strategy": "ipam.strategy",
    "magic_dns.enable": "dns.magicDNS.enabled",
    "magic_dns.base_domain": "dns.magicDNS.baseDomain",
    "magic_dns.nameservers": "dns.magicDNS.nameservers",
    "magic_dns.search_domains": "dns.magicDNS.searchDomains",
}
# A key of the Go daemon's file that has another name here.
MOVED = {"daemon.logLevel": "logging.level", "tailscale.url": "headscale.url"}
# The variable of the role headcni_node for a key of config.yaml.
VARIABLES = {
    "tailscale.mode": "headcni_mode",
    "tailscale.port": "headcni_node_tailscaled_port",
    "tailscale.answerForNode": "headcni_node_answer_for_node",
    "tailscale.peerTags": "headcni_node_peer_tags",
    "headscale.url": "headcni_headscale_url",
    "network.podCIDR.nodeLocal": "headcni_node_pod_cidr",
    "network.podCIDR.base": "headcni_node_cluster_cidr",
    "network.podCIDR.perNode": "headcni_node_per_node",
    "network.serviceCIDR": "headcni_node_service_cidr",
    "network.mtu": "headcni_node_mtu",
    "network.enableNetworkPolicy": "headcni_node_network_policy",
    "network.unknownPolicy": "headcni_node_network_policy_unknown",
    "network.logDenied": "headcni_node_network_policy_log",
    "network.firewall": "headcni_node_firewall",
    "network.tailnetAccess": "headcni_node_tailnet_access",
    "network.tailnetAccessNamespaces": "headcni_node_tailnet_access_namespaces",
    "ipam.type": "headcni_node_ipam",
    "ipam.strategy": "headcni_node_ipam_strategy",
    "daemon.nodeName": "headcni_node_name",
    "daemon.kubeconfig": "headcni_node_kubeconfig",
    "daemon.tokenLifetime": "headcni_node_token_lifetime",
    "daemon.dataDir": "headcni_node_data_dir",
    "monitoring.address": "headcni_node_monitoring_address",
    "monitoring.port": "headcni_node_monitoring_port",
    "logging.level": "headcni_node_log_level",
}
BUILT_IN = ("portmap", "bandwidth", "loopback")
_PLUGINS = ("headcni", "bridge")


class Lost(NamedTuple):
    """A key without an equivalent, and why."""

    key: str
    value: Any
    reason: str


@dataclass
class Conversion:
    """What has been read so far. ``settings`` are values by their key in config.yaml."""

    settings: Dict[str, Any] = field(default_factory=dict)
    extra: Dict[str, Any] = field(default_factory=dict)  # of the plugin, as it was
    chained: List[Mapping[str, Any]] = field(default_factory=list)
    name: str = ""
    lost: List[Lost] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)

    def set(self, path: str, value: Any, source: str) -> None:
        before = self.settings.setdefault(path, value)
        if before != value:
            self.lost.append(
                Lost(source, safe(path, value), f"another value is used: {safe(path, before)!r}")
            )


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="a netconf, a conflist or the daemon's YAML of the Go HeadCNI; - for stdin",
    )
    parser.add_argument(
        "--output", metavar="DIR", help="write config.yaml and the conflist into this new folder"
    )


def run(args: argparse.Namespace) -> int:
    found = Conversion()
    for path in args.files:
        _take(found, path, read(path))
    made = _finished(found)
    tree = _tree(_different(made))
    conf = _conflist(found, made)
    if args.output:
        _write(args.output, tree, conf)
    if args.json:
        answer = {"config": tree, "conflist": conf, "inventory": _inventory(found, made)}
        lost = [each._asdict() for each in found.lost]
        show({**answer, "lost": lost, "notes": found.notes}, as_json=True)
    else:
        show(_in_words(args.output, found, made, conf), as_json=False)
    return NO if found.lost else OK


def _take(found: Conversion, path: str, text: bytes) -> None:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        wrong: List[Any] = []
        value = decode(text, wrong)
        if wrong:
            raise CniError(INVALID_CONFIG, f"{path} cannot be read", str(wrong[0])) from None
    if not isinstance(value, Mapping):
        raise CniError(INVALID_CONFIG, f"{path}: expected an object with keys, as YAML or JSON")
    if set(value) == {"config"} and isinstance(value["config"], Mapping):
        value = value["config"]  # the values of the Helm chart
    if isinstance(value.get("plugins"), list) and "type" not in value:
        _take_conflist(found, path, value)
    elif "type" in value:
        found.name = str(value.get("name", ""))
        _take_netconf(found, value)
    else:
        _take_settings(found, value)


def _take_conflist(found: Conversion, path: str, value: Mapping[str, Any]) -> None:
    plugins = [one for one in value["plugins"] if isinstance(one, Mapping)]
    first = next((one for one in plugins if one.get("type") in _PLUGINS), None)
    if first is None:
        raise CniError(INVALID_CONFIG, f"{path} has no plugin headcni or bridge")
    found.name = str(value.get("name", ""))
    _take_netconf(found, first)
    for plugin in plugins:
        if plugin.get("type") in BUILT_IN:
            found.notes.append(f"the plugin {plugin['type']} is built in and no longer needed")
        elif plugin is not first:
            found.chained.append(plugin)


def _take_netconf(found: Conversion, value: Mapping[str, Any]) -> None:
    ipam = _section(value, "ipam")
    for path, one in _leaves(value, ("ipam", "magic_dns")):
        if path in OF_NETCONF:
            found.set(OF_NETCONF[path], one, path)
        elif path.startswith("magic_dns."):
            found.lost.append(Lost(path, safe(path, one), "no such key"))
        elif not path.startswith("ipam.") and path not in ("cniVersion", "name", "type"):
            found.extra[path] = one
    if "subnet" in ipam and "pod_cidr" not in value:
        found.set("network.podCIDR.nodeLocal", ipam["subnet"], "ipam.subnet")
    kept = {key: one for key, one in ipam.items() if key not in ("type", "strategy")}
    if set(kept) - {"subnet"}:
        found.extra["ipam"] = {"type": ipam.get("type", "headcni-ipam"), **kept}


def _take_settings(found: Conversion, value: Mapping[str, Any]) -> None:
    socket = _section(_section(value, "tailscale"), "socket")
    for path, one in _leaves(value, None):
        if path == "tailscale.socket.name":
            folder = str(socket.get("path") or "/var/run/tailscale")
            found.settings["tailscale.socket.path"] = os.path.join(folder, str(one))
        elif path == "tailscale.socket.path" and socket.get("name"):
            continue
        else:
            found.set(MOVED.get(path, path), one, path)


def _section(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = value.get(key)
    return inner if isinstance(inner, Mapping) else {}


def _leaves(
    value: Mapping[str, Any], sections: Optional[Tuple[str, ...]], above: str = ""
) -> Iterator[Tuple[str, Any]]:
    """Each value with its path. Only these sections are entered; None: all."""
    for key, one in value.items():
        path = f"{above}{key}"
        if isinstance(one, Mapping) and one and (sections is None or key in sections):
            yield from _leaves(one, sections, f"{path}.")
        elif one not in (None, ""):
            yield path, one


def _tree(settings: Mapping[str, Any]) -> Dict[str, Any]:
    tree: Dict[str, Any] = {}
    for path, value in settings.items():
        *sections, key = path.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
    return tree


def _finished(found: Conversion) -> DaemonConfig:
    """The configuration of everything that has an equivalent."""
    settings = found.settings
    if str(settings.get("tailscale.socket.path", "")).startswith("/var/run/"):
        settings["tailscale.socket.path"] = settings["tailscale.socket.path"][len("/var") :]
    if settings.pop("network.enableIPv6", False) is True and not any(
        ":" in str(settings.get(f"network.podCIDR.{key}")) for key in ("nodeLocal", "base")
    ):
        about = "give an IPv6 range in network.podCIDR, then pods get IPv6 addresses"
        found.lost.append(Lost("enable_ipv6", True, about))
    made, wrong = parse(json.dumps(_tree(settings)).encode())
    found.lost += [Lost(*problem) for problem in wrong]
    return made


def _different(made: DaemonConfig) -> Dict[str, Any]:
    """What differs from the defaults, by its key."""
    usual = dict(_leaves(as_dict(DaemonConfig()), None))
    return {path: one for path, one in _leaves(as_dict(made), None) if usual.get(path) != one}


def _conflist(found: Conversion, made: DaemonConfig) -> Optional[Dict[str, Any]]:
    """None without a range of this node: the daemon determines it on the node."""
    if not made.network.pod_cidr.node_local:
        found.notes.append(
            "no file names this node's range, so there is no conflist: set"
            " network.podCIDR.nodeLocal, or run headcnictl conflist write on the node"
        )
        return None
    usual = options(made)
    chosen = replace(usual, name=found.name or usual.name, chained=found.chained)
    while True:
        conf = conflist.build(replace(chosen, extra={**usual.extra, **found.extra}))
        wrong = validation.conflist_problems(json.dumps(conf).encode(), {})
        again = False
        for problem in wrong:
            first, _dot, path = problem.path.partition(".")
            key = path.partition(".")[0]
            if first == "plugins[0]" and key in found.extra:
                expected = problem.expected.partition(": one of")[0]
                shown = safe(path, problem.value)
                found.lost.append(Lost(path, shown, expected))
                again = _drop(found.extra, path) or again
        if not again:
            if wrong:
                raise CniError(INVALID_CONFIG, "the conflist would be wrong", str(wrong[0]))
            return conf


def _drop(extra: Dict[str, Any], path: str) -> bool:
    """Remove a key of the plugin, or of its ipam."""
    outer, _dot, inner = path.partition(".")
    inside = extra.get(outer)
    if inner and isinstance(inside, dict) and inner in inside:
        del inside[inner]
        return True
    return extra.pop(outer, None) is not None


def _inventory(found: Conversion, made: DaemonConfig) -> Dict[str, Any]:
    """The same for the inventory, from which site.yml writes both files."""
    variables: Dict[str, Any] = {}
    others: Dict[str, Any] = {}
    for path, value in _different(made).items():
        if path in VARIABLES:
            variables[VARIABLES[path]] = value
        else:
            others[path] = value
    if others:
        variables["headcni_node_extra_config"] = _tree(others)
    if found.name not in ("", conflist.Options.name):
        variables["headcni_node_conflist_name"] = found.name
    if found.extra:
        variables["headcni_node_conflist_extra"] = found.extra
    if found.chained:
        variables["headcni_node_chained_plugins"] = list(found.chained)
    return variables


def _in_words(
    output: Optional[str],
    found: Conversion,
    made: DaemonConfig,
    conf: Optional[Mapping[str, Any]],
) -> str:
    parts: List[str] = []
    if not output:
        parts += ["# config.yaml", _yaml(_tree(_different(made)))]
        if conf is not None:
            parts += [f"# {conflist.NAME}", json.dumps(conf, indent=2), ""]
    parts += ["# for the inventory of site.yml", _yaml(_inventory(found, made))]
    parts += [f"note: {note}" for note in found.notes]
    parts += [f"no equivalent: {lost.key} ({lost.value!r}): {lost.reason}" for lost in found.lost]
    if not found.lost:
        parts.append("every key has an equivalent")
    return "\n".join(parts)


def _yaml(value: Mapping[str, Any]) -> str:
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    written = io.StringIO()
    yaml.dump(dict(value), written)
    return written.getvalue()


def _write(folder: str, tree: Mapping[str, Any], conf: Optional[Mapping[str, Any]]) -> None:
    files = {"config.yaml": _yaml(tree)}
    if conf is not None:
        files[conflist.NAME] = json.dumps(conf, indent=2) + "\n"
    try:
        os.makedirs(folder, exist_ok=True)
        for name, text in files.items():
            with open(os.path.join(folder, name), "x", encoding="utf-8") as stream:
                stream.write(text)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise CniError(IO_FAILURE, f"{problem.filename} cannot be written", reason) from None
