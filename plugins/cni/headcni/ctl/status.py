"""``headcnictl status``: whether the node works, and if not, what is wrong."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Dict, List, Optional

from ..errors import CniError
from ..shared import bearer_token, node_status
from . import node
from .daemon_client import CONTROL, daemon_status
from .main import NO, OK, CannotTell, show
from .terminal import BAD, DOUBTFUL, GOOD, paint, table

ALL = "all"  # the same as in tailnet_access, which is slow to import


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)


def run(args: argparse.Namespace) -> int:
    try:
        status = _usual(args) or daemon_status(control_path_of(args))
    except CniError as problem:
        raise CannotTell(str(problem)) from None
    show(status if args.json else _in_words(status), args.json)
    return OK if node_status.is_well(status) else NO


def _usual(args: argparse.Namespace) -> Optional[Dict[str, Any]]:
    """The status of the daemon at the usual place, if it uses the same configuration file: reading
    that file would take longer than all the rest. None if the file must say where the daemon is."""
    with suppress(CniError):
        status = daemon_status(CONTROL)
        if status.get("config") == args.config:
            return status
    return None


def control_path_of(args: argparse.Namespace) -> str:
    from ..settings import control_path

    return control_path(node.load(args))


def _tailnet(access: Optional[Mapping[str, Any]]) -> List[str]:
    """What pods may reach of the tailnet. A daemon of an earlier release that still runs has no
    limits."""
    if access is None:
        return []
    note = " (pods have the node's rights)" if access["node"] == ALL else ""
    lines = [f"tailnet access: {access['node']}{note}"]
    lines += [
        f"  namespace {name}: {namespace}"
        for name, namespace in sorted(access["namespaces"].items())
    ]
    return lines + ([f"  and {access['more']} more namespaces"] if access["more"] else [])


def _policies(found: Optional[Mapping[str, Any]]) -> List[str]:
    """A daemon of an earlier release does not enforce any."""
    if found is None:
        return []
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["since"]))
    since = f"in force since {when}" if found["since"] else "not known yet"
    unknown = found["unknown_pods"]
    waiting = f", {unknown} of them not known yet ({found['unknown']})" if unknown else ""
    return [
        f"network policies: {found['policies']} from {found['source']}, {since}, "
        f"for {found['pods']} pod interfaces{waiting}"
    ]


def _in_words(status: Dict[str, Any]) -> str:
    now = time.time()
    hours, rest = divmod(int(now - status["since"]), 3600)
    row = node_status.row(status.get("node") or os.uname().nodename, status, now)
    well = node_status.is_well(status)
    row[1] = paint(row[1], GOOD if well else BAD)
    ready = "NOT READY" if not status["ready"] else "ready" if well else "ready for kubelet only"
    lines = [
        table([row], node_status.HEAD),
        f"headcni-daemon {status['version']}, pid {status['pid']}, "
        f"up {hours}h{rest // 60:02d}m{rest % 60:02d}s",
        f"{ready}: {status['mode']} mode by "
        f"{status['interface']}, {status['attachments']} pod interfaces",
        f"pods of this node: {', '.join(status['pod_cidrs'])}",
        f"pods of the cluster: {', '.join(status['cluster_cidrs'])}",
    ]
    if expires := status.get("kubernetes_token_expires"):
        lines.append(f"token for Kubernetes: until {bearer_token.date(expires)}")
    lines += _tailnet(status.get("tailnet_access"))
    lines += _policies(status.get("policies"))
    if status.get("answers"):  # a daemon of an earlier release does not have it
        lines.append(f"ports of this node that tailnet peers reach: {', '.join(status['answers'])}")
    lines += [f"firewall: {firewall['summary']}" for firewall in status["firewalls"]]
    for condition in status["conditions"]:
        said = "ok" if condition["ok"] else paint(condition["reason"], BAD)
        lines.append(f"  {condition['name']}: {said}")
    lines += [paint(line, DOUBTFUL) for line in node_status.warnings(status, now)]
    return "\n".join(lines)
