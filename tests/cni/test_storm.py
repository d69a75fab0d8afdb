"""Many calls at once, some of them killed: nothing is given twice, and GC leaves nothing behind."""

from __future__ import annotations

import json
import random
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

from cni_node import EMPTY

CALLS, AT_ONCE, KILLED = 200, 16, 0.2


def test_two_hundred_adds_and_dels_with_some_killed_leave_nothing_after_gc(node, datapath):
    seed = random.SystemRandom().randrange(10**6)
    dice = random.Random(seed)
    pods = [node.pod() for _ in range(24)]
    plans = []
    for number in range(CALLS):
        pod = dice.choice(pods)
        verb = dice.choice(["ADD", "ADD", "DEL"])
        kill_after = dice.uniform(0.02, 0.4) if dice.random() < KILLED else None
        plans.append((number, verb, pod, kill_after))
    busy = {pod.name: threading.Lock() for pod in pods}

    def call(plan):
        number, verb, pod, kill_after = plan
        ports = [{"hostPort": 20000 + pods.index(pod), "containerPort": 80, "protocol": "tcp"}]
        conf = node.conf(
            datapath=datapath,
            capabilities={"portMappings": True},
            runtimeConfig={"portMappings": ports},
        )
        with busy[pod.name]:  # a runtime never has two calls for one container
            worker = subprocess.Popen(
                node.command(),
                stdin=subprocess.PIPE,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=node.environment(verb, pod),
            )
            try:
                out, err = worker.communicate(json.dumps(conf), timeout=kill_after or 60)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.communicate()
                return None
        assert worker.returncode == 0, f"seed {seed}, call {number} {verb}: {out} {err}"
        return json.loads(out)["ips"][0]["address"] if verb == "ADD" else None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(call, plans))

    held = [row[0] for row in node.leftovers()["allocation"]]
    assert len(held) == len(set(held)) <= len(pods)
    live = {}
    for pod in pods:
        if "eth0" in pod.links():
            for address in pod.addresses("eth0"):
                if address.startswith("10."):
                    live.setdefault(address, []).append(pod.name)
    assert all(len(owners) == 1 for owners in live.values()), (seed, live)

    assert (
        node.call("GC", node.conf(datapath=datapath, **{"cni.dev/valid-attachments": []})).code == 0
    )
    assert node.leftovers() == EMPTY, f"seed {seed}"
    assert all(pod.links() == {"lo"} for pod in pods)
    again = node.add(node.conf(datapath=datapath), pods[0]).ok
    node.check(node.conf(datapath=datapath), pods[0], again).succeeds()
