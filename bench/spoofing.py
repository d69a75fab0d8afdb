"""TCP between two pods of a node, with anti-spoofing and without it."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from cni_node import Namespace

from headcni.datapath import guard
from headcni.datapath import nft_messages as nft
from headcni.datapath.netlink import Netlink, Request, attribute, netfilter, text

from .measure import Findings, Row, median, median_error
from .stage import SUBNET, Stage

# The same pods, processes and connection in all rounds: only the nft tables are put to sleep, which
# takes their hooks away, and woken. Very many short turns in pairs, since a machine's speed drifts,
# and the median of the pairs' ratios, since whatever else runs takes a core from a turn of a pair.
PAIRS, WARM_UP = 3000, 5
SECONDS, SETTLE = 0.04, 0.005
FAMILIES = {"bridge": (nft.BRIDGE, nft.INET, nft.ARP), "routed": (nft.INET, nft.ARP)}
_NFTABLES, _NEWTABLE, _DORMANT = 10, 10 << 8, 1
RECEIVE = """
import socket, sys, threading, time
server = socket.create_server(("", 5201))
print("ready", flush=True)
connection, _ = server.accept()
count = 0
def read():
    global count
    while data := connection.recv(1 << 20):
        count += len(data)
threading.Thread(target=read, daemon=True).start()
for _ in sys.stdin:
    print(count, time.monotonic(), flush=True)
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5201))
data = bytes(1 << 17)
while True:
    connection.sendall(data)
"""


def run(stage: Stage, findings: Findings) -> None:
    stage.stop_daemon()  # it would bring the table back
    try:
        for datapath in FAMILIES:
            _compare(stage, findings, datapath)
    finally:
        stage.start_daemon()


def _compare(stage: Stage, findings: Findings, datapath: str) -> None:
    found: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as made:
        kernel = made.enter_context(netfilter())
        sender, to = made.enter_context(_pods(stage, datapath))
        receiver = made.enter_context(_receiver(to[0]))
        made.enter_context(_program(sender, SEND, to[1]))
        for number in range(-WARM_UP, PAIRS):
            for protected in (True, False) if number % 2 else (False, True):
                _protect(kernel, datapath, protected)
                rate = _rate(receiver)
                if number >= 0:
                    found[protected].append(rate)
    ours, theirs = found[True], found[False]
    # A turn in which nothing came is a stall of the machine; of such a pair neither counts.
    ratios = [mine / other for mine, other in zip(ours, theirs) if mine and other]
    findings.raw[f"spoofing, {datapath}"] = {"with": ours, "without": theirs}
    findings.rows.append(
        Row(
            "spoofing",
            f"TCP between pods of a node, {datapath}, with anti-spoofing",
            "without it",
            median(theirs) * median(ratios),
            median(theirs),
            unit="Mbit/s",
            bar=0.99,
            at_least=True,
            note=f"median of {len(ratios)} pairs, standard error {median_error(ratios):.3f}",
        )
    )


def _protect(kernel: Netlink, datapath: str, protected: bool) -> None:
    flags = attribute(2, struct.pack("!I", 0 if protected else _DORMANT))
    body = text(1, guard.TABLE) + flags
    kernel.commit(
        _NFTABLES,
        [
            Request(_NEWTABLE, 0, struct.pack("=BBH", family, 0, 0) + body, "wake or put to sleep")
            for family in FAMILIES[datapath]
        ],
    )
    time.sleep(SETTLE)


def _rate(receiver: subprocess.Popen[str]) -> float:
    began, start = _asked(receiver)
    time.sleep(SECONDS)
    ended, end = _asked(receiver)
    return (ended - began) * 8 / (end - start) / 1e6


def _asked(receiver: subprocess.Popen[str]) -> tuple[int, float]:
    assert receiver.stdin is not None and receiver.stdout is not None
    receiver.stdin.write("\n")
    receiver.stdin.flush()
    count, now = receiver.stdout.readline().split()
    return int(count), float(now)


@contextmanager
def _pods(stage: Stage, datapath: str) -> Iterator[tuple[Namespace, tuple[Namespace, str]]]:
    """One, and another one with its address."""
    conf = {
        "cniVersion": "1.1.0",
        "name": f"spoofing-{datapath}",
        "type": "headcni",
        "datapath": datapath,
        "pod_cidr": SUBNET,
        "data_dir": str(stage.data),
    }
    pods, address = (stage.pod(), stage.pod()), ""
    try:
        for pod in pods:
            made = stage.run(stage.bin / "headcni", conf, stage.environment("ADD", pod))
            address = made["ips"][0]["address"].partition("/")[0]
        yield pods[0], (pods[1], address)
    finally:
        for pod in pods:
            stage.run(stage.bin / "headcni", conf, stage.environment("DEL", pod))


@contextmanager
def _receiver(pod: Namespace) -> Iterator[subprocess.Popen[str]]:
    with _program(pod, RECEIVE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


@contextmanager
def _program(pod: Namespace, code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = ["ip", "netns", "exec", pod.name, sys.executable, "-c", code, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
