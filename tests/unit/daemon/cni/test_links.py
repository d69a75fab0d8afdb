"""The thread that deletes links: who watches the daemon sees whether it is there."""

from __future__ import annotations

import time

import pytest

from headcni.daemon.cni.links import LinkRemover


def remover(store) -> LinkRemover:
    return LinkRemover(store, lambda _: None, print)


def test_it_is_alive_from_start_to_stop():
    one = remover(None)
    assert not one.is_alive()
    one.start()
    assert one.is_alive()
    assert one.stop(10)
    assert not one.is_alive()


def test_one_that_was_never_started_can_be_stopped():
    assert remover(None).stop(10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_that_a_bug_has_ended_is_not_alive():
    def bug(_folder):
        raise ZeroDivisionError

    one = remover(bug)
    one.start()
    one.wake("/somewhere")
    until = time.monotonic() + 20
    while one.is_alive():
        assert time.monotonic() < until
        time.sleep(0.01)
