"""TCP between two pods of a node, with anti-spoofing and without it."""

from __future__ import annotations

import errno
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

from cni_node import Namespace

from headcni.datapath import guard, rtnl
from headcni.datapath.netlink import Netlink, Request, text

from .measure import Findings, Row, median, median_error
from .stage import SUBNET, Stage

# The same pods, processes and connection in all rounds. Only the ingress qdiscs with the filters
# are deleted and added. Many short turns in pairs, because a machine's speed drifts, and the
# median of the pairs' ratios, because whatever else runs takes a core from a turn of a pair.
# Adding or deleting an ingress qdisc takes the link down for a moment, and TCP needs up to 200 ms
# (its shortest retransmission time-out) to recover from the loss: SETTLE is longer than that.
PAIRS, WARM_UP = 250, 5
SECONDS, SETTLE = 0.1, 0.3
RTM_DELQDISC = 37
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
    stage.stop_daemon()  # it would add the filters again
    try:
        for datapath in ("bridge", "routed"):
            _compare(stage, findings, datapath)
    finally:
        stage.start_daemon()


def _compare(stage: Stage, findings: Findings, datapath: str) -> None:
    found: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as made:
        kernel = made.enter_context(Netlink())
        sender, to = made.enter_context(_pods(stage, datapath))
        stations = guard.stations(kernel).values()
        assert len(stations) == 2, stations
        arrived = made.enter_context(receiver(to[0]))
        made.enter_context(program(sender, SEND, to[1]))
        for number in range(-WARM_UP, PAIRS):
            for protected in (True, False) if number % 2 else (False, True):
                _protect(kernel, stations, protected)
                measured = rate(arrived)
                if number >= 0:
                    found[protected].append(measured)
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


def _protect(kernel: Netlink, stations: Collection[guard.Station], protected: bool) -> None:
    for station in stations:
        if protected:
            guard.check_frames(kernel, station)
            continue
        head = struct.pack("=BxxxiIII", 0, kernel.index(station.host), 0, rtnl.TC_H_INGRESS, 0)
        body = head + text(rtnl.TCA_KIND, "ingress")
        gone = errno.ENOENT, errno.EINVAL
        kernel.do([Request(RTM_DELQDISC, 0, body, "delete the ingress qdisc", fine=gone)])
    time.sleep(SETTLE)


def rate(process: subprocess.Popen[str], seconds: float = SECONDS) -> float:
    """Mbit/s that arrive at a receiver."""
    began, start = _asked(process)
    time.sleep(seconds)
    ended, end = _asked(process)
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
def receiver(pod: Namespace) -> Iterator[subprocess.Popen[str]]:
    with program(pod, RECEIVE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


@contextmanager
def program(pod: Namespace, code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = ["ip", "netns", "exec", pod.name, sys.executable, "-c", code, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
