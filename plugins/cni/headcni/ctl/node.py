"""What the verbs that look at this node share: its configuration, its store, its pods."""

from __future__ import annotations

import argparse
from typing import Any, List, Mapping, Sequence

from .. import settings as configuration
from ..settings import DaemonConfig
from ..store import Attachment, Store
from .main import CannotTell


def with_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", default=configuration.PATH, metavar="FILE", help="config.yaml (%(default)s)"
    )


def load(args: argparse.Namespace) -> DaemonConfig:
    return configuration.load(args.config, missing_ok=True)


def attachments(config: DaemonConfig) -> List[Attachment]:
    with Store.in_directory(config.daemon.data_dir) as store:
        return store.attachments()


def addresses(attachment: Attachment) -> List[str]:
    ips = attachment.result.get("ips") or []
    return [str(ip["address"]).partition("/")[0] for ip in ips]


def find(config: DaemonConfig, wanted: str) -> Attachment:
    """By namespace/name, name, address, or the beginning of the container's id."""
    found = [attachment for attachment in attachments(config) if _is(attachment, wanted)]
    if not found:
        raise CannotTell(f"no pod {wanted!r} on this node: see headcnictl pods")
    if len(found) > 1:
        names = ", ".join(
            f"{attachment.owner.container_id[:12]} {attachment.owner.ifname}"
            for attachment in found
        )
        raise CannotTell(f"{wanted!r} is more than one: {names}; give the container's id")
    return found[0]


def _is(attachment: Attachment, wanted: str) -> bool:
    if wanted in (str(attachment.pod), attachment.pod.name, *addresses(attachment)):
        return True
    return len(wanted) >= 4 and attachment.owner.container_id.startswith(wanted)


def warned(status: Mapping[str, Any]) -> List[str]:
    """The daemon's alarms and warnings. A daemon of an earlier release that is still running has
    no warnings."""
    alarms = [alarm for alarm in status["alarms"] if not alarm.get("holds_back", True)]
    return [f"ALARM: {alarm['message']}" for alarm in alarms] + [
        f"WARNING: {warning['message']}" for warning in status.get("warnings", ())
    ]


def table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    """Columns as wide as needed, without trailing blanks."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)
