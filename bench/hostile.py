"""Another pod's ADD, alone and beside four callers whose pods carry large annotations.

The callers speak the daemon's protocol from one warm process, without a pause between their calls.
So the ratio shows how the daemon shares its time, not what the start of four more interpreters
costs the machine. The other pod's ADD is whole: from the start of the plugin to its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headcni.shim import request

from .cni import Calls, ours
from .measure import Findings, Row, Timings, distribution, median
from .stage import PATIENCE, Stage

CALLERS = 4
LARGEST = 256 << 10  # all annotations of a pod, by Kubernetes
BLOCKS, ADDS = 8, 10  # blocks of each kind in turns, since a machine's speed drifts
ANNOTATIONS = "io.kubernetes.cri.pod-annotations"
ATTACKS = {
    "256 KiB of commas": {"headcni.dev/ip": "," * LARGEST},
    "15,000 annotations": {f"example.com/{number:05}": "" for number in range(LARGEST // 17)},
}
# Arguments: the daemon's socket, and a file with a request for each caller.
ATTACK = """
import socket, sys, threading
path, over, answered = sys.argv[1], threading.Event(), []
def attack(request):
    while not over.is_set():
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(path)
            connection.sendall(request)
            while connection.recv(1 << 20):
                pass
        answered.append(None)
requests = [open(name, "rb").read() for name in sys.argv[2:]]
callers = [threading.Thread(target=attack, args=(one,)) for one in requests]
for one in callers:
    one.start()
while len(answered) < len(callers):
    over.wait(0.01)
print("at work", flush=True)
sys.stdin.read()
over.set()
for one in callers:
    one.join()
print(len(answered))
"""


def run(stage: Stage, findings: Findings) -> None:
    for name in ATTACKS:
        _compare(stage, findings, name)


def _compare(stage: Stage, findings: Findings, name: str) -> None:
    calls, requests = Calls(stage, ours(stage)), _requests(stage, ATTACKS[name])
    found: Timings = {"alone": [], "beside": []}
    hostile: list[int] = []
    _block(calls)  # warms up
    for number in range(2 * BLOCKS):
        if number % 2:
            with _attacked(stage, requests, hostile):
                found["beside"] += _block(calls)
        else:
            found["alone"] += _block(calls)
    findings.raw[f"hostile: {name}"] = {**found, "hostile calls": hostile}
    findings.plots[f"hostile-{name.split()[-1]}"] = distribution(
        found, f"ADD beside {CALLERS} callers with {name}: how many took no longer"
    )
    findings.rows.append(
        Row(
            "hostile",
            f"ADD p50 beside {CALLERS} callers with {name} and no pause",
            "the same ADD alone",
            1000 * median(found["beside"]),
            1000 * median(found["alone"]),
            unit="ms",
            bar=2.0,
            note=f"callers share one warm process, {sum(hostile)} hostile calls",
        )
    )


def _block(calls: Calls) -> list[float]:
    return [calls.once()["ADD"] for _ in range(ADDS)]


def _requests(stage: Stage, attack: dict[str, str]) -> list[str]:
    """Files with what the shim of a hostile pod would send, one for each caller."""
    given: dict[str, Any] = {ANNOTATIONS: attack}
    conf = ours(stage, capabilities={ANNOTATIONS: True}, runtimeConfig=given)
    netns = f"net:[{os.stat(stage.node.netns.path).st_ino}]".encode()
    paths = []
    for number in range(CALLERS):
        env = stage.environment(
            "ADD",
            None,
            container=f"hostile{number}",
            args="K8S_POD_NAMESPACE=evil;K8S_POD_NAME=pod",
            CNI_NETNS="/no/such/namespace",
        )
        sent = {os.fsencode(key): os.fsencode(value) for key, value in env.items()}
        path = stage.folder / f"hostile{number}"
        path.write_bytes(request(sent, netns, json.dumps(conf).encode()))
        paths.append(str(path))
    return paths


@contextmanager
def _attacked(stage: Stage, requests: list[str], counted: list[int]) -> Iterator[None]:
    command = [sys.executable, "-IS", "-c", ATTACK, str(stage.socket), *requests]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdin is not None and one.stdout is not None
        try:
            assert one.stdout.readline() == "at work\n"
            yield
            one.stdin.close()
            counted.append(int(one.stdout.read()))
            one.wait(PATIENCE)
        finally:
            one.kill()
