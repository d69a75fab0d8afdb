"""TCP between two pods of a node, with anti-spoofing and without it."""

from __future__ import annotations

import errno
import struct
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import geometric_mean

from cni_node import Namespace

from headcni.datapath import guard, rtnl
from headcni.datapath.netlink import Netlink, Request, text

from . import transfers
from .measure import Findings, Row, median, median_error
from .stage import SUBNET, Stage

# Two pairs of pods transfer in turns of milliseconds; the pods of one pair are checked. After each
# block the other pair is checked instead, so that what distinguishes the pairs cancels out.
# Adding or deleting an ingress qdisc takes the link down for a moment, and TCP needs up to 200 ms
# (its shortest retransmission time-out) to recover from the loss: SETTLE is longer than that.
BLOCKS, TURNS, WARM_UP = 8, 1500, 20
SETTLE = 0.5
RTM_DELQDISC = 37


def run(stage: Stage, findings: Findings) -> None:
    stage.stop_daemon()  # it would add the filters again
    try:
        for datapath in ("bridge", "routed"):
            _compare(stage, findings, datapath)
    finally:
        stage.start_daemon()


def _compare(stage: Stage, findings: Findings, datapath: str) -> None:
    medians, errors, without = [], [], []
    with ExitStack() as made:
        kernel = made.enter_context(Netlink())
        pairs = [made.enter_context(_pods(stage, datapath)) for _ in range(2)]
        stations = _stations(kernel, [pair.addresses for pair in pairs])
        link = made.enter_context(
            transfers.between(*((pair.sender, pair.receiver, pair.addresses[-1]) for pair in pairs))
        )
        for block in range(BLOCKS):
            checked = block % 2
            _check(kernel, stations[checked])
            _leave_alone(kernel, stations[1 - checked])
            time.sleep(SETTLE)
            ratios = []
            for number in range(-WARM_UP, TURNS):
                order = (0, 1) if number % 2 else (1, 0)
                took = {which: link.seconds(which) for which in order}
                if number >= 0:
                    ratios.append(took[1 - checked] / took[checked])
                    without.append(took[1 - checked])
            medians.append(median(ratios))
            errors.append(median_error(ratios))
    ratio = geometric_mean(medians)
    error = sum(one**2 for one in errors) ** 0.5 / BLOCKS
    findings.raw[f"spoofing, {datapath}"] = {"ratio of each block": medians, "errors": errors}
    theirs = transfers.SIZE * 8 / median(without) / 1e6
    findings.rows.append(
        Row(
            "spoofing",
            f"TCP between pods of a node, {datapath}, with anti-spoofing",
            "without it",
            theirs * ratio,
            theirs,
            unit="Mbit/s",
            bar=0.99,
            at_least=True,
            note=f"{BLOCKS * TURNS} transfers each, standard error {error:.4f}",
        )
    )


@dataclass(frozen=True)
class _Pair:
    sender: Namespace
    receiver: Namespace
    addresses: tuple[str, ...]  # the sender's, then the receiver's


def _stations(
    kernel: Netlink, pairs: Collection[tuple[str, ...]]
) -> list[tuple[guard.Station, ...]]:
    """Those of each pair's pods, while all are checked."""
    of_pod = {
        str(address): station
        for station in guard.stations(kernel).values()
        for address in station.addresses
    }
    return [tuple(of_pod[address] for address in pair) for pair in pairs]


def _check(kernel: Netlink, stations: Collection[guard.Station]) -> None:
    for station in stations:
        guard.check_frames(kernel, station)


def _leave_alone(kernel: Netlink, stations: Collection[guard.Station]) -> None:
    for station in stations:
        head = struct.pack("=BxxxiIII", 0, kernel.index(station.host), 0, rtnl.TC_H_INGRESS, 0)
        body = head + text(rtnl.TCA_KIND, "ingress")
        gone = errno.ENOENT, errno.EINVAL
        kernel.do([Request(RTM_DELQDISC, 0, body, "delete the ingress qdisc", fine=gone)])


@contextmanager
def _pods(stage: Stage, datapath: str) -> Iterator[_Pair]:
    conf = {
        "cniVersion": "1.1.0",
        "name": f"spoofing-{datapath}",
        "type": "headcni",
        "datapath": datapath,
        "pod_cidr": SUBNET,
        "data_dir": str(stage.data),
    }
    sender, receiver = stage.pod(), stage.pod()
    try:
        addresses = []
        for pod in (sender, receiver):
            made = stage.run(stage.bin / "headcni", conf, stage.environment("ADD", pod))
            addresses.append(made["ips"][0]["address"].partition("/")[0])
        yield _Pair(sender, receiver, tuple(addresses))
    finally:
        for pod in (sender, receiver):
            stage.run(stage.bin / "headcni", conf, stage.environment("DEL", pod))
