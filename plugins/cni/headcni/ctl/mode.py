"""``headcnictl mode``: switch between the node's own tailscaled and ours, with pods running.

    headcnictl mode prepare --next FILE   also serve this node's pods with the other tailscaled
    headcnictl mode move --next FILE      from now on send everything through it
    headcnictl mode drop MODE             undo what was changed for the mode that the node has left

FILE is the next configuration. For each CIDR, peers exchange packets with the tailscaled that
Headscale names, and learn about a change within about a second, each at its own time. So both
tailscaled are joined and advertise the pods, and from `prepare` on each packet is sent through
both: a peer accepts the copy from the tailscaled it knows, and no packet is lost whenever
Headscale's choice changes. To change it, the controller approves the routes for the next tailscaled
and withdraws them from the former. The former must keep advertising them, or it would drop what
still arrives. Once all peers know, `move` changes the routes in a single netlink batch. If that
fails, or the daemon is not ready afterwards, the routes are changed back, and packets are sent
through both until `drop`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from contextlib import closing
from typing import Optional

from .. import settings as configuration
from ..datapath import nft
from ..errors import INVALID_CONFIG, IO_FAILURE, KERNEL, CniError
from ..mesh.localapi import LocalApi, TailscaleError
from ..mesh.mesh import Mesh
from ..mesh.own_networks import forget_own_networks, put_own_networks_first
from ..mesh.prefs import NodePrefs
from ..mesh.route_socket import RouteSocket
from ..mesh.routes import RouteReconciler
from ..mesh.settings import cluster_cidrs, mesh_of, namespace_of, own_networks_first, prefs_file
from ..settings import DaemonConfig, control_path
from ..shared.localapi import NO_SOCKET
from . import node
from .daemon_client import asked
from .main import OK, show

DAEMON, TAILSCALED = "headcni-daemon.service", "headcni-tailscaled.service"
READY_SECONDS = 30.0
TABLE = "headcni_switch"  # of nft, while packets are sent through both
# The next hop of a copy if the interface has no gateway: the tailnet's own resolver.
_ANYBODY: dict[int, str] = {4: "100.100.100.100", 6: "fd7a:115c:a1e0::53"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("show", "prepare", "move", "drop"))
    parser.add_argument("mode", nargs="?", choices=("host", "daemon"), help="for drop: which")
    node.with_config(parser)
    parser.add_argument("--next", metavar="FILE", help="the configuration to come")
    parser.add_argument(
        "--socket",
        default="",
        help="for drop: that of the tailscaled that is left, if not the usual",
    )


def run(args: argparse.Namespace) -> int:
    now = node.load(args)
    if args.what == "show":
        mode = now.tailscale.mode
        show({"mode": mode} if args.json else mode, args.json)
        return OK
    if args.what == "drop":
        said = _drop(now, args.mode, args.socket)
    else:
        to_come = _to_come(args, now)
        said = _prepare(now, to_come) if args.what == "prepare" else _move(args, now, to_come)
    show({"done": said} if args.json else said, args.json)
    return OK


def _to_come(args: argparse.Namespace, now: DaemonConfig) -> DaemonConfig:
    if not args.next:
        raise CniError(INVALID_CONFIG, "--next is missing", "name the configuration to come")
    to_come = configuration.load(args.next)
    if to_come.tailscale.mode == now.tailscale.mode:
        mode = now.tailscale.mode
        raise CniError(INVALID_CONFIG, f"{args.next} has mode {mode}", "as the node has already")
    if configuration.pod_cidrs(to_come).cidrs != configuration.pod_cidrs(now).cidrs:
        raise CniError(
            INVALID_CONFIG, f"{args.next} has another pod CIDR", "change one thing at a time"
        )
    return to_come


def _prefs(config: DaemonConfig) -> NodePrefs:
    return NodePrefs(LocalApi(config.tailscale.socket_path), prefs_file(config))


def _prepare(now: DaemonConfig, to_come: DaemonConfig) -> str:
    _must_run(to_come)
    if own_networks_first(to_come):
        with closing(RouteSocket()) as kernel:  # before it accepts the first route
            put_own_networks_first(kernel)
    changed = list(_prefs(to_come).ensure(configuration.pod_cidrs(to_come).cidrs))
    try:
        nft.run_here(_copying(_manager(now).mesh, _manager(to_come).mesh))
    except CniError as problem:
        changed.append(f"packets cannot be sent by both, so some will be lost: {problem}")
    return "; ".join(changed) or "all was as it should be"


def _must_run(config: DaemonConfig) -> None:
    api = LocalApi(config.tailscale.socket_path)
    status = api.status(peers=False)
    if not status.running:
        raise CniError(
            IO_FAILURE,
            f"the tailscaled of {config.tailscale.mode} mode is in the state {status.state}",
            "join it first, by site.yml or switch_mode.yml",
        )
    if not os.path.exists(f"/sys/class/net/{config.tailscale.interface}"):
        raise CniError(KERNEL, f"there is no interface {config.tailscale.interface}")


def _manager(config: DaemonConfig) -> RouteReconciler:
    own = configuration.pod_cidrs(config).cidrs
    mesh = mesh_of(config, own, cluster_cidrs(config, own), namespace_of(config, own))
    return RouteReconciler(mesh, LocalApi(config.tailscale.socket_path))


def _move(args: argparse.Namespace, now: DaemonConfig, to_come: DaemonConfig) -> str:
    """Everything slow is done before the two steps that pods notice."""
    _must_run(to_come)
    before, after = _manager(now), _manager(to_come)
    kept = f"{args.config}.previous"
    _systemctl("stop", DAEMON)  # it would restore the routes; CNI calls work without it
    try:
        began = time.monotonic()
        report = after.reconcile()
        took = time.monotonic() - began
        _refuse_if_wrong(report.conditions)
        os.replace(args.config, kept)
        os.replace(args.next, args.config)
        _systemctl("start", DAEMON)
        _await_ready(to_come)
    except BaseException:
        _move_back(args, now, before, kept)
        raise
    os.unlink(kept)
    nft.run_here(_gone())
    count = len(report.added) + len(report.repaired)
    return f"{count} routes and rules moved in {1000 * took:.0f} ms"


def _copying(before: Mesh, after: Mesh) -> str:
    """nft rules that also send packets for other nodes' pods through the next interface."""
    lines = [_gone()]
    gateways: dict[int, str] = {gateway.version: str(gateway) for gateway in after.gateways}
    for version, family in ((4, "ip"), (6, "ip6")):
        cidrs = [str(cidr) for cidr in before.cluster_cidrs if cidr.version == version]
        own = [str(cidr) for cidr in before.own_cidrs if cidr.version == version]
        if not cidrs or not own:
            continue
        to = gateways.get(version, _ANYBODY[version])
        rule = (
            f'oifname "{before.interface}" {family} saddr {{ {", ".join(own)} }} '
            f'{family} daddr {{ {", ".join(cidrs)} }} dup to {to} device "{after.interface}"'
        )
        for hook in ("forward", "output"):
            chain = f"{{ type filter hook {hook} priority 300; }}"
            lines.append(f"add table {family} {TABLE}")
            lines.append(f"add chain {family} {TABLE} {hook} {chain}")
            lines.append(f"add rule {family} {TABLE} {hook} {rule}")
    return "\n".join(lines)


