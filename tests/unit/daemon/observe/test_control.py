"""The control socket: who may ask, what is answered, and that nobody can wear it out."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading

import pytest

from headcni.ctl.daemon_client import asked
from headcni.daemon.observe.control import CLIENTS, Control
from headcni.daemon.observe.events import ADDED, Event, Events
from headcni.errors import CniError


@pytest.fixture
def events():
    return Events()


def about_policies(words):
    return {"asked": list(words)}


@pytest.fixture
def control(events):
    with tempfile.TemporaryDirectory(prefix="hct-") as folder:
        made = Control(f"{folder}/daemon.sock", lambda: {"ready": True}, events, about_policies)
        made.start()
        yield made
        made.stop()


def answers(control: Control, question: str) -> list[dict]:
    with asked(question, control.path, silence=5) as found:
        return list(found)


def test_the_status_is_answered(control):
    assert answers(control, "status") == [{"ready": True}]


def test_root_alone_may_ask(control):
    assert stat.S_IMODE(os.stat(control.path).st_mode) == 0o600


def test_what_happened_and_what_happens(control, events):
    events.tell(Event(ADDED, reason="before"))
    assert [one["reason"] for one in answers(control, "events")] == ["before"]
    with asked("events follow", control.path, silence=5) as found:
        assert next(found)["reason"] == "before"
        threading.Timer(0.05, events.tell, [Event(ADDED, reason="after")]).start()
        assert next(found)["reason"] == "after"


def test_a_question_about_policies_is_handed_on_with_its_words(control):
    assert answers(control, "policy") == [{"asked": []}]
    words = ["explain", "shop/web", "f" * 253, "80/tcp"]
    assert answers(control, " ".join(["policy", *words])) == [{"asked": words}]


def test_a_question_nobody_understands_says_what_there_is(control):
    with pytest.raises(CniError, match=r"'stat' is not one of: status, events, events follow"):
        answers(control, "stat")


def test_a_status_that_cannot_be_told_says_why_and_the_next_question_is_answered(control):
    def fail() -> dict:
        raise CniError(104, "the allocation store cannot be used", "the disk is full")

    control.status, status = fail, control.status
    with pytest.raises(CniError, match="the disk is full"):
        answers(control, "status")
    control.status = status
    assert answers(control, "status") == [{"ready": True}]


def test_without_a_daemon_it_says_so(tmp_path):
    with (
        pytest.raises(CniError, match="headcni-daemon does not answer"),
        asked("status", str(tmp_path / "none.sock")),
    ):
        pass


def test_too_many_are_told_so_and_the_others_are_served(control):
    held = []
    try:
        for _ in range(CLIENTS):
            one = socket.socket(socket.AF_UNIX)
            one.connect(control.path)
            one.sendall(b"events follow\n")
            held.append(one)
        with pytest.raises(CniError, match="too many"):
            for _ in range(3):  # the last of them may not have been taken in yet
                answers(control, "status")
    finally:
        for one in held:
            one.close()


def test_a_stopped_one_leaves_no_socket_and_ends_its_followers(control, events):
    with asked("events follow", control.path, silence=20) as found:
        events.tell(Event(ADDED, reason="last"))
        assert next(found)["reason"] == "last"
        control.stop()
        assert not os.path.exists(control.path)
        assert next(found, None) is None
