"""Pods that talk all the time, and what it cost them: every ping, and a TCP transfer, both ways."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations

from lab_command import LabCommand

INTERVAL = 0.02
RATE = "2M"  # of the transfer: enough to notice, little enough for two cores
BETWEEN = "--- the transfer"  # two logs
CNITOOL = "CNI_PATH=/opt/cni/bin /opt/lab/cni/cnitool"


@dataclass
class Cost:
    """Of one direction."""

    sent: int
    lost: int
    gap: float  # the longest time between two replies
    transfer: bool  # whether the transfer went on to the end
    stall: float  # its longest time without a byte

    def __str__(self) -> str:
        return (
            f"{self.lost} of {self.sent} pings lost, longest gap {self.gap:.2f} s, transfer "
            f"{'alive' if self.transfer else 'DEAD'}, longest stall {self.stall:.1f} s"
        )


def assert_unharmed(costs: dict[str, Cost], gap: float = 1.0) -> None:
    for pair, cost in costs.items():
        print(f"{pair}: {cost}")
        assert cost.transfer and cost.gap < gap, f"{pair}: {cost}"


@dataclass
class Traffic:
    lab: LabCommand
    nodes: Sequence[str]
    addresses: dict[str, str] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)

    def pods(self) -> None:
        for node in self.nodes:
            self.lab.on(node, "ip netns add pod")
            made = json.loads(self.lab.on(node, f"{CNITOOL} add headcni /run/netns/pod"))
            self.addresses[node] = made["ips"][0]["address"].partition("/")[0]

    def find_pods(self) -> None:
        """Those that another process has made."""
        for node in self.nodes:
            shown = json.loads(self.lab.on(node, "ip -j -4 -n pod address show dev eth0"))
            self.addresses[node] = shown[0]["addr_info"][0]["local"]

    def no_pods(self) -> None:
        for node in self.nodes:
            self.lab.on(node, f"{CNITOOL} del headcni /run/netns/pod; ip netns del pod")

    def reached(self) -> None:
        for source, target in permutations(self.nodes, 2):
            self.lab.wait(source, f"ip netns exec pod ping -c 1 -W 1 {self.addresses[target]}")

    @contextmanager
    def flowing(self) -> Iterator[dict[str, Cost]]:
        """What it costs to do something; known once it is done."""
        self.start()
        try:
            yield self.costs
        finally:
            self.stop()

    def start(self) -> None:
        self.reached()
        self.costs.clear()
        for port, source, target in self._flows():
            serve = _unit(f"serve-{port}", f"iperf3 -s -1 -p {port}")
            listens = f"ip netns exec pod ss -ltn | grep -q :{port}"
            waits = f"timeout 10 sh -c 'until {listens}; do sleep 0.1; done'"
            self.lab.on(target, f"{serve} && {waits}")
            address = self.addresses[target]
            ping = _unit(f"ping-{target}", f"ping -n -D -i {INTERVAL} {address}")
            send = f"iperf3 -c {address} -p {port} -t 3600 -b {RATE} -i 0.2 --forceflush"
            self.lab.on(source, f"{ping} && {_unit(f'send-{target}', send)}")
        time.sleep(2)

    def stop(self) -> dict[str, Cost]:
        """It may have been started by another process."""
        time.sleep(2)
        for port, source, target in self._flows():
            said = self.lab.on(
                source,
                f"systemctl is-active send-{target}; systemctl stop send-{target}; "
                f"systemctl kill -s INT ping-{target}; sleep 0.3; "
                f"cat /run/ping-{target}.log; echo; echo {BETWEEN}; cat /run/send-{target}.log",
            )
            self.lab.on(target, f"systemctl stop serve-{port}", check=False)
            alive, _, logs = said.partition("\n")
            pings, _, sends = logs.partition(BETWEEN)
            self.costs[f"{source}→{target}"] = _cost(pings, sends, alive == "active")
        return self.costs

    def _flows(self) -> list[tuple[int, str, str]]:
        """A port of its own for each direction."""
        pairs = permutations(self.nodes, 2)
        return [(5300 + number, source, target) for number, (source, target) in enumerate(pairs)]


def _unit(name: str, command: str) -> str:
    """A shell command that runs another in the pod, in the background, and keeps what it says."""
    return (
        f"systemd-run --quiet --collect --unit={name}"
        f" --property=StandardOutput=truncate:/run/{name}.log"
        f" ip netns exec pod {command}"
    )


def _cost(pings: str, sends: str, alive: bool) -> Cost:
    at = [float(one) for one in re.findall(r"^\[([\d.]+)\] \d+ bytes from", pings, re.M)]
    counted = re.search(r"(\d+) packets transmitted, (\d+) received", pings)
    assert counted and len(at) > 1, pings[-500:]
    stalled = longest = 0
    for amount in re.findall(r"-[\d.]+ +sec +([\d.]+) \w?Bytes .* \d+ +[\d.]+ \w?Bytes", sends):
        stalled = stalled + 1 if float(amount) == 0 else 0
        longest = max(longest, stalled)
    return Cost(
        sent=int(counted[1]),
        lost=int(counted[1]) - int(counted[2]),
        gap=max(b - a for a, b in zip(at, at[1:])),
        transfer=alive and bool(sends),
        stall=0.2 * longest,
    )
