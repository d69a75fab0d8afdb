"""``headcnictl ping``: whether a pod reaches an address, and with packets of which size."""

from __future__ import annotations

import argparse
import subprocess

from . import node
from .main import NO, OK, CannotTell, show


def arguments(parser: argparse.ArgumentParser) -> None:
    node.with_config(parser)
    parser.add_argument("pod", metavar="POD", help="namespace/name, address or container id")
    parser.add_argument("target", metavar="ADDRESS", help="whom to ask, by address or name")
    parser.add_argument("--count", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--mtu",
        type=int,
        metavar="BYTES",
        help="in packets of this size that may not be taken apart",
    )


def run(args: argparse.Namespace) -> int:
    pod = node.find(node.load(args), args.pod)
    if not pod.netns:
        raise CannotTell(f"{args.pod} has no network namespace on record")
    command = ["nsenter", f"--net={pod.netns}", "ping", "-n", "-W", "2", "-c", str(args.count)]
    if args.mtu:
        command += ["-M", "do", "-s", str(args.mtu - (48 if ":" in args.target else 28))]
    try:
        done = subprocess.run(
            [*command, args.target],
            capture_output=True,
            text=True,
            timeout=15 + 3 * args.count,
            check=False,
        )
    except FileNotFoundError as problem:
        raise CannotTell(f"{problem.filename} is not installed") from None
    except subprocess.TimeoutExpired:
        raise CannotTell("ping did not end in time") from None
    if done.returncode > 1:
        raise CannotTell(done.stderr.strip() or f"ping ended with {done.returncode}")
    reached = done.returncode == 0
    answer = {"pod": args.pod, "target": args.target, "reached": reached, "output": done.stdout}
    show(answer if args.json else done.stdout.strip(), args.json)
    return OK if reached else NO
