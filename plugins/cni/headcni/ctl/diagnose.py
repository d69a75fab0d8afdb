"""``headcnictl diagnose``: what is wrong with this node, causes first, each with what it means and
the command that puts it right."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Callable, Dict, List, Tuple

from .. import result
from ..errors import CniError
from ..plugins.headcni import plugin
from ..plugins.headcni.node import opened
from ..settings import DaemonConfig, control_path
from ..shared import conflist
from ..shared.node_status import alarms
from ..shared.podcidr import PodCidrError
from ..skel import NESTING
from ..store import Attachment
from . import faults, mesh_faults, node
from .daemon_client import asked
from .finding import Finding
from .main import NO, OK, CannotTell, show
from .terminal import GOOD, paint, wrapped

MOST_PODS = 50  # findings about pods that are shown
Part = Tuple[str, Callable[[], Iterable[Finding]]]


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)
    parser.add_argument(
        "--cni-dir",
        help=f"where conflists are (the container runtime's directory, or {conflist.DIRECTORY})",
    )
    parser.add_argument(
        "--without",
        metavar="PARTS",
        default="",
        help="parts to leave out, with commas between them: daemon, pods, ...",
    )


def run(args: argparse.Namespace) -> int:
    config = node.load(args)
    parts = _parts(config, args.cni_dir or faults.conflist_directory())
    left_out = {part.strip() for part in args.without.split(",") if part.strip()}
    if unknown := left_out - {name for name, _look in parts}:
        names = ", ".join(name for name, _look in parts)
        raise CannotTell(f"--without: there is no part {', '.join(sorted(unknown))}: {names}")
    found: Dict[str, List[Finding]] = {}
    for name, look in parts:
        if name in left_out:
            continue
        known = {finding.found for findings in found.values() for finding in findings}
        found[name] = [one for one in _looked(name, look) if one.found not in known]
    notes = {"daemon": _warned(config), "firewall": _firewalls_told(config)}
    well = not any(finding.sure for findings in found.values() for finding in findings)
    if args.json:
        problems = {name: [one.found for one in those] for name, those in found.items()}
        every = [
            {"part": name, **finding.as_dict()}
            for name, findings in found.items()
            for finding in findings
        ]
        every.sort(key=lambda finding: not finding["sure"])  # the others keep their order
        answer = {"well": well, "findings": every, "problems": problems, "notes": notes}
        show(answer, as_json=True)
    else:
        show("\n".join(_in_words(found, notes)), as_json=False)
    return OK if well else NO


def _parts(config: DaemonConfig, cni_dir: str) -> List[Part]:
    """In this order: whatever comes earlier may be the cause of what comes later."""
    return [
        ("daemon", lambda: faults.daemon(config)),
        ("clock", lambda: faults.clock(config)),
        ("forwarding", lambda: faults.forwarding(config)),
        ("tailscale", lambda: mesh_faults.tailscale(config)),
        ("pod CIDR", lambda: faults.pod_cidr(config)),
        ("duplicates", lambda: mesh_faults.claims(config)),
        ("approval", lambda: mesh_faults.approval(config)),
        ("policy", lambda: mesh_faults.policy(config)),
        ("rules", lambda: mesh_faults.rules(config)),
        ("mtu", lambda: mesh_faults.mtu(config)),
        ("path MTU", lambda: mesh_faults.path_mtu(config)),
        ("conflist", lambda: faults.conflists(config, cni_dir)),
        ("runtime", lambda: faults.runtimes(config, cni_dir)),
        ("pool", lambda: faults.pool(config)),
        ("firewall", lambda: faults.filters(config)),
        ("pods", lambda: _pods(config)),
        ("dns", lambda: faults.dns(config)),
        ("conditions", lambda: faults.conditions(config)),
        ("peers", lambda: mesh_faults.peers(config)),
    ]


def _looked(part: str, look: Callable[[], Iterable[Finding]]) -> List[Finding]:
    found: List[Finding] = []
    try:
        found += look()
    except (CniError, OSError, PodCidrError) as problem:
        found.append(Finding(f"{part.replace(' ', '-')}-unknown", str(problem)))
    return found


def _in_words(found: Dict[str, List[Finding]], notes: Dict[str, List[str]]) -> Iterator[str]:
    unsure: List[str] = []
    for name, findings in found.items():
        for finding in findings:
            if finding.sure:
                yield finding.in_words(name)
            else:
                unsure.append(finding.in_words(name))
    yield from unsure
    fine = [name for name, findings in found.items() if not findings]
    if fine:
        yield wrapped(f"{paint('ok', GOOD)}: {', '.join(fine)}", "", "    ")
    for name, lines in notes.items():
        for line in lines:
            yield f"note ({name}): {line}"


def _warned(config: DaemonConfig) -> List[str]:
    """What the operator should act on although this node works, such as claims of foreign
    devices."""
    with suppress(CniError, OSError), asked("status", control_path(config)) as answers:
        return [line for status in answers for line in alarms(status)]
    return []


def _firewalls_told(config: DaemonConfig) -> List[str]:
    """The other firewalls that have been told about pods."""
    with suppress(CniError, OSError, PodCidrError):
        return [
            other.in_words()
            for other in faults.firewalls(config)
            if not other.missing and not other.problem
        ]
    return []


def _pods(config: DaemonConfig) -> Iterator[Finding]:
    count = 0
    every = node.attachments(config)
    gone = [one for one in every if faults.is_gone(one.netns)]
    if gone:
        yield Finding(
            "pods-gone",
            f"the network namespaces of {len(gone)} pods are gone, and their addresses are taken",
            "the runtime did not have their networks removed; the daemon removes them after a "
            "while, and the command does it now",
            faults.release(gone),
            sure=False,
        )
    for attachment in every:
        if attachment in gone:
            continue
        said = differences(attachment, config.daemon.data_dir)
        if not said:
            continue
        count += 1
        if count > MOST_PODS:
            yield Finding("more-pods-differ", f"more than {MOST_PODS} pods differ")
            return
        owner = attachment.owner
        yield Finding(
            "pod-differs",
            f"{str(attachment.pod) or owner.container_id[:12]} {owner.ifname}: {said}",
            "the pod's network is not as it was set up. If the daemon does not repair it within a "
            "minute, delete the pod: its controller starts a new one",
        )


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
    outcome = plugin.run(env, json.dumps(conf).encode(), None, lambda _unused: opened(data_dir))
    if outcome.error is None:
        return ""
    return outcome.error.details or outcome.error.msg
