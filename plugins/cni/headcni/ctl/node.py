"""What the verbs that look at this node share: its configuration, its store, its pods."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, List

from .main import CannotTell

if TYPE_CHECKING:
    from ..settings import DaemonConfig
    from ..store import Attachment

# The settings and the store are imported where they are used: together they take longer than all
# that `headcnictl status` does.
CONFIG = "/etc/headcni/config.yaml"


def with_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", default=CONFIG, metavar="FILE", help="config.yaml (%(default)s)"
    )


def load(args: argparse.Namespace) -> DaemonConfig:
    from .. import settings as configuration

    return configuration.load(args.config, missing_ok=True)


def attachments(config: DaemonConfig) -> List[Attachment]:
    from ..store import Store

    with Store.in_directory(config.daemon.data_dir) as store:
        return store.attachments()


def addresses(attachment: Attachment) -> List[str]:
    ips = attachment.result.get("ips") or []
    return [str(ip["address"]).partition("/")[0] for ip in ips]


def find(config: DaemonConfig, wanted: str) -> Attachment:
    """By namespace/name, name, address, or the beginning of the container's id."""
    found = [attachment for attachment in attachments(config) if is_called(attachment, wanted)]
    if not found:
        raise CannotTell(f"no pod {wanted!r} on this node: see headcnictl pods")
    if len(found) > 1:
        names = ", ".join(
            f"{attachment.owner.container_id[:12]} {attachment.owner.ifname}"
            for attachment in found
        )
        raise CannotTell(f"{wanted!r} is more than one: {names}; give the container's id")
    return found[0]


def is_called(attachment: Attachment, wanted: str) -> bool:
    if wanted in (str(attachment.pod), attachment.pod.name, *addresses(attachment)):
        return True
    return len(wanted) >= 4 and attachment.owner.container_id.startswith(wanted)
