"""``headcnictl diagnose``: compare everything with how it should be."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Callable, Dict, List, Tuple

from .. import result, verbs
from .. import settings as configuration
from ..datapath import firewall, host_firewall, netns
from ..errors import CniError
from ..exec import NESTING
from ..mesh import pod_traffic
from ..mesh.localapi import LocalApi
from ..settings import DaemonConfig, control_path
from ..shared import conflist
from ..shared.node_status import alarms
from ..shared.podcidr import PodCidrError
from ..store import Attachment, Store
from . import node
from .daemon_client import asked
from .main import NO, OK, show


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)
    parser.add_argument(
        "--cni-dir", default=conflist.DIRECTORY, help="where conflists are (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    config = node.load(args)
    parts: List[Tuple[str, Callable[[], Iterator[str]]]] = [
        ("daemon", lambda: _daemon(config)),
        ("tailscale", lambda: _tailscale(config)),
        ("pod CIDR", lambda: _pod_cidr(config)),
        ("conflist", lambda: _conflist(args.cni_dir)),
        ("firewall", lambda: _firewall(config)),
        ("pods", lambda: _pods(config)),
    ]
    found: Dict[str, List[str]] = {}
    notes: Dict[str, List[str]] = {
        "daemon": _warned(config),
        "firewall": _firewalls_told(config),
    }
    for name, look in parts:
        found[name] = []
        try:
            found[name] += look()
        except (CniError, OSError) as problem:
            found[name].append(str(problem))
    well = not any(found.values())
    if args.json:
        show({"well": well, "problems": found, "notes": notes}, as_json=True)
    else:
        for name, problems in found.items():
            print(f"{name}: {'ok' if not problems else ''}".rstrip())
            for line in problems:
                print(f"  - {line}")
            for line in notes.get(name, ()):
                print(f"  {line}")
    return OK if well else NO


def _daemon(config: DaemonConfig) -> Iterator[str]:
    with asked("status", control_path(config)) as answers:
        status = next(answers, None)
    if status is None:
        yield "headcni-daemon ended while it was asked"
        return
    for condition in status["conditions"]:
        if not condition["ok"]:
            yield f"{condition['name']}: {condition['reason']}"


def _warned(config: DaemonConfig) -> List[str]:
    """What the operator should act on although this node works, such as claims of foreign
    devices."""
    with suppress(CniError, OSError), asked("status", control_path(config)) as answers:
        return [line for status in answers for line in alarms(status)]
    return []


def _tailscale(config: DaemonConfig) -> Iterator[str]:
    status = LocalApi(config.tailscale.socket_path).status(peers=False)
    if not status.running:
        yield f"its state is {status.state}: join the node with site.yml, or tailscale up"
    for line in status.health:
        if not (_about_forwarding(line) and _forwards(config)):
            yield f"it says: {line}"


def _about_forwarding(line: str) -> bool:
    """Whether this is tailscaled's complaint about forwarding. It asks every link, and takes a
    pod's link that has just disappeared for a link that does not forward, until it looks again."""
    return "IP forwarding is disabled" in line


def _forwards(config: DaemonConfig) -> bool:
    """Whether the kernel forwards, for all families that this node's pods have."""
    switches = {4: "net/ipv4/ip_forward", 6: "net/ipv6/conf/all/forwarding"}
    try:
        cidrs = configuration.pod_cidrs(config).cidrs
    except PodCidrError:
        return False
    return all(netns.read_sysctl(switches[cidr.version]) == "1" for cidr in cidrs)


def _pod_cidr(config: DaemonConfig) -> Iterator[str]:
    try:
        resolution = configuration.pod_cidrs(config)
    except PodCidrError as problem:
        yield str(problem)
        return
    if resolution.guessed:
        shown = ", ".join(map(str, resolution.cidrs))
        yield f"{shown} is a guess ({resolution.source}): set network.podCIDR.nodeLocal"


def _conflist(directory: str) -> Iterator[str]:
    picked = conflist.survey(directory).picked()
    if picked != conflist.NAME:
        yield f"{picked or 'no file'} is in charge of {directory}, not {conflist.NAME}"


def _firewall(config: DaemonConfig) -> Iterator[str]:
    with Store.in_directory(config.daemon.data_dir) as store:
        if store.attachments() and not firewall.is_whole(store):
            yield "the nft table is not as the store has it; the daemon repairs it"
    for other in _firewalls(config):
        if not other.missing and not other.problem:
            continue
        told = config.network.firewall == "auto"
        what = "tailnet peers" if other.blocks_node else "pods"
        fix = "the daemon tells it" if told else f"network.firewall is none: allow {what} there"
        yield f"{other.in_words()}; {fix}, see docs/firewalls.md"


def _firewalls(config: DaemonConfig) -> Tuple[host_firewall.Found, ...]:
    return host_firewall.look(pod_traffic.now(config, node.attachments(config)))


def _firewalls_told(config: DaemonConfig) -> List[str]:
    """The other firewalls that have been told about pods."""
    with suppress(CniError, OSError, PodCidrError):
        return [
            other.in_words()
            for other in _firewalls(config)
            if not other.missing and not other.problem
        ]
    return []


def _pods(config: DaemonConfig) -> Iterator[str]:
    for attachment in node.attachments(config):
        said = differences(attachment, config.daemon.data_dir)
        if said:
            owner = attachment.owner
            yield f"{attachment.pod or owner.container_id[:12]} {owner.ifname}: {said}"


def differences(attachment: Attachment, data_dir: str) -> str:
    """What CHECK would report to the runtime that made this attachment; empty if all is as it
    was. It uses the store in which the attachment was found, whatever the plugin was configured
    with."""
    version = str(attachment.config.get("cniVersion", ""))
    if result.before(version, "0.4.0"):
        version = "0.4.0"  # the first version with CHECK
    conf = {
        **attachment.config,
        "cniVersion": version,
        "prevResult": result.shape(attachment.result, version),
    }
    env = {
        "CNI_COMMAND": "CHECK",
        "CNI_CONTAINERID": attachment.owner.container_id,
        "CNI_IFNAME": attachment.owner.ifname,
        "CNI_NETNS": attachment.netns,
        "CNI_PATH": "/opt/cni/bin",
        NESTING: attachment.owner.network.partition("/")[2],
    }
    outcome = verbs.run(
        env, json.dumps(conf).encode(), None, lambda _unused: verbs.opened(data_dir)
    )
    if not outcome.code:
        return ""
    problem = json.loads(outcome.output)
    return str(problem.get("details") or problem.get("msg"))
