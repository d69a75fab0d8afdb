"""A lock that is waited for, and not for ever."""

from __future__ import annotations

import os
import threading
import time

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils.shared import filelock


@pytest.fixture
def handles(tmp_path):
    """Two, as two processes have them."""
    path = str(tmp_path / "lock")
    made = [os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2)]
    yield made
    for handle in made:
        os.close(handle)


def test_what_others_keep_is_a_time_out_that_names_the_file(handles):
    filelock.lock(handles[0], "/some/lock", 1)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"others for 0\.2 s.*/some/lock"):
        filelock.lock(handles[1], "/some/lock", 0.2)
    assert 0.2 <= time.monotonic() - began < 5


def test_who_waits_gets_it_when_it_is_let_go(handles):
    filelock.lock(handles[0], "/some/lock", 1)
    got = threading.Event()

    def wait() -> None:
        filelock.lock(handles[1], "/some/lock", 20)
        got.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert not got.wait(0.2)
    os.close(handles[0])
    handles[0] = os.open("/dev/null", os.O_RDONLY)
    assert got.wait(10)
    waiting.join(10)
