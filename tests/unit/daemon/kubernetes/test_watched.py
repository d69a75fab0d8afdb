"""All objects of a kind: lists in parts, watches, and an API server that fails in between.

tests/kube_api does the same with policies at a real kube-apiserver.
"""

from __future__ import annotations

from typing import Any

import pytest
from kube_server import KubeServer, pod
from patience import until

from headcni.daemon.kubernetes.access import Source
from headcni.daemon.kubernetes.client import KubeClient, Resource
from headcni.daemon.kubernetes.watched import WatchedKind
from headcni.errors import CniError

PATIENCE = 10.0
SMALL_PAGES = Resource("/api/v1/pods", "Pod", page=2, most=10)


def name_of(found: Any) -> str:
    return str(found["metadata"]["name"])


def phase_of(found: Any) -> str:
    phase = found["status"]["phase"]
    if phase == "Odd":
        raise CniError(7, "its phase is odd")
    return str(phase)


class Heard:
    """A listener that keeps everything, as the daemon does."""

    def __init__(self) -> None:
        self.objects: dict[str, str] = {}
        self.mistakes: dict[str, str] = {}
        self.lists = 0

    def listed(self, found, wrong) -> None:
        self.objects, self.mistakes = dict(found), dict(wrong)
        self.lists += 1

    def changed(self, key: str, value: str) -> None:
        self.objects[key] = value

    def wrong(self, key: str, problem: str) -> None:
        self.mistakes[key] = problem

    def gone(self, key: str) -> None:
        self.objects.pop(key)


@pytest.fixture
def server(tmp_path):
    made = KubeServer(tmp_path / "server")
    yield made
    made.close()


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def watch(server, heard):
    client = KubeClient(Source(str(server.kubeconfig())), timeout=5, silence=5)
    made = WatchedKind(client, SMALL_PAGES, name_of, phase_of, heard, pauses=(0.05, 0.2))
    yield made
    made.stop()
    assert not made.is_alive()


def soon(condition) -> None:
    until(condition, PATIENCE, "it is heard", every=0.02)


def test_a_list_comes_in_pages_and_then_only_what_changes(server, heard, watch):
    for number in range(5):
        server.put(pod(f"p{number}"))
    watch.start()
    soon(lambda: len(heard.objects) == 5 and server.streams)
    soon(lambda: watch.is_listed and not watch.problem)
    assert server.count("limit=2") == 3
    server.put(pod("p0", phase="Failed"))
    server.delete("p1")
    server.put(pod("new"))
    soon(lambda: heard.objects.get("p0") == "Failed" and "new" in heard.objects)
    assert set(heard.objects) == {"p0", "p2", "p3", "p4", "new"}
    assert heard.lists == 1


def test_an_object_that_is_not_understood_is_named_and_the_others_are_heard(server, heard, watch):
    server.put(pod("odd", phase="Odd"))
    server.put(pod("good"))
    watch.start()
    soon(lambda: heard.lists and server.streams)
    assert heard.objects == {"good": "Running"} and "its phase is odd" in heard.mistakes["odd"]
    server.put(pod("good", phase="Odd"))
    soon(lambda: "good" in heard.mistakes)
    assert heard.objects == {"good": "Running"}


def test_a_list_that_expires_between_two_pages_begins_anew(server, heard, watch):
    for number in range(5):
        server.put(pod(f"p{number}"))
    server.forgets_lists = True
    watch.start()
    soon(lambda: server.count("continue=") >= 2)
    assert not heard.lists and not watch.is_listed
    server.forgets_lists = False
    soon(lambda: len(heard.objects) == 5)


def test_while_the_api_server_is_away_everything_stays_and_the_watch_goes_on(server, heard, watch):
    server.put(pod("stays"))
    watch.start()
    soon(lambda: heard.objects and server.streams)
    server.close()
    soon(lambda: watch.problem)
    assert heard.objects == {"stays": "Running"} and watch.is_listed
    server.released.clear()
    server.put(pod("new"))
    server.restart()
    soon(lambda: "new" in heard.objects)
    assert heard.lists == 1 and not watch.problem


def test_a_watch_that_is_too_old_lists_again(server, heard, watch):
    server.put(pod("gone-meanwhile"))
    watch.start()
    soon(lambda: heard.objects and server.streams)
    server.pods.clear()
    server.oldest = server.version + 1
    server.version += 2
    server.cut()
    soon(lambda: heard.lists == 2)
    assert heard.objects == {}


def test_more_objects_than_memory_allows_are_refused_and_said(server, heard, watch):
    for number in range(11):
        server.put(pod(f"p{number}"))
    watch.start()
    soon(lambda: "more than 10 pods" in watch.problem)
    assert not heard.lists
