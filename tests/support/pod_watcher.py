"""Runs the daemon's pod watcher alone, on a node, and tells what it does as lines of JSON."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from ipaddress import ip_network

from headcni import log
from headcni.daemon.kubernetes.access import Source
from headcni.daemon.kubernetes.client import KubeClient
from headcni.daemon.kubernetes.pods import PodWatcher
from headcni.database import DATA_DIR
from headcni.store import Store


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--cidr", required=True)
    parser.add_argument("--labels", default="")
    parser.add_argument("--grace", type=float, default=5.0)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--version", default="", help="watch from there, as if it were known")
    args = parser.parse_args()
    log.set_up("DEBUG")
    store = Store.in_directory(DATA_DIR)
    watcher = PodWatcher(
        KubeClient(Source(args.kubeconfig)),
        lambda: store,
        args.node,
        args.labels,
        own_cidrs=[ip_network(args.cidr)],
        on_event=lambda kind, _, pod, words: tell(event=kind, pod=str(pod), message=words),
        interval=args.interval,
        grace=args.grace,
        settle=1.0,
    )
    watcher._version = args.version
    passes = 0
    reconcile = watcher.reconcile

    def counted() -> object:
        nonlocal passes
        report = reconcile()
        passes += 1
        return report

    watcher.reconcile = counted
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    watcher.start()
    told = None
    while not over.wait(0.2):
        now = {
            **watcher.stats._asdict(),
            "names": sorted(pod.name for pod in list(watcher._pods.values())),
            "condition": list(watcher.condition),
            "passes": passes,
        }
        if now != told:
            told = now
            tell(**now)
    watcher.stop()
    tell(stopped=not any(thread.is_alive() for thread in watcher._threads))


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
