"""``headcnictl pods``: the pod interfaces of this node."""

from __future__ import annotations

import argparse

from . import node
from .main import OK, show
from .terminal import table


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)


def run(args: argparse.Namespace) -> int:
    found = sorted(
        node.attachments(node.load(args)),
        key=lambda attachment: (str(attachment.pod), attachment.owner),
    )
    if args.json:
        listed = [
            {
                "namespace": attachment.pod.namespace,
                "pod": attachment.pod.name,
                "uid": attachment.pod.uid,
                "network": attachment.owner.network,
                "container_id": attachment.owner.container_id,
                "interface": attachment.owner.ifname,
                "host_interface": attachment.host_ifname,
                "netns": attachment.netns,
                "addresses": node.addresses(attachment),
                "created": attachment.created,
            }
            for attachment in found
        ]
        show(listed, as_json=True)
        return OK
    rows = [
        (
            str(attachment.pod) or "-",
            ",".join(node.addresses(attachment)),
            attachment.owner.ifname,
            attachment.host_ifname or "-",
            attachment.owner.network,
            attachment.owner.container_id[:12],
        )
        for attachment in found
    ]
    head = ("POD", "ADDRESSES", "INTERFACE", "HOST", "NETWORK", "CONTAINER")
    show(table(rows, head), as_json=False)
    return OK
