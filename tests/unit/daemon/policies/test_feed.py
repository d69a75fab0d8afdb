"""What reaches the enforcer: everything once it is complete, then only what differs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from patience import until

from headcni.daemon.policies import feed as feeding
from headcni.daemon.policies.feed import Feed
from headcni.errors import CniError
from headcni.policy.objects import Namespace, Pod, Policy, Selector, World

PATIENCE = 10.0


class Enforcer:
    """Notes what it is told; it can be slow, and it can refuse."""

    def __init__(self) -> None:
        self.worlds: list[World] = []
        self.told: list[tuple[str, Any, Any]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.refusal: Exception | None = None

    def set_world(self, world: World) -> None:
        self.may_go_on.wait(PATIENCE)
        self.worlds.append(world)
        if self.refusal:
            raise self.refusal

    def _note(self, kind: str, key: Any, value: Any) -> None:
        self.may_go_on.wait(PATIENCE)
        self.told.append((kind, key, value))
        if self.refusal:
            raise self.refusal

    def pod_changed(self, key, pod) -> None:
        self._note("pod", key, pod)

    def namespace_changed(self, name, namespace) -> None:
        self._note("namespace", name, namespace)

    def policy_changed(self, key, policy) -> None:
        self._note("policy", key, policy)


@pytest.fixture
def enforcer():
    return Enforcer()


@pytest.fixture
def applied():
    return []


@pytest.fixture
def feed(enforcer, applied):
    made = Feed(enforcer, lambda kind, _seconds, ok: applied.append((kind, ok)))
    made.start()
    yield made
    enforcer.may_go_on.set()
    made.stop()
    assert not made.is_alive()


def a_pod(name: str, **labels: str) -> Pod:
    return Pod("shop", name, f"uid-{name}", labels)


def by_key(*objects: Any) -> dict[Any, Any]:
    return {one.key: one for one in objects}


POLICY = Policy("shop", "deny", Selector(), ingress=())
SHOP = Namespace("shop", {"team": "a"})


def list_all(feed: Feed, *pods: Pod) -> None:
    feed.policies.listed(by_key(POLICY), {})
    feed.namespaces.listed({"shop": SHOP}, {})
    feed.pods.listed(by_key(*pods), {})


def soon(condition) -> None:
    until(condition, PATIENCE, "the enforcer is told", every=0.01)


def test_nothing_is_handed_over_before_every_kind_was_listed(feed, enforcer):
    feed.policies.listed(by_key(POLICY), {})
    feed.namespaces.listed({"shop": SHOP}, {})
    threading.Event().wait(0.2)
    assert not enforcer.worlds and not enforcer.told and not feed.is_complete()
    feed.pods.listed(by_key(a_pod("web")), {})
    soon(lambda: enforcer.worlds)
    world = enforcer.worlds[0]
    assert world == World.of([a_pod("web")], [SHOP], [POLICY]) and world.complete
    assert feed.is_complete() and feed.since > 0


def test_the_world_is_the_enforcers_own(feed, enforcer):
    list_all(feed, a_pod("web"))
    soon(lambda: enforcer.worlds)
    feed.pods.gone(("shop", "web"))
    soon(lambda: enforcer.told)
    assert ("shop", "web") in enforcer.worlds[0].pods


def test_then_each_change_is_handed_over_alone_and_what_is_the_same_not_at_all(feed, enforcer):
    list_all(feed, a_pod("web"))
    soon(lambda: enforcer.worlds)
    feed.pods.changed(("shop", "web"), a_pod("web"))  # only its status has changed
    feed.pods.changed(("shop", "db"), a_pod("db"))
    soon(lambda: enforcer.told)
    feed.policies.gone(POLICY.key)
    soon(lambda: len(enforcer.told) == 2)
    assert enforcer.told == [
        ("pod", ("shop", "db"), a_pod("db")),
        ("policy", POLICY.key, None),
    ]
    assert len(enforcer.worlds) == 1


def test_what_changes_often_waits_only_once(feed, enforcer):
    list_all(feed)
    soon(lambda: enforcer.worlds)
    enforcer.may_go_on.clear()
    feed.namespaces.changed("first", Namespace("first", {}))
    for number in range(1000):
        feed.pods.changed(("shop", "web"), a_pod("web", number=str(number)))
    enforcer.may_go_on.set()
    last = ("pod", ("shop", "web"), a_pod("web", number="999"))
    soon(lambda: last in enforcer.told)
    assert len(enforcer.told) < 10


def test_many_changes_at_once_are_compiled_together(feed, enforcer):
    list_all(feed)
    soon(lambda: enforcer.worlds)
    feed.pods.listed(by_key(*(a_pod(f"p{number}") for number in range(feeding.MANY))), {})
    soon(lambda: len(enforcer.worlds) == 2)
    assert len(enforcer.worlds[1].pods) == feeding.MANY and not enforcer.told


def test_a_second_list_says_what_is_gone(feed, enforcer):
    list_all(feed, a_pod("web"), a_pod("db"))
    soon(lambda: enforcer.worlds)
    feed.pods.listed(by_key(a_pod("db"), a_pod("new")), {})
    soon(lambda: len(enforcer.told) == 2)
    assert sorted(enforcer.told) == [
        ("pod", ("shop", "new"), a_pod("new")),
        ("pod", ("shop", "web"), None),
    ]


def test_an_object_with_a_mistake_keeps_its_last_state_and_is_named(feed, enforcer):
    list_all(feed)
    soon(lambda: enforcer.worlds)
    feed.policies.wrong(POLICY.key, "NetworkPolicy shop/deny has a mistake")
    assert feed.mistakes() == ("NetworkPolicy shop/deny has a mistake",)
    feed.policies.listed({}, {POLICY.key: "the same mistake, in a list"})
    assert feed.policies.objects == by_key(POLICY) and not enforcer.told
    feed.policies.changed(POLICY.key, POLICY)
    assert feed.mistakes() == ()


def test_the_number_of_mistakes_that_are_shown_is_bounded(feed):
    wrong = {("shop", f"p{number}"): f"mistake {number} " + "x" * 5000 for number in range(1000)}
    feed.policies.listed({}, wrong)
    shown = feed.mistakes()
    assert len(shown) == feeding.MOST_PROBLEMS + 1 and "980 more" in shown[-1]
    assert max(map(len, shown)) < 600


def test_a_change_that_the_kernel_refuses_is_counted_and_the_next_one_is_tried(
    feed, enforcer, applied
):
    list_all(feed)
    soon(lambda: enforcer.worlds)
    enforcer.refusal = CniError(101, "the kernel refused")
    feed.pods.changed(("shop", "web"), a_pod("web"))
    soon(lambda: ("pod", False) in applied)
    enforcer.refusal = None
    feed.pods.changed(("shop", "db"), a_pod("db"))
    soon(lambda: ("pod", True) in applied)
    assert applied[0] == ("all", True)


def test_after_a_bug_everything_is_handed_over_again(feed, enforcer, monkeypatch):
    monkeypatch.setattr(feeding, "PAUSE_SECONDS", 0.05)
    list_all(feed)
    soon(lambda: enforcer.worlds)
    enforcer.refusal = KeyError("a bug")
    feed.pods.changed(("shop", "web"), a_pod("web"))
    soon(lambda: enforcer.told)
    enforcer.refusal = None
    soon(lambda: len(enforcer.worlds) >= 2 and feed.since)
    assert ("shop", "web") in enforcer.worlds[-1].pods
