"""Profiles that Go's own tool reads, and that point at what was busy."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from headcni.daemon.observe import pprof
from headcni.errors import CniError
from lab import tools


@pytest.fixture(scope="module")
def go_pprof() -> str:
    """Where ``go tool pprof`` is: Go builds it on first use, half a minute, and keeps it."""
    command = [tools.find_go(), "tool", "-n", "pprof"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def top(go_pprof: str, tmp_path: Path) -> Callable[..., str]:
    """What ``go tool pprof -top`` says of a profile."""

    def run(profile: bytes, *options: str) -> str:
        file = tmp_path / "taken.pb.gz"
        file.write_bytes(profile)
        done = subprocess.run(
            [go_pprof, "-top", *options, str(file)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PPROF_TMPDIR": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def spin_in_this_function(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


def doze_in_this_function(stop: threading.Event) -> None:
    stop.wait(30)


@pytest.fixture
def threads():
    stop = threading.Event()
    made = [
        threading.Thread(target=spin_in_this_function, args=(stop,), name="spinner"),
        threading.Thread(target=doze_in_this_function, args=(stop,), name="dozer"),
    ]
    for one in made:
        one.start()
    yield
    stop.set()
    for one in made:
        one.join(5)


def share(shown: str, name: str, itself: bool = False) -> float:
    """The percentage of a function in the output of -top, with what it calls or by itself."""
    for line in shown.splitlines():
        if name in line:
            return float(re.findall(r"([\d.]+)%", line)[0 if itself else -1])
    return 0.0


def test_go_reads_a_profile_and_sees_who_was_busy(threads, top):
    taken = pprof.profile(1.0)
    shown = top(taken)
    assert "Type: cpu" in shown
    assert share(shown, "spin_in_this_function") > 80
    assert share(shown, "doze_in_this_function") < 10
    wall = top(taken, "-sample_index=wall")
    assert 20 < share(wall, "doze_in_this_function") < 80
    spinning = spin_in_this_function.__code__.co_firstlineno
    lines = top(taken, "-lines")
    assert (
        share(lines, f"test_pprof.py:{spinning + 1}")
        + share(lines, f"test_pprof.py:{spinning + 2}")
        > 80
    )
    only = top(taken, "-sample_index=wall", "-tagfocus=thread=dozer")
    assert "spin_in_this_function" not in only


def test_go_reads_a_heap_profile_and_sees_who_keeps_memory(top):
    kept = []

    def allocate() -> None:
        time.sleep(0.2)
        kept.append(bytearray(8 << 20))

    worker = threading.Thread(target=allocate)
    worker.start()
    shown = top(pprof.heap(0.6))
    worker.join(5)
    line = allocate.__code__.co_firstlineno + 2
    assert "Type: inuse_space" in shown
    assert share(shown, f"test_pprof.py:{line}", itself=True) > 80
    assert not tracemalloc.is_tracing()


def test_a_heap_that_is_traced_anyway_is_told_at_once(top):
    tracemalloc.start()
    try:
        kept = bytearray(8 << 20)
        began = time.monotonic()
        shown = top(pprof.heap(30.0))
        assert tracemalloc.is_tracing(), "who started it may still need it"
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 20
    assert share(shown, "test_pprof.py:") > 80
    assert len(kept) == 8 << 20


@pytest.mark.parametrize("seconds", [0, -1, 61, float("nan")])
def test_a_profile_takes_some_seconds_and_no_more_than_a_minute(seconds):
    with pytest.raises(CniError, match="seconds is"):
        pprof.profile(seconds)
    with pytest.raises(CniError, match="seconds is"):
        pprof.heap(seconds)


def test_one_profile_is_taken_at_a_time(threads):
    other = threading.Thread(target=pprof.profile, args=(1.0,))
    other.start()
    time.sleep(0.3)
    with pytest.raises(CniError, match="another profile"):
        pprof.heap(0.1)
    other.join(5)
    assert pprof.profile(0.05)


def test_a_profile_that_nobody_wants_any_more_ends(threads):
    for take in (pprof.profile, pprof.heap):
        began = time.monotonic()
        take(30.0, lambda began=began: time.monotonic() > began + 0.2)
        assert time.monotonic() - began < 5


def test_numbers_are_encoded_as_protobuf_has_them():
    assert pprof._varint(0) == b"\x00"
    assert pprof._varint(300) == b"\xac\x02"
    assert pprof._varint(-1) == b"\xff" * 9 + b"\x01"


def test_threads_are_listed_with_their_stacks(threads):
    shown = pprof.threads()
    assert "spinner, native id" in shown
    assert "in doze_in_this_function" in shown
