"""``headcnictl pod-cidr``: which pod CIDR was chosen, which were not, and why."""

from __future__ import annotations

import argparse
import os

from .. import settings as config
from ..errors import NO_POD_CIDR, CniError
from ..problems import error
from ..shared.podcidr import PodCidrError, resolve
from .main import OK, CannotTell, read, show


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help=f"config.yaml ({config.PATH}, if there)")
    parser.add_argument("--root", default="/", metavar="DIR", help="where the node's files are (/)")
    parser.add_argument("--hostname", default="", help="as if the node were called so")
    parser.add_argument("--node-name", default="", help="what Kubernetes calls the node")


def run(args: argparse.Namespace) -> int:
    path = args.config or os.path.join(args.root, config.PATH.lstrip("/"))
    if args.config and not os.path.exists(path):
        raise CannotTell(f"{path} is not there")
    made, found = config.parse(read(path) if os.path.exists(path) else b"")
    wrong = [problem for problem in found if problem.path.startswith("network")]
    if wrong:
        raise error(wrong)
    try:
        resolution = resolve(
            config.for_resolver(made), os.environ, args.root, args.hostname, args.node_name
        )
    except PodCidrError as problem:
        raise CniError(NO_POD_CIDR, "no pod CIDR for this node", str(problem)) from None
    show(resolution.as_dict() if args.json else resolution.explain(), args.json)
    return OK
