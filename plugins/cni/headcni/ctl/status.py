"""``headcnictl status``: whether the node works, and if not, what is wrong."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any, Dict, List, Optional

from ..errors import CniError
from ..settings import control_path
from ..shared import bearer_token
from ..tailnet_access import ALL
from . import node
from .daemon_client import asked
from .main import NO, OK, CannotTell, show


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)


def run(args: argparse.Namespace) -> int:
    try:
        with asked("status", control_path(node.load(args))) as answers:
            status = next(answers, None)
    except CniError as problem:
        raise CannotTell(str(problem)) from None
    if status is None:
        raise CannotTell("headcni-daemon ended while it was asked")
    show(status if args.json else _in_words(status), args.json)
    return OK if status["ready"] else NO


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
    hours, rest = divmod(int(time.time() - status["since"]), 3600)
    lines = [
        f"headcni-daemon {status['version']}, pid {status['pid']}, "
        f"up {hours}h{rest // 60:02d}m{rest % 60:02d}s",
        f"{'ready' if status['ready'] else 'NOT READY'}: {status['mode']} mode by "
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
        lines.append(f"  {condition['name']}: {'ok' if condition['ok'] else condition['reason']}")
    lines += node.warned(status)
    return "\n".join(lines)
