"""Events reach the counters, the log and every follower; a slow one delays nobody."""

from __future__ import annotations

import threading

from headcni.daemon.observe.events import ADDED, FAILED, KEPT, WAITING, Event, Events
from headcni.model import Owner, PodRef
from headcni.store import Attachment

RESULT = {
    "ips": [
        {"address": "10.1.0.5/24", "gateway": "10.1.0.1"},
        {"address": "fd00::5/64", "gateway": "fd00::1"},
    ]
}


def attachment() -> Attachment:
    owner, pod = Owner("pods", "c0ffee", "eth0"), PodRef("shop", "web-0", "u1")
    return Attachment(owner, pod, "/run/netns/x", "hc1234", {}, RESULT)


def test_an_event_carries_what_the_specification_names():
    told = Event.of(ADDED, attachment()).as_dict()
    assert told["type"] == "pod-added"
    assert told["pod_ip"] == ["10.1.0.5", "fd00::5"]
    assert told["gateway"] == ["10.1.0.1", "fd00::1"]
    assert told["interface"] == "eth0"
    assert (told["namespace"], told["pod"], told["uid"]) == ("shop", "web-0", "u1")
    assert "reason" not in told


def test_each_is_counted_and_kept():
    counted: list[str] = []
    events = Events(counted.append)
    events.tell(Event.of(ADDED, attachment()))
    events.tell(Event(FAILED, reason="no address left"))
    assert counted == ["pod-added", "pod-failed"]
    assert [one["type"] for one in events.kept()] == counted


def test_a_follower_sees_what_was_and_what_comes_without_a_gap():
    events = Events()
    events.tell(Event(ADDED, reason="1"))
    with events.following() as follower:
        threading.Timer(0.05, events.tell, [Event(ADDED, reason="2")]).start()
        assert follower.next(1)["reason"] == "1"
        assert follower.next(5)["reason"] == "2"
        assert follower.next(0.01) is None


def test_one_who_does_not_keep_up_is_told_how_much_he_missed():
    events = Events()
    with events.following() as follower:
        for number in range(WAITING + 3):
            events.tell(Event(ADDED, reason=str(number)))
        assert follower.next(1) == {"type": "lost", "count": 3}
        assert follower.next(1)["reason"] == "3"


def test_only_the_newest_are_kept():
    events = Events()
    for number in range(KEPT + 5):
        events.tell(Event(ADDED, reason=str(number)))
    assert len(events.kept()) == KEPT
    assert events.kept()[0]["reason"] == "5"
