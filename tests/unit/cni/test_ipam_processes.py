"""Several processes at one store, some of them ended at any moment."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

import headcni
from headcni.ipam.allocate import Ipam
from headcni.store import Store
from tests.unit.cni.ipam_support import FAST_DIR, addresses, audit, owner

WORKER = Path(__file__).with_name("ipam_worker.py")


class Worker:
    """A running ipam_worker.py, and what it said that it did."""

    def __init__(self, path: str, name: str, mode: str, count: int, log: Path) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(WORKER), path, name, mode, str(count)],
                stdin=subprocess.PIPE,
                stdout=out,
                env={**os.environ, "PYTHONPATH": str(Path(headcni.__file__).parents[1])},
            )

    def wait_for(self, lines: int) -> None:
        deadline = time.monotonic() + 30
        while len(self.said()) < lines and time.monotonic() < deadline:
            time.sleep(0.002)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()

    def said(self) -> list[list[str]]:
        lines = self.log.read_text().split("\n")[:-1]
        return [line.split() for line in lines]

    def took(self) -> dict[str, list[str]]:
        """What it holds for certain: taken, and no release begun."""
        held: dict[str, list[str]] = {}
        for word, *rest in self.said():
            if word == "took":
                held[rest[0]] = rest[1:]
            elif word == "releasing":
                del held[rest[0]]
        return held

    def refusals(self) -> list[str]:
        return [" ".join(rest) for word, *rest in self.said() if word == "refused"]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST_DIR, prefix="headcni-test-") as name:
        yield Path(name)


def start(folder: Path, mode: str, count: int, number: int) -> list[Worker]:
    """Workers that all begin at the same moment, on a store that none of them has made yet."""
    path = str(folder / "data" / "headcni.db")
    workers = [Worker(path, f"w{n}", mode, count, folder / f"w{n}.log") for n in range(number)]
    for worker in workers:
        worker.wait_for(1)
    for worker in workers:
        worker.go()
    return workers


def opened(folder: Path) -> Store:
    return Store(str(folder / "data" / "headcni.db"), boot_id="boot-1")


def test_processes_that_start_together_share_out_the_pool_and_no_address_twice(folder):
    workers = start(folder, "add", 50, number=6)
    assert [worker.process.wait(60) for worker in workers] == [0] * 6
    held = {key: value for worker in workers for key, value in worker.took().items()}
    given = [address for pair in held.values() for address in pair]
    assert len(given) == len(set(given)) == 2 * 253
    refusals = [text for worker in workers for text in worker.refusals()]
    assert len(refusals) == 6 * 50 - 253
    assert all(text.startswith("11 ") and "253 of 253" in text for text in refusals)
    with opened(folder) as store:
        audit(store)
        assert {
            lease.owner.container_id: addresses(lease) for lease in Ipam(store).leases("pods")
        } == held


def test_processes_killed_at_any_moment_lose_nothing_and_leak_nothing(folder):
    dice = Random(11)
    workers = start(folder, "churn", 100_000, number=4)
    everyone = list(workers)
    for turn in range(24):
        victim = workers.pop(0)
        victim.wait_for(dice.randrange(4, 40))
        time.sleep(dice.uniform(0.0, 0.003))
        victim.process.kill()
        victim.process.wait()
        name = f"again{turn}"
        path = str(folder / "data" / "headcni.db")
        workers.append(Worker(path, name, "churn", 100_000, folder / f"{name}.log"))
        workers[-1].go()
        everyone.append(workers[-1])
    for worker in workers:
        worker.process.kill()
        worker.process.wait()
    with opened(folder) as store:
        audit(store)
        assert store.lost is None
        with store.transaction() as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        ipam = Ipam(store)
        known = {lease.owner.container_id: lease for lease in ipam.leases("pods")}
        assert all(len(lease.addresses) == 2 for lease in known.values()), "half an allocation"
        for worker in everyone:
            for container_id, given in worker.took().items():
                assert addresses(known[container_id]) == given
        ipam.collect("pods", [])
        audit(store)
        assert [usage.leased for usage in ipam.usage("pods")] == [0, 0]
        assert ipam.usage("pods")[0].free == 253


def test_a_file_that_breaks_under_running_processes_is_set_aside_once_and_stops_nobody(folder):
    workers = start(folder, "churn", 60, number=4)
    path = folder / "data" / "headcni.db"
    while sum(len(worker.said()) for worker in workers) < 60:
        time.sleep(0.002)
    with path.open("r+b") as file:
        file.write(b"broken " * 2000)
    assert [worker.process.wait(60) for worker in workers] == [0] * 4
    assert [text for worker in workers for text in worker.refusals() if "11 " not in text] == []
    aside = [f for f in path.parent.glob("*.broken-*") if not f.name.endswith(("-wal", "-shm"))]
    assert len(aside) == 1
    assert any(["recovering"] in worker.said() for worker in workers), "and nobody took it lightly"
    with opened(folder) as store:
        audit(store)
        assert store.lost is None
        assert Ipam(store).release(owner("w0-59")) is not None


def test_a_killed_creator_leaves_no_half_made_store(folder):
    dice = Random(5)
    path = str(folder / "data" / "headcni.db")
    for turn in range(6):
        for file in (folder / "data").glob("*") if (folder / "data").exists() else []:
            file.unlink()
        worker = Worker(path, "w", "add", 5, folder / "w.log")
        worker.wait_for(1)
        worker.go()
        time.sleep(dice.uniform(0.0, 0.006))
        worker.process.kill()
        worker.process.wait()
        with opened(folder) as store:
            assert store.lost is None, turn
            audit(store)
