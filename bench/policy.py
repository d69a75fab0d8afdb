"""Network policies: 1,000 of them over 10,000 pods, compiled, changed and enforced."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from cni_node import Namespace
from policy_node import (
    PolicyDaemon,
    namespace_object,
    pod_args,
    pod_object,
    policy_object,
)

from . import transfers
from .cni import ours
from .measure import Findings, Row, median, timed
from .stage import Stage

NAMESPACES, APPS, PODS, POLICIES = 100, 10, 10_000, 1000
HERE = 110  # pods of this node, as many as kubelet allows
CHANGES = 30
PAIRS, TRANSFERS = 40, 40
BLOCKS, ADDS = 6, 8
# Modules that the whole daemon has loaded, and this one does not use.
WHOLE_DAEMON = "import headcni.daemon.daemon\n"
LATENCY = """
import socket, sys, time
def turns(count, work):
    took = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return sorted(took)[count // 2] * 1e6
address = sys.argv[1]
lasting = socket.create_connection((address, 5202))
lasting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def there_and_back():
    lasting.sendall(b"x")
    lasting.recv(1)
def connect():
    with socket.create_connection((address, 5202)) as one:
        one.sendall(b"x")
        one.recv(1)
print("ready", flush=True)
for _ in sys.stdin:
    print(turns(1500, there_and_back), turns(150, connect), flush=True)
"""
ANSWER = """
import socket, threading
server = socket.create_server(("", 5202), backlog=512)
def serve(connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while said := connection.recv(1):
            connection.sendall(said)
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()
"""


def run(stage: Stage, findings: Findings) -> None:
    stage.stop_daemon()
    try:
        with PolicyDaemon(stage.node, prelude=WHOLE_DAEMON) as daemon, ExitStack() as pods:
            here = [
                pods.enter_context(added(stage, daemon, f"pod{number}", f"ns{number % NAMESPACES}"))
                for number in range(HERE)
            ]
            _compile(daemon, findings)
            _change(daemon, findings)
            _traffic(daemon, findings, here[0][0], here[NAMESPACES])
        with PolicyDaemon(stage.node, prelude=WHOLE_DAEMON) as daemon:
            daemon.ask("world", cluster())
            _adds(stage, daemon, findings)
    finally:
        stage.start_daemon()


def cluster() -> dict[str, Any]:
    """Pods of ten applications in a hundred namespaces, and ten policies for each namespace."""
    pods = []
    for number in range(PODS):
        here = number < HERE
        addresses = [] if here else [f"10.60.{number // 250}.{number % 250 + 1}"]
        pods.append(pod(number, addresses, ""))
    policies = [policy(number) for number in range(POLICIES)]
    namespaces = [namespace_object(f"ns{n}", team=f"t{n % 10}") for n in range(NAMESPACES)]
    return {"pods": pods, "namespaces": namespaces, "policies": policies}


def pod(number: int, addresses: list[str], node: str) -> dict[str, Any]:
    labels = {"app": f"app{number // NAMESPACES % APPS}", "pod": f"p{number % 7}"}
    where, ports = f"ns{number % NAMESPACES}", [("http", 8080, "TCP")]
    return pod_object(where, f"pod{number}", labels, ports, addresses, node=node)


def policy(number: int) -> dict[str, Any]:
    """Of every form; pods of this node are of app0 and app1."""
    app, other = f"app{number // NAMESPACES}", f"app{(number // NAMESPACES + 1) % APPS}"
    team = {"namespaceSelector": {"matchLabels": {"team": f"t{number % 10}"}}}
    block = {"cidr": f"172.{16 + number % 16}.0.0/16", "except": [f"172.{16 + number % 16}.9.0/24"]}
    spec = {
        "podSelector": {"matchLabels": {"app": app}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {
                "from": [{"podSelector": {"matchLabels": {"app": other}}}, team],
                "ports": [{"port": "http"}, {"port": 5201, "endPort": 5300 + number % 5}],
            },
            {"from": [{"ipBlock": block}]},
        ],
        "egress": [
            {"to": [{"namespaceSelector": {}}], "ports": [{"port": 53, "protocol": "UDP"}]},
            {"to": [{"podSelector": {}}]},
        ],
    }
    return policy_object(f"ns{number % NAMESPACES}", f"policy{number}", spec)


@contextmanager
def added(
    stage: Stage, daemon: PolicyDaemon, name: str, namespace: str
) -> Iterator[tuple[Namespace, str]]:
    """A pod with policies, and its address."""
    netns, conf = stage.pod(), protected(stage)
    env = {"args": pod_args(namespace, name), "HEADCNI_SOCKET": daemon.socket}
    made = stage.run(stage.bin / "headcni", conf, stage.environment("ADD", netns, **env))
    try:
        yield netns, made["ips"][0]["address"].partition("/")[0]
    finally:
        stage.run(stage.bin / "headcni", conf, stage.environment("DEL", netns, **env))


def protected(stage: Stage) -> dict[str, Any]:
    return ours(stage, name="protected", bridge="protected0", enable_network_policy=True)


def _compile(daemon: PolicyDaemon, findings: Findings) -> None:
    daemon.ask("world", cluster())
    report = daemon.ask("report")
    assert report["policies"] == POLICIES and len(report["pods"]) == HERE
    assert daemon.ask("repair") == []
    what = f"{POLICIES} policies over {PODS} pods, {HERE} of them here"
    _limit(findings, f"{what}: compile and load", report["compile_seconds"], 2.0, "s")
    with open(f"/proc/{runtime(daemon)}/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    rss = int(lines["VmRSS"].split()[0]) / 1024
    _limit(findings, f"{what}: the daemon's memory", rss, 120.0, "MiB")
    findings.raw["policy report"] = {key: report[key] for key in ("profiles", "elements", "peers")}


def runtime(daemon: PolicyDaemon) -> int:
    """`ip netns exec` has become the program that it was to run."""
    return daemon.process.pid


def _change(daemon: PolicyDaemon, findings: Findings) -> None:
    """With the kernel's part, as the enforcer measures it."""
    found: dict[str, list[float]] = {"pod": [], "policy": []}
    for number in range(CHANGES):
        where, name = f"ns{number % NAMESPACES}", f"new{number}"
        labels = {"app": f"app{number % APPS}"}
        far = pod_object(where, name, labels, None, [f"10.61.0.{number + 1}"])
        found["pod"].append(changed(daemon, "pod", where, name, far))
        found["pod"].append(changed(daemon, "pod", where, name, None))
        changed_policy = policy(number + 1)
        changed_policy["metadata"]["namespace"] = where
        changed_policy["spec"]["podSelector"] = {}
        found["policy"].append(changed(daemon, "policy", where, "more", changed_policy))
        found["policy"].append(changed(daemon, "policy", where, "more", None))
    findings.raw["policy changes"] = found
    for what, took in found.items():
        _limit(
            findings, f"a change of one {what}, with the kernel", 1000 * median(took), 20.0, "ms"
        )


def changed(daemon: PolicyDaemon, kind: str, namespace: str, name: str, found: Any) -> float:
    if found is not None:
        found["metadata"]["name"] = name
    return float(daemon.ask(kind, {"key": [namespace, name], "object": found}))


def _traffic(
    daemon: PolicyDaemon, findings: Findings, sender: Namespace, to: tuple[Namespace, str]
) -> None:
    """Between two pods of the node whose policies allow it."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    trips: dict[bool, list[float]] = {True: [], False: []}
    connects: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as made:
        made.enter_context(_ready(to[0], ANSWER))
        asking = made.enter_context(_ready(sender, LATENCY, to[1]))
        link = made.enter_context(transfers.between((sender, *to)))
        for number in range(PAIRS):
            for policies in (True, False) if number % 2 else (False, True):
                daemon.ask("without policies", policies)
                took = median([link.seconds(0) for _ in range(TRANSFERS)])
                rates[policies].append(transfers.SIZE * 8 / took / 1e6)
                trip, connect = _asked(asking)
                trips[policies].append(trip)
                connects[policies].append(connect)
        daemon.ask("without policies", True)
    findings.raw["policy traffic"] = {
        f"{name}, {'with' if policies else 'without'}": values
        for name, both in (("rate", rates), ("round trip", trips), ("connect", connects))
        for policies, values in both.items()
    }
    with_, without = f"with {POLICIES} policies", "no policies"
    for what, both, unit, bar in (
        ("TCP between pods of a node", rates, "Mbit/s", 0.98),
        ("a round trip of a connection", trips, "µs", 1 / 0.98),
        ("a new connection", connects, "µs", None),
    ):
        ratios = [mine / other for mine, other in zip(both[True], both[False])]
        middle = median(both[False])
        findings.rows.append(
            Row(
                "policy",
                f"{what}, {with_}",
                without,
                middle * median(ratios),
                middle,
                unit=unit,
                bar=bar,
                at_least=unit == "Mbit/s",
                note=f"median of {len(ratios)} pairs",
            )
        )


def _asked(process: subprocess.Popen[str]) -> tuple[float, float]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    trip, connect = process.stdout.readline().split()
    return float(trip), float(connect)


@contextmanager
def _ready(pod: Namespace, code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = ["ip", "netns", "exec", pod.name, sys.executable, "-c", code, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def _adds(stage: Stage, daemon: PolicyDaemon, findings: Findings) -> None:
    """In blocks: with a pod that stays, so that the table is there, and without any."""
    found: dict[str, list[float]] = {"with": [], "without": []}
    confs = {"with": protected(stage), "without": ours(stage)}
    for block in range(BLOCKS):
        for which in ("with", "without") if block % 2 else ("without", "with"):
            with ExitStack() as stays:
                if which == "with":
                    stays.enter_context(added(stage, daemon, "pod0", "ns0"))
                for number in range(-1, ADDS):
                    took = _once(stage, daemon, confs[which], number)
                    if number >= 0:
                        found[which].append(took)
    findings.raw["policy adds"] = found
    findings.rows.append(
        Row(
            "policy",
            f"ADD p50 with {POLICIES} policies",
            "without",
            1000 * median(found["with"]),
            1000 * median(found["without"]),
            unit="ms",
            bar=1.1,
        )
    )


def _once(stage: Stage, daemon: PolicyDaemon, conf: dict[str, Any], number: int) -> float:
    """Kubernetes says where a pod will run before its runtime is asked to start it."""
    where, name, added_to = f"ns{number + 2}", f"pod{number + 2}", stage.pod()
    daemon.ask("pod", {"key": [where, name], "object": pod(number + 2, [], "here")})
    args = pod_args(where, name)
    env = {"args": args, "HEADCNI_SOCKET": daemon.socket}
    add = stage.environment("ADD", added_to, **env)
    took = timed(lambda: stage.run(stage.bin / "headcni", conf, add))
    stage.run(stage.bin / "headcni", conf, stage.environment("DEL", added_to, **env))
    stage.settle()
    return took


def _limit(findings: Findings, what: str, value: float, limit: float, unit: str) -> None:
    findings.rows.append(Row("policy", what, "the limit", value, limit, unit=unit, bar=1.0))
