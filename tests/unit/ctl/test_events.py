"""headcnictl events --follow: without end, without a repetition, whatever the daemon does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from patience import until

from headcni.ctl import main as ctl
from headcni.daemon.observe.control import Control
from headcni.daemon.observe.events import ADDED, Event, Events

CNI = Path(ctl.__file__).parents[2]
CODE = "import sys; from headcni.ctl.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def config(tmp_path):
    with tempfile.TemporaryDirectory(prefix="hct-") as folder:
        file = tmp_path / "config.yaml"
        file.write_text(f"daemon: {{socket: {folder}/cni.sock}}\n")
        yield file, f"{folder}/daemon.sock"


class Daemon:
    def __init__(self, path: str) -> None:
        self.events = Events()
        self.control = Control(path, dict, self.events, lambda _unused: {})
        self.control.start()

    def tell(self, reason: str) -> None:
        self.events.tell(Event(ADDED, reason=reason))


class Follower:
    def __init__(self, file: Path, folder: Path) -> None:
        self.out, self.err = folder / "out", folder / "err"
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, "events", "--follow", "--json", "--config", str(file)],
            stdout=self.out.open("wb"),
            stderr=self.err.open("wb"),
            env={**os.environ, "PYTHONPATH": str(CNI)},
        )

    def reasons(self) -> list[str]:
        lines = self.out.read_text().splitlines()
        return [one.get("reason", one["type"]) for one in map(json.loads, lines)]

    def says(self, *reasons: str) -> None:
        until(lambda: self.reasons() == [*reasons], 20, lambda: f"{self.reasons()} {self.notes()}")

    def notes(self) -> str:
        return self.err.read_text()

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(20)


@pytest.fixture
def follow(config, tmp_path):
    file, _unused = config
    started = []

    def start() -> Follower:
        started.append(Follower(file, tmp_path))
        return started[0]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def test_it_goes_on_with_the_next_daemon_and_ends_well_when_it_is_interrupted(config, follow):
    path = config[1]
    first = Daemon(path)
    first.tell("one")
    follower = follow()
    follower.says("one")
    first.tell("two")
    follower.says("one", "two")
    first.control.stop()
    until(lambda: "has ended: waiting" in follower.notes(), 20, follower.notes)
    assert follower.process.poll() is None
    second = Daemon(path)
    second.tell("three")
    follower.says("one", "two", "three")
    assert "answers again" in follower.notes()
    assert follower.interrupt() == 0
    second.control.stop()


def test_an_event_that_is_told_again_is_shown_once(config, follow):
    """After a connection that broke although the daemon went on."""
    path = config[1]
    daemon = Daemon(path)
    daemon.tell("one")
    follower = follow()
    follower.says("one")
    daemon.control.stop()
    until(lambda: "has ended" in follower.notes(), 20, follower.notes)
    daemon.control = Control(path, dict, daemon.events, lambda _unused: {})
    daemon.control.start()
    daemon.tell("two")
    follower.says("one", "two")
    assert follower.interrupt() == 0
    daemon.control.stop()


def test_it_can_be_interrupted_while_it_waits(config, follow):
    daemon = Daemon(config[1])
    daemon.tell("one")
    follower = follow()
    follower.says("one")
    daemon.control.stop()
    until(lambda: "has ended" in follower.notes(), 20, follower.notes)
    time.sleep(0.2)
    assert follower.interrupt() == 0


def test_the_first_daemon_must_answer(config, follow):
    follower = follow()
    assert follower.process.wait(20) == 3
    assert "headcni-daemon does not answer" in follower.notes()


def test_a_reader_that_goes_away_ends_it_with_the_next_event(config):
    daemon, over = Daemon(config[1]), threading.Event()

    def happen() -> None:
        while not over.wait(0.05):
            daemon.tell("again")

    happening = threading.Thread(target=happen)
    happening.start()
    try:
        follow = f"{sys.executable} -c '{CODE}' events --follow --config {config[0]}"
        done = subprocess.run(
            ["/bin/bash", "-c", f"{follow} | head -n 1"],
            env={**os.environ, "PYTHONPATH": str(CNI)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        over.set()
        happening.join()
        daemon.control.stop()
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr
