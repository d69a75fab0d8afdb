"""The program headcni-daemon: its command line, its signals, and its word with systemd."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Optional

from .. import __version__
from .. import log as logs
from .. import settings as configuration
from ..datapath import firewall
from ..errors import CniError
from ..exec import leave_sandbox
from ..shared.podcidr import PodCidrError
from .daemon import Daemon
from .readiness import problem_of
from .systemd import Notifier, Signals

_M_ARENA_MAX = -8

log = logs.Log("daemon")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="headcni-daemon", description="The HeadCNI node daemon.")
    parser.add_argument("--config", default=configuration.PATH, help="(%(default)s)")
    parser.add_argument("--check-config", action="store_true", help="say what is wrong, and stop")
    parser.add_argument("--json", action="store_true", help="with --check-config: as JSON")
    parser.add_argument(
        "--check-firewall", action="store_true", help="try the nft rules on this node, and stop"
    )
    parser.add_argument("--version", action="version", version=__version__)
    args = parser.parse_args(arguments)
    if args.check_config:
        code, said = configuration.check(args.config, args.json)
        print(said)
        return code
    if args.check_firewall:
        said = problem_of(firewall.try_out)
        print(said or "this node takes the nft rules")
        return 1 if said else 0
    return run(args.config)


def _keep_memory_together() -> None:
    """Limit glibc to two arenas. Otherwise each thread has one, which keeps what the thread has
    freed."""
    import ctypes

    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def run(path: str) -> int:
    _keep_memory_together()
    notifier, signals = Notifier(), Signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if "INVOCATION_ID" in os.environ:  # started by systemd, which can run plugins for us
        leave_sandbox()
    try:
        config = configuration.load(path, missing_ok=True)
        logs.set_up(config.logging.level, config.logging.format)
        daemon = Daemon(config, path)
        daemon.start()
    except (CniError, PodCidrError, OSError) as problem:
        logs.set_up()
        log.fatal("the daemon cannot start", problem=problem)
        return 1
    gc.collect()
    gc.freeze()  # a full collection over all modules would delay a call by 20 ms
    notifier.tell("READY=1", f"STATUS=serving {config.daemon.socket}")
    log.info("ready", version=__version__, mode=config.tailscale.mode)
    beat = notifier.watchdog / 3 or 3600.0
    while True:
        got = signals.wait(beat)
        if not got and daemon.is_healthy():
            notifier.tell("WATCHDOG=1")
        if got - {signal.SIGHUP}:
            break
        if not got:
            continue
        notifier.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        daemon.reload()
        notifier.tell("READY=1")
    notifier.tell("STOPPING=1")
    log.info("stopping", calls=daemon.server.calls)
    return 0 if daemon.stop() else 1