def _gone() -> str:
    return "\n".join(
        f"add table {family} {TABLE}\ndelete table {family} {TABLE}" for family in ("ip", "ip6")
    )


def _move_back(
    args: argparse.Namespace, now: DaemonConfig, before: RouteReconciler, kept: str
) -> None:
    if os.path.exists(kept):
        if os.path.exists(args.config):
            os.replace(args.config, args.next)
        os.replace(kept, args.config)
    _systemctl("stop", DAEMON)
    _prefs(now).ensure(configuration.pod_cidrs(now).cidrs)
    before.reconcile()
    _systemctl("start", DAEMON)


def _refuse_if_wrong(conditions: object) -> None:
    for condition in conditions:  # type: ignore[attr-defined]
        if condition.name in ("routes", "interface", "tailscale") and not condition.ok:
            raise CniError(KERNEL, "the routes could not be moved", condition.message)


def _await_ready(config: DaemonConfig) -> None:
    reason = ""
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        try:
            with asked("status", control_path(config)) as answers:
                status: Optional[dict[str, object]] = next(answers, None)
        except CniError as problem:
            status, reason = None, str(problem)
        if status is not None:
            if status["ready"]:
                return
            reason = ", ".join(
                f"{condition['name']}: {condition['reason']}"
                for condition in status["conditions"]  # type: ignore[attr-defined]
                if not condition["ok"]
            )
        time.sleep(0.2)
    raise CniError(IO_FAILURE, f"the daemon is not ready within {READY_SECONDS:.0f} s", reason)


def _drop(now: DaemonConfig, mode: Optional[str], socket: str = "") -> str:
    """Undo what was changed for a mode that the node is not in."""
    if mode is None:
        raise CniError(INVALID_CONFIG, "which mode is to be dropped?", "say host or daemon")
    if mode == now.tailscale.mode:
        raise CniError(INVALID_CONFIG, f"{mode} is the node's mode", "move to the other one first")
    dropped = configuration.in_mode(now, mode, socket)
    done: list[str] = []
    nft.run_here(_gone())
    try:
        done += _prefs(dropped).restore()
    except TailscaleError as problem:
        if problem.kind != NO_SOCKET:
            raise
    if mode == "host":
        with closing(RouteSocket()) as kernel:
            done += [f"{rule} deleted" for rule in forget_own_networks(kernel)]
    if mode == "daemon":
        _systemctl("disable", "--now", TAILSCALED)
        namespace = namespace_of(dropped, configuration.pod_cidrs(dropped).cidrs)
        if namespace is not None:
            namespace.remove()
        done.append("the namespace is gone")
    return "; ".join(done) or "nothing was there"


def _systemctl(*words: str) -> None:
    try:
        subprocess.run(
            ["systemctl", *words], timeout=90, check=True, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as problem:
        said = problem.stderr.strip()
    except subprocess.TimeoutExpired as problem:
        said = f"it was not done within {problem.timeout:g} s; see: systemctl list-jobs"
    else:
        return
    raise CniError(IO_FAILURE, f"systemctl {' '.join(words)} failed", said)
