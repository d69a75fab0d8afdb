"""``headcnictl pods``: whom this node has given an interface, and which."""

from __future__ import annotations

import argparse

from . import node
from .main import OK, show


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)


def run(args: argparse.Namespace) -> int:
    found = sorted(node.attachments(node.load(args)), key=lambda one: (str(one.pod), one.owner))
    if args.json:
        listed = [
            {
                "namespace": one.pod.namespace,
                "pod": one.pod.name,
                "uid": one.pod.uid,
                "network": one.owner.network,
                "container_id": one.owner.container_id,
                "interface": one.owner.ifname,
                "host_interface": one.host_ifname,
                "netns": one.netns,
                "addresses": node.addresses(one),
                "created": one.created,
            }
            for one in found
        ]
        show(listed, as_json=True)
        return OK
    rows = [
        (
            str(one.pod) or "-",
            ",".join(node.addresses(one)),
            one.owner.ifname,
            one.host_ifname or "-",
            one.owner.network,
            one.owner.container_id[:12],
        )
        for one in found
    ]
    head = ("POD", "ADDRESSES", "INTERFACE", "HOST", "NETWORK", "CONTAINER")
    show(node.table(rows, head), as_json=False)
    return OK
