"""TCP from pod to pod across nodes, beside pods of the Go bridge over the same tailscaled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, stdev

from .fleet import NODES, LabCommand, playbook
from .measure import Findings, Row, median

SENDER, RECEIVER = "node1", "node2"
# Both nodes and both ends share the cores, so the speed scatters and drifts: the two kinds of pods
# take turns of some fifty milliseconds. What pods and programs happen to get (a core, memory, a
# bucket of a hash) they keep: so these are made again and again, in another order.
TIMES, TURNS, WARM_UP = 24, 40, 4
SIZE = 8 << 20  # bytes of a transfer
LIMIT = 10  # seconds for a transfer
PORT = 5201
PEER_CONF = "/run/bench/net.d"
PROGRAMS = "/run/bench"
RECEIVE = """
import socket, sys
port, size = map(int, sys.argv[1:])
connection = socket.create_server(("", port)).accept()[0]
buffer = bytearray(1 << 20)
while True:
    left = size
    while left:
        count = connection.recv_into(buffer, min(left, len(buffer)))
        if not count:
            sys.exit()
        left -= count
    connection.sendall(b".")
"""
# One process for both kinds of pods, in turns; what it prints are seconds by kind. Python 3.11 of
# the nodes has no os.setns.
SEND = """
import ctypes, json, os, socket, sys, time
port, size, turns, limit, *pods = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
connections = {}
for pod in pods:
    namespace, address = pod.split("=")
    with open("/run/netns/" + namespace) as opened:
        if libc.setns(opened.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns", namespace)
    connections[namespace] = socket.create_connection((address, int(port)), timeout=int(limit))
data, found = bytes(int(size)), {namespace: [] for namespace in connections}
for turn in range(int(turns)):
    for namespace in list(connections)[:: -1 if turn % 2 else 1]:
        began = time.perf_counter()
        connections[namespace].sendall(data)
        if connections[namespace].recv(1) != b".":
            sys.exit("the receiver in " + namespace + " has ended")
        found[namespace].append(time.perf_counter() - began)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Kind:
    """A way to make a pod, by cnitool."""

    name: str
    network: str
    conf: str
    programs: str

    @property
    def netns(self) -> str:
        return f"bench-{self.network}"

    def pod(self, lab: LabCommand, node: str) -> str:
        """Its address."""
        lab.on(node, f"ip netns add {self.netns}")
        made = json.loads(lab.on(node, self._tool("add")))
        address: str = made["ips"][0]["address"].partition("/")[0]
        return address

    def remove(self, lab: LabCommand, node: str) -> None:
        lab.on(node, f"{self._tool('del')}; ip netns del {self.netns}", check=False)

    def _tool(self, verb: str) -> str:
        where = f"NETCONFPATH={self.conf} CNI_PATH={self.programs}"
        return f"{where} /opt/lab/cni/cnitool {verb} {self.network} /run/netns/{self.netns}"


OURS = Kind("headcni", "headcni", "/etc/cni/net.d", "/opt/cni/bin")
PEER = Kind("Go bridge", "gobridge", PEER_CONF, "/opt/lab/cni")
KINDS = (OURS, PEER)


def run(lab: LabCommand, findings: Findings) -> None:
    for node in NODES:
        if node not in (SENDER, RECEIVER):
            lab("stop", node)  # what they do by themselves would be felt
    for mode in ("host", "daemon"):
        if mode == "daemon":
            playbook(
                lab,
                "playbooks/switch_mode.yml",
                *("-e", "headcni_mode=daemon", "--limit", f"{SENDER},{RECEIVER}"),
            )
        # Of every pair of pods: the seconds of each kind.
        pairs = [_measured(lab, KINDS[:: -1 if number % 2 else 1]) for number in range(TIMES)]
        findings.raw[f"traffic, {mode} mode"] = pairs
        ratios = [
            median([peer / mine for mine, peer in zip(pair[OURS.name], pair[PEER.name])])
            for pair in pairs
        ]
        ratio = geometric_mean(ratios)
        theirs = SIZE * 8 / median([took for pair in pairs for took in pair[PEER.name]]) / 1e6
        error = stdev(ratios) / len(ratios) ** 0.5
        findings.rows.append(
            Row(
                "traffic",
                f"TCP from pod to pod, {mode} mode",
                "Go bridge pods, same tailscaled",
                theirs * ratio,
                theirs,
                unit="Mbit/s",
                bar=0.98,
                at_least=True,
                note=f"{TIMES} times {TURNS} transfers each, standard error {error:.3f}",
            )
        )


def _measured(lab: LabCommand, kinds: Sequence[Kind]) -> dict[str, list[float]]:
    """The seconds of each transfer, by the name of the kind; those of the warm-up are left out."""
    try:
        for number, node in enumerate((SENDER, RECEIVER), 1):
            _write_peer(lab, node, number)
        lab.write(SENDER, f"{PROGRAMS}/send.py", SEND.encode())
        lab.write(RECEIVER, f"{PROGRAMS}/receive.py", RECEIVE.encode())
        addresses = {}
        for kind in kinds:
            kind.pod(lab, SENDER)
            addresses[kind.netns] = kind.pod(lab, RECEIVER)
            receive = f"ip netns exec {kind.netns} python3 {PROGRAMS}/receive.py {PORT} {SIZE}"
            lab.on(RECEIVER, f"systemd-run --quiet --collect --unit={kind.netns} {receive}")
            listens = f"ip netns exec {kind.netns} ss -Hltn 'sport = :{PORT}' | grep -q ."
            lab.wait(RECEIVER, listens, 30)
        return _in_turns(lab, kinds, addresses)
    finally:
        for kind in kinds:
            lab.on(RECEIVER, f"systemctl stop {kind.netns}", check=False)
            for node in (SENDER, RECEIVER):
                kind.remove(lab, node)


def _in_turns(
    lab: LabCommand, kinds: Sequence[Kind], addresses: Mapping[str, str]
) -> dict[str, list[float]]:
    """On the node itself, so that logging in is not felt."""
    pods = " ".join(f"{kind.netns}={addresses[kind.netns]}" for kind in kinds)
    numbers = f"{PORT} {SIZE} {WARM_UP + TURNS} {LIMIT}"
    said = json.loads(lab.on(SENDER, f"python3 {PROGRAMS}/send.py {numbers} {pods}"))
    return {kind.name: said[kind.netns][WARM_UP:] for kind in kinds}


def _write_peer(lab: LabCommand, node: str, number: int) -> None:
    """The upper half of the node's pod CIDR, which is routed to it already."""
    ours = json.loads(lab.on(node, "cat /etc/cni/net.d/*headcni.conflist"))["plugins"][0]
    conf = {
        "cniVersion": "1.0.0",
        "name": PEER.network,
        "plugins": [
            {
                "type": "bridge",
                "bridge": PEER.network,
                "isGateway": True,
                "mtu": ours["mtu"],
                "ipam": {
                    "type": "host-local",
                    "dataDir": "/run/bench/addresses",
                    "ranges": [[{"subnet": f"10.55.{number}.128/25"}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }
    lab.write(node, f"{PEER_CONF}/10-{PEER.network}.conflist", json.dumps(conf).encode())
