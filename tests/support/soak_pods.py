"""Adds and deletes pods at random on a node, for as long as it is let: run there, by tests/soak.

    soak_pods.py run      until /run/soak/stop is there; rests while /run/soak/pause is
    soak_pods.py clear    delete every pod that is left
    soak_pods.py reach    ping the addresses on stdin from every pod here; prints what failed

What is alive is in /run/soak/pods.json, what went wrong in /run/soak/wrong.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HOME = Path("/run/soak")
MOST_PODS = 8
CNITOOL = "CNI_PATH=/opt/cni/bin /opt/lab/cni/cnitool"
PODS, WRONG, COUNTS = HOME / "pods.json", HOME / "wrong", HOME / "counts.json"
EXPECTED = "the allocation store"  # begins what an ADD may fail with: a full disk, or a lost store


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=180, check=False
    )


def load() -> dict[str, list[str]]:
    return json.loads(PODS.read_text()) if PODS.exists() else {}


def save(pods: dict[str, list[str]]) -> None:
    PODS.with_suffix(".new").write_text(json.dumps(pods))
    PODS.with_suffix(".new").rename(PODS)


def wrong(what: str) -> None:
    with WRONG.open("a") as file:
        file.write(f"{time.strftime('%H:%M:%S')} {what}\n")


def add(name: str, pods: dict[str, list[str]]) -> str:
    shell(f"ip netns add {name}")
    done = shell(f"{CNITOOL} add headcni /run/netns/{name}")
    if done.returncode != 0:
        said = done.stdout + done.stderr
        if EXPECTED not in said or "was busy" in said:
            wrong(f"ADD {name}: {said.strip()[:400]}")
        delete(name, pods)
        return "refused"
    addresses = [one["address"].partition("/")[0] for one in json.loads(done.stdout)["ips"]]
    for other, held in pods.items():
        if set(held) & set(addresses):
            wrong(f"ADD {name} got {addresses}, which {other} has")
    pods[name] = addresses
    save(pods)
    return "added"


def delete(name: str, pods: dict[str, list[str]]) -> str:
    pods.pop(name, None)
    save(pods)
    done = shell(f"{CNITOOL} del headcni /run/netns/{name}")
    if done.returncode != 0:
        wrong(f"DEL {name}: {(done.stdout + done.stderr).strip()[:400]}")
    shell(f"ip netns del {name}")
    return "deleted"


def run() -> None:
    pods, number = load(), 0
    counts = {"added": 0, "deleted": 0, "refused": 0}
    while not (HOME / "stop").exists():
        if (HOME / "pause").exists():
            (HOME / "paused").touch()
            time.sleep(0.1)
            continue
        (HOME / "paused").unlink(missing_ok=True)
        number += 1
        try:
            if len(pods) < 2 or (len(pods) < MOST_PODS and random.random() < 0.5):
                counts[add(f"soak{number}", pods)] += 1
            else:
                counts[delete(random.choice(sorted(pods)), pods)] += 1
        except Exception as problem:
            wrong(f"the test itself: {problem!r}")
        COUNTS.write_text(json.dumps(counts))
        time.sleep(random.uniform(0, 0.2))


def clear() -> None:
    pods = load()
    for name in sorted(pods):
        delete(name, pods)


def reach() -> None:
    targets = sys.stdin.read().split()

    def ping(way: tuple[str, str]) -> str:
        name, address = way
        asks = f"ip netns exec {name} ping -n -c 1 -W 2 {address}"
        return "" if shell(f"{asks} || {asks}").returncode == 0 else f"{way}"

    ways = [(name, address) for name in load() for address in targets]
    with ThreadPoolExecutor(12) as pool:
        failed = [one for one in pool.map(ping, ways) if one]
    print(json.dumps({"asked": len(ways), "failed": failed}))


if __name__ == "__main__":
    HOME.mkdir(exist_ok=True)
    {"run": run, "clear": clear, "reach": reach}[sys.argv[1]]()
