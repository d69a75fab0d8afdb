"""TCP from pod to pod across nodes, beside pods of the Go bridge over the same tailscaled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .fleet import NODES, LabCommand, playbook
from .measure import Findings, Row, ratio_error

SENDER, RECEIVER = "node1", "node2"
# Both nodes and both ends share the cores, so a second's traffic scatters by a tenth and drifts:
# many short turns, and all that they carried. What pods and servers happen to get (a core, memory,
# a bucket) they keep: so these are made anew now and then, in another order.
TIMES, ROUNDS = 12, 20
SECONDS = 1
PORT = 5201
PEER_CONF = "/run/bench/net.d"


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
        found: dict[str, dict[str, list[float]]] = {}
        for number in range(TIMES):
            for name, values in _measured(lab, KINDS[:: -1 if number % 2 else 1]).items():
                for what, measured in values.items():
                    found.setdefault(name, {}).setdefault(what, []).extend(measured)
        findings.raw[f"traffic, {mode} mode"] = found
        ours, theirs = (found[kind.name]["Mbit/s"] for kind in KINDS)
        findings.rows.append(
            Row(
                "traffic",
                f"TCP from pod to pod, {mode} mode",
                "Go bridge pods, same tailscaled",
                fmean(ours),
                fmean(theirs),
                unit="Mbit/s",
                bar=0.98,
                at_least=True,
                note=f"{len(ours)} rounds, one standard error {ratio_error(ours, theirs):.3f}",
            )
        )


def _measured(lab: LabCommand, kinds: Sequence[Kind]) -> dict[str, dict[str, list[float]]]:
    try:
        for number, node in enumerate((SENDER, RECEIVER), 1):
            _write_peer(lab, node, number)
        addresses = {}
        for kind in kinds:
            kind.pod(lab, SENDER)
            addresses[kind.name] = kind.pod(lab, RECEIVER)
            serve = f"ip netns exec {kind.netns} iperf3 -s -p {PORT}"
            lab.on(RECEIVER, f"systemd-run --quiet --collect --unit=iperf-{kind.network} {serve}")
            lab.wait(
                SENDER, f"ip netns exec {kind.netns} nc -z -w 1 {addresses[kind.name]} {PORT}", 30
            )

        return _in_turns(lab, kinds, addresses)
    finally:
        for kind in kinds:
            lab.on(RECEIVER, f"systemctl stop iperf-{kind.network}", check=False)
            for node in (SENDER, RECEIVER):
                kind.remove(lab, node)


def _in_turns(
    lab: LabCommand, kinds: Sequence[Kind], addresses: Mapping[str, str]
) -> dict[str, dict[str, list[float]]]:
    """One round after the other on the node itself, so that logging in is not felt, each in the
    reverse order of the one before. The first is kept apart, as warm-up."""
    turns = [kind for number in range(1 + ROUNDS) for kind in kinds[:: -1 if number % 2 else 1]]
    sends = [
        f"ip netns exec {kind.netns} iperf3 -c {addresses[kind.name]} -p {PORT} -t {SECONDS} --json"
        for kind in turns
    ]
    # A server needs a moment between two clients.
    said = lab.on(SENDER, " && sleep 0.1 && ".join(sends))
    rates = [one["end"]["sum_received"]["bits_per_second"] / 1e6 for one in _documents(said)]
    found: dict[str, dict[str, list[float]]] = {kind.name: {} for kind in kinds}
    for number, (kind, rate) in enumerate(zip(turns, rates)):
        kept = "Mbit/s" if number >= len(kinds) else "Mbit/s warm-up"
        found[kind.name].setdefault(kept, []).append(rate)
    return found


def _documents(text: str) -> list[dict[str, Any]]:
    """Of JSON, one behind the other."""
    found, decoder, text = [], json.JSONDecoder(), text.strip()
    while text:
        one, end = decoder.raw_decode(text)
        found.append(one)
        text = text[end:].lstrip()
    return found


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
