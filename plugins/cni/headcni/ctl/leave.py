"""``headcnictl leave``: take this node's routes out of the mesh, before HeadCNI is removed.

It restores what HeadCNI changed in the node's tailscaled, and removes our routes, rules and
namespace. If the daemon had its routes approved at Headscale itself, it withdraws the approval.
Each step is tried, and running it again finishes what failed.
"""

from __future__ import annotations

import argparse
import subprocess
from typing import Callable, List, Tuple

from .. import settings as configuration
from ..datapath import host_firewall
from ..errors import IO_FAILURE, CniError
from ..mesh.approvals import ApprovalKeeper, identify
from ..mesh.headscale import HeadscaleClient
from ..mesh.localapi import LocalApi, TailscaleError
from ..mesh.mesh import Mesh
from ..mesh.prefs import NodePrefs
from ..mesh.routes import RouteReconciler
from ..mesh.settings import cluster_cidrs, prefs_file
from ..settings import DaemonConfig
from ..shared.localapi import NO_SOCKET
from . import node
from .main import NO, OK, show


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)
    parser.add_argument(
        "--keep-pods", action="store_true", help="go though pods use the network: they lose it"
    )


def run(args: argparse.Namespace) -> int:
    config = node.load(args)
    pods = node.attachments(config)
    if pods and not args.keep_pods:
        names = ", ".join(sorted({str(pod.pod) or pod.owner.container_id[:12] for pod in pods})[:8])
        show(f"{len(pods)} pods use this network ({names} …): drain the node first, ", False)
        show("or say --keep-pods", False)
        return NO
    if _runs("headcni-daemon.service"):
        show("headcni-daemon runs, and would bring everything back: stop it first", False)
        return NO
    steps: List[Tuple[str, Callable[[], str]]] = [
        ("tailscaled's prefs", lambda: _prefs(config)),
        ("Headscale's approval", lambda: _approval(config)),
        ("routes and rules", lambda: _routes(config)),
        ("namespace", lambda: _namespace(config)),
        ("other firewalls", _firewalls),
    ]
    failed = False
    for name, step in steps:
        try:
            show(f"{name}: {step()}", False)
        except (CniError, OSError) as problem:
            failed = True
            show(f"{name}: {problem}", False)
    return NO if failed else OK


def _runs(unit: str) -> bool:
    command = ["systemctl", "is-active", "--quiet", unit]
    return subprocess.run(command, timeout=30, check=False).returncode == 0


def _prefs(config: DaemonConfig) -> str:
    api = LocalApi(config.tailscale.socket_path)
    try:
        changed = NodePrefs(api, prefs_file(config)).restore()
    except TailscaleError as problem:
        if problem.kind == NO_SOCKET:
            return "tailscaled is not there"
        raise
    return "; ".join(changed) or "nothing of ours"


def _approval(config: DaemonConfig) -> str:
    wanted = config.headscale
    if not wanted.api_key_file:
        return "is the controller's: this node has no key"
    client = HeadscaleClient(wanted.url, wanted.api_key_file, wanted.timeout, wanted.retries)
    api = LocalApi(config.tailscale.socket_path)
    keeper = ApprovalKeeper(client, lambda: identify(api), configuration.pod_cidrs(config).cidrs)
    report = keeper.withdraw()
    if report.problem:
        raise CniError(IO_FAILURE, report.problem)
    return ", ".join(report.withdrawn) or "nothing of ours"


def _routes(config: DaemonConfig) -> str:
    own = configuration.pod_cidrs(config).cidrs
    mesh = Mesh(
        cluster_cidrs(config, own),
        own,
        interface=config.tailscale.interface,
        own_networks_first=False,  # remove those rules too: tailscaled has its former prefs now
    )
    manager = RouteReconciler(mesh, LocalApi(config.tailscale.socket_path))
    return f"{len(manager.remove_all().removed)} removed"


def _firewalls() -> str:
    return ", ".join(host_firewall.remove()) or "nothing of ours"


def _namespace(config: DaemonConfig) -> str:
    if config.tailscale.mode != "daemon":
        return "host mode has none"
    from ..mesh.namespace.mesh_namespace import MeshNamespace
    from ..mesh.namespace.settings import MeshConfig

    if _runs("headcni-tailscaled.service"):
        command = ["systemctl", "stop", "headcni-tailscaled.service"]
        subprocess.run(command, timeout=60, check=True)
    MeshNamespace(MeshConfig.of_daemon(config, configuration.pod_cidrs(config).cidrs)).remove()
    return "removed"
