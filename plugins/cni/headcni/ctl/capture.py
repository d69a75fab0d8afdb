"""``headcnictl capture``: a pod's packets, by tcpdump, as the pod sees them."""

from __future__ import annotations

import argparse
import os
import shutil

from . import node
from .main import CannotTell


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)
    parser.add_argument("pod", metavar="POD", help="namespace/name, address or container id")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="…", help="tcpdump's own: -w FILE, port 53 …"
    )


def run(args: argparse.Namespace) -> int:
    pod = node.find(node.load(args), args.pod)
    if not pod.netns:
        raise CannotTell(f"{args.pod} has no network namespace on record")
    for program in ("nsenter", "tcpdump"):
        if shutil.which(program) is None:
            raise CannotTell(f"{program} is not installed")
    options = [option for option in args.options if option != "--"]
    command = ["nsenter", f"--net={pod.netns}", "tcpdump", "-n", "-i", pod.owner.ifname, *options]
    os.execvp(command[0], command)  # noqa: S606 – it has the terminal from here on
