"""The watcher of pods sees them come and go whatever the API server does, and takes away what is
leaked, and nothing else. Mending needs root and a kernel: tests/cni/test_repair.py."""

from __future__ import annotations

import gc
import json
import resource
import threading
import time
from dataclasses import dataclass, field
from ipaddress import ip_network
from typing import Any

import pytest
from kube_server import NODE, KubeServer, pod
from patience import until

from headcni.daemon.kubernetes import networks
from headcni.daemon.kubernetes import pods as module
from headcni.daemon.kubernetes.access import Source
from headcni.daemon.kubernetes.client import KubeClient
from headcni.daemon.kubernetes.networks import LEAKED, MISSING, PassReport
from headcni.daemon.kubernetes.pods import PodWatcher
from headcni.daemon.kubernetes.work_queue import WorkQueue
from headcni.model import LeasedAddress, Owner, PodRef
from headcni.store import Attachment, Store

OWN = (ip_network("10.55.1.0/24"),)


@dataclass
class Watched:
    """A watcher, its API server and its store."""

    server: KubeServer
    store: Store
    events: list[tuple[str, str, str]] = field(default_factory=list)
    passes: list[PassReport] = field(default_factory=list)
    watchers: list[PodWatcher] = field(default_factory=list)

    def watcher(self, **options: Any) -> PodWatcher:
        source = Source(str(self.server.kubeconfig()))
        client = options.pop("client", None) or KubeClient(source, timeout=2, silence=20)
        options = {
            "own_cidrs": OWN,
            "interval": 3600.0,
            "grace": 0.0,
            "settle": 0.0,
            "pauses": (0.05, 0.2),
            **options,
        }
        made = PodWatcher(
            client,
            lambda: self.store,
            options.pop("node_name", NODE),
            options.pop("labels", ""),
            on_event=lambda kind, _, ref, words: self.events.append((kind, str(ref), words)),
            on_pass=lambda report, _: self.passes.append(report),
            **options,
        )
        self.watchers.append(made)
        return made

    def started(self, **options: Any) -> PodWatcher:
        made = self.watcher(**options)
        made.start()
        until(lambda: made.stats.watches and self.server.streams)
        return made

    def attach(
        self,
        name: str,
        uid: str = "",
        netns: str = "/run/netns/there-is-no-such-one",
        network: str = "pods",
        created: float = 1.0,
        namespace: str = "default",
        address: str = "10.55.1.7",
        container: str = "",
    ) -> Attachment:
        """As an ADD would have left it."""
        owner = Owner(network, container or f"sandbox-of-{name}-{uid}", "eth0")
        ref = PodRef(namespace, name, uid or f"uid-{name}") if name else PodRef()
        if uid == "none":
            ref = PodRef(namespace, name, "")
        conf = {
            "cniVersion": "1.1.0",
            "name": network,
            "type": "headcni",
            "ipam": {"type": "headcni-ipam", "subnet": "10.55.1.0/24"},
        }
        ips = [{"address": f"{address}/24", "gateway": "10.55.1.1"}]
        result = {"cniVersion": "1.1.0", "ips": ips}
        made = Attachment(owner, ref, netns, "hc0123456789a", conf, result, {}, created)
        self.store.remember(made)
        leased = LeasedAddress(ip_network(address).network_address, 24, None)
        self.store.adopt(owner, str(ref), [leased])
        return made

    @property
    def names(self) -> set[str]:
        return {str(one.pod) for one in self.store.attachments()}

    @property
    def addresses(self) -> int:
        rows = self.store.read(lambda db: db.execute("SELECT * FROM allocation").fetchall())
        return len(rows)


@pytest.fixture
def watched(tmp_path):
    made = Watched(KubeServer(tmp_path / "server"), Store(str(tmp_path / "headcni.db"), "boot"))
    yield made
    for one in made.watchers:
        one.stop()
        assert not one._threads or not one.is_alive()
    made.server.close()
    made.store.close()


def seen(watcher: PodWatcher) -> set[str]:
    return {one.name for one in watcher._pods.values()}


def test_pods_are_seen_to_come_change_and_go(watched):
    watched.server.put(pod("old"))
    watcher = watched.started()
    assert seen(watcher) == {"old"}
    watched.server.put(pod("new", phase="Pending", ip=""))
    until(lambda: seen(watcher) == {"old", "new"})
    watched.server.put(pod("new"))
    until(lambda: watcher._pods["uid-new"].phase == "Running")
    watched.server.delete("old")
    until(lambda: seen(watcher) == {"new"})
    assert watcher.condition == ("pods", True, "") and watcher.held_back() == ""


def test_a_lost_watch_goes_on_from_where_it_was_without_a_new_list(watched):
    watcher = watched.started()
    watched.server.put(pod("one"))
    watched.server.bookmark()
    bookmark = watched.server.version
    until(lambda: watcher._version == str(bookmark))
    watched.server.cut()
    until(lambda: watched.server.count("watch=true") == 2)
    watched.server.put(pod("two"))
    until(lambda: seen(watcher) == {"one", "two"})
    assert f"resourceVersion={bookmark}" in watched.server.asked[-1]
    assert watcher.stats.lists == 1 and watcher.stats.watches == 2


def test_an_api_server_that_restarts_is_found_again(watched):
    watched.server.put(pod("one"))
    watcher = watched.started()
    watched.server.close()
    until(lambda: not watcher.stats.connected)
    assert watcher.condition.ok and "as last seen" in watcher.condition.message
    assert seen(watcher) == {"one"}
    watched.server.released.clear()
    watched.server.put(pod("two"))
    watched.server.restart()
    until(lambda: watcher.stats.connected and seen(watcher) == {"one", "two"})
    assert watcher.condition == ("pods", True, "")


@pytest.mark.parametrize("by_event", [False, True])
def test_a_version_that_is_gone_leads_to_a_new_list(watched, by_event):
    watched.server.put(pod("one"))
    watched.server.put(pod("two"))
    watcher = watched.started()
    with watched.server.lock:  # what happens next, no watch will tell
        streams = list(watched.server.streams)
        watched.server.streams.clear()
        watched.server.delete("one")
        watched.server.put(pod("three"))
        watched.server.oldest = watched.server.version
        watched.server.gone_by_event = by_event
    for stream in streams:
        stream.put(None)
    until(lambda: seen(watcher) == {"two", "three"})
    assert watcher.stats.lists == 2 and watcher.condition.ok


def test_an_error_in_the_stream_leads_to_a_new_list(watched):
    watcher = watched.started()
    watched.server.send(b"nonsense\n")
    until(lambda: watcher.stats.lists == 2)
    watched.server.put(pod("one"))
    until(lambda: seen(watcher) == {"one"})


def test_a_server_that_ends_each_watch_at_once_is_not_hammered(watched, monkeypatch):
    began = time.monotonic()
    watcher = watched.started(pauses=(0.1, 5.0))
    ending = threading.Event()

    def end_all() -> None:
        while not ending.wait(0.01):
            watched.server.cut()

    worker = threading.Thread(target=end_all, daemon=True)
    worker.start()
    until(lambda: watcher.stats.watches >= 5)
    ending.set()
    worker.join(5)
    # Each pause is twice as long as the one before it, give or take half of it.
    assert time.monotonic() - began > 0.5 * 0.1 * (1 + 2 + 4 + 8)


def test_without_an_answer_the_node_is_not_ready_and_says_why(watched):
    watched.server.answer_with = (403, {}, b"{}")
    watcher = watched.watcher()
    assert "not been asked" in watcher.held_back()
    watcher.start()
    until(lambda: "refused" in watcher.held_back())
    assert watcher.reconcile().problem
    watched.server.answer_with = None
    until(lambda: watcher.condition.ok)


def test_a_wrong_node_name_is_told(watched):
    watched.server.put(pod("one"))
    watcher = watched.watcher(node_name="wrong")
    watcher.start()
    until(lambda: "no node by the name wrong" in watcher.held_back())
    assert "daemon.nodeName" in watcher.held_back()


def test_a_leaked_network_is_released_and_its_address_is_free_again(watched):
    watched.attach("lost")
    watched.server.put(pod("other", ip="10.42.0.8"))
    watcher = watched.started()
    report = watcher.reconcile()
    assert (report.released, report.problem) == (1, "")
    assert watched.names == set() and watched.addresses == 0
    assert [(kind, ref) for kind, ref, _ in watched.events] == [(LEAKED, "default/lost")]
    assert watched.passes[-1] == report


def test_a_nodes_own_credentials_are_enough(watched):
    watched.attach("lost")
    watched.server.put(pod("web"))
    watched.attach("web", address="10.55.1.8")
    watched.server.as_node = True
    assert watched.started().reconcile().released == 1
    assert watched.names == {"default/web"}


def test_a_deleted_pods_network_is_released_soon_without_waiting_for_a_pass(watched):
    watched.server.put(pod("web"))
    watched.attach("web")
    watcher = watched.started(grace=0.5)
    watcher.reconcile()
    assert watched.names == {"default/web"}
    watched.server.delete("web")
    until(lambda: watched.names == set())
    until(lambda: sum(one.released for one in watched.passes) == 1)


def test_a_pod_that_ended_leaks_its_network_too(watched):
    watched.server.put(pod("job", phase="Succeeded"))
    watched.attach("job")
    watched.started()
    until(lambda: watched.names == set())


def test_a_pod_by_the_same_name_is_another_pod(watched):
    watched.server.put(pod("web-0", "uid-new"))
    watched.attach("web-0", "uid-old")
    assert watched.started().reconcile().released == 1


def test_a_sandbox_that_was_replaced_leaks_its_network_though_its_pod_lives(watched):
    watched.server.put(pod("web", ip="10.42.0.9"))
    watched.attach("web", container="old", created=1.0)
    watched.attach("web", container="new", created=2.0, address="10.55.1.8")
    watched.started()
    until(lambda: len(watched.store.attachments()) == 1)
    assert watched.store.attachments()[0].owner.container_id == "new"
    assert "replaced" in until(lambda: watched.events)[0][2]


LIVING = {
    "its pod is there": {"attach": ("web", ""), "pod": pod("web")},
    "its static pod is there": {
        "attach": ("static", "abc"),
        "pod": pod("static", "other", annotations={"kubernetes.io/config.hash": "abc"}),
    },
    "it was added without a uid": {"attach": ("web", "none"), "pod": pod("web", "uid-any")},
    "its pod is on another node by now": {
        "attach": ("web", "uid-web"),
        "pod": pod("web", node="node2"),
    },
    "it belongs to no pod": {"attach": ("", "")},
}


@pytest.mark.parametrize("why", LIVING)
def test_a_network_stays_where(watched, why):
    case = LIVING[why]
    watched.attach(*case["attach"])
    if "pod" in case:
        watched.server.put(json.loads(json.dumps(case["pod"])))
    watched.server.put(pod("another", ip="10.55.1.9"))
    watcher = watched.started()
    for _ in range(2):
        report = watcher.reconcile()
        assert (report.released, report.problem) == (0, "")
    assert len(watched.store.attachments()) == 1


def test_a_network_of_a_chain_is_left_to_the_chain(watched):
    watched.attach("lost", network="pods/0")
    watched.server.put(pod("other", ip="10.42.0.8"))
    assert watched.started().reconcile().released == 0


def test_a_sandbox_with_a_process_in_it_is_not_dead(watched):
    """The pod is gone from the API server, but this very process lives in its namespace."""
    watched.attach("forced", netns="/proc/self/ns/net")
    watched.server.put(pod("other", ip="10.42.0.8"))
    watcher = watched.started()
    watcher.reconcile()
    assert watcher.reconcile().released == 0 and watched.names == {"default/forced"}


def test_a_network_is_released_only_after_a_while(watched):
    watched.attach("lost")
    watched.attach("young", created=time.time(), address="10.55.1.8")
    watched.server.put(pod("other", ip="10.42.0.8"))
    watcher = watched.started(grace=1.5)
    assert watcher.reconcile().released == 0
    assert watched.names == {"default/lost", "default/young"}
    until(lambda: watched.names == set())


@pytest.mark.parametrize("status", [401, 403, 404, 410, 429, 500, 503])
@pytest.mark.parametrize("body", [b"", b"{}", b'{"kind":"Status","reason":"NotFound"}'])
def test_no_error_of_the_api_server_releases_anything(watched, status, body):
    watched.attach("web")
    watched.server.put(pod("other", ip="10.42.0.8"))
    watcher = watched.started(pauses=(5, 5))
    watched.server.answer_with = (status, {}, body)
    report = watcher.reconcile()
    assert report.released == 0 and report.problem
    assert watched.names == {"default/web"}


def test_a_list_without_this_nodes_pods_releases_nothing_of_them(watched):
    """A label selector, or a server that filters wrongly: what counts is the pod itself."""
    watched.server.put(pod("web"))
    watched.attach("web")
    watcher = watched.started(labels="app=other")
    assert seen(watcher) == set()
    for _ in range(2):
        report = watcher.reconcile()
        assert (report.released, report.problem) == (0, "")
    watched.server.delete("web")
    assert watcher.reconcile().released == 1


def test_while_the_api_server_is_away_nothing_is_released(watched):
    watched.server.put(pod("web"))
    watched.attach("web")
    watcher = watched.started()
    watched.server.delete("web")
    watched.server.close()
    until(lambda: not watcher.stats.connected)
    report = watcher.reconcile()
    assert report.released == 0 and "as last seen" in report.problem
    assert watched.names == {"default/web"}


def test_a_network_that_cannot_be_released_is_kept_and_the_others_go(watched, monkeypatch):
    watched.attach("stuck")
    watched.attach("lost", address="10.55.1.8")
    watched.server.put(pod("other", ip="10.42.0.8"))
    original = networks.PodNetworks._undo

    def undo(self, attachment):
        if attachment.pod.name == "stuck":
            raise networks.CniError(101, "the kernel refused")
        original(self, attachment)

    monkeypatch.setattr(networks.PodNetworks, "_undo", undo)
    assert watched.started().reconcile().released == 1
    assert watched.names == {"default/stuck"}


def test_a_running_pod_of_ours_without_a_network_is_reported_once(watched):
    watched.server.put(pod("bare"))
    watcher = watched.started()
    until(lambda: watched.events)
    assert [watcher.reconcile().missing for _ in range(3)] == [1, 1, 1]
    assert [(kind, ref) for kind, ref, _ in watched.events] == [(MISSING, "default/bare")]


NOT_OURS = {
    "on the host's network": pod("host", host_network=True, ip="10.55.1.9"),
    "another plugin's": pod("flannel", ip="10.42.0.9"),
    "without an address": pod("young", ip=""),
    "not running yet": pod("pending", phase="Pending"),
    "on its way out": pod("leaving", terminating=True),
    "done": pod("done", phase="Succeeded"),
}


@pytest.mark.parametrize("what", NOT_OURS)
def test_nobody_complains_of_a_pod_that_is(watched, what):
    watched.server.put(json.loads(json.dumps(NOT_OURS[what])))
    watcher = watched.started()
    assert [watcher.reconcile().missing for _ in range(2)] == [0, 0]
    assert not watched.events


def test_a_listener_that_fails_stops_nobody(watched):
    watched.attach("lost")
    watched.server.put(pod("other", ip="10.42.0.8"))
    watcher = watched.started()
    watcher._on_event = watcher._on_pass = lambda *_: 1 / 0
    assert watcher.reconcile().released == 1
    assert watcher.is_alive()


def test_a_storm_of_changes_is_one_look_and_not_more_than_fits_is_kept(watched, monkeypatch):
    watcher = watched.watcher()
    watcher._queue = WorkQueue(capacity=10, pause=0.2)
    looks = []
    original = watcher._compare
    monkeypatch.setattr(watcher, "_compare", lambda uids: (looks.append(uids), original(uids))[1])
    for number in range(50):
        watched.server.put(pod(f"pod{number}", phase="Pending", ip=""))
    watcher.start()
    until(lambda: len(seen(watcher)) == 50)
    until(lambda: None in looks and not len(watcher._queue))
    assert watcher.stats.dropped > 0
    assert len(looks) < 10  # and what did not fit was seen to by a pass over all


def test_the_queue_tells_each_key_once_in_order_and_not_before_its_time():
    queue = WorkQueue(capacity=3, pause=0.0)
    assert queue.put("a", 0.1) and queue.put("b") and queue.put("c") and queue.put("b", 9)
    assert not queue.put("d") and len(queue) == 3
    assert queue.take(time.monotonic() + 5, most=1) == ["b"]
    assert queue.take(time.monotonic() + 5) == ["c"]
    began = time.monotonic()
    assert queue.take(began + 5) == ["a"]
    assert time.monotonic() - began < 4
    assert queue.take(time.monotonic() + 0.05) == []
    queue.put("e", 60)
    assert queue.put("e")  # sooner
    assert queue.take(time.monotonic() + 5) == ["e"]


def test_the_queue_pauses_between_batches_and_wakes_up_to_close():
    queue = WorkQueue(pause=0.3)
    queue.put("a")
    assert queue.take(time.monotonic() + 5) == ["a"]
    queue.put("b")
    began = time.monotonic()
    assert queue.take(began + 5) == ["b"]
    assert 0.2 < time.monotonic() - began < 4
    threading.Timer(0.1, queue.close).start()
    assert queue.take(time.monotonic() + 30) == []


def test_the_passes_may_come_more_often_from_now_on(watched):
    watcher = watched.watcher(interval=60.0)
    passes = []
    watcher._on_pass = lambda report, _: passes.append(report)
    watcher.start()
    watcher.every(0.2)
    until(lambda: len(passes) > 3)


def test_it_stops_at_once_whatever_it_is_doing(watched):
    watcher = watched.started()
    began = time.monotonic()
    watcher.stop()
    assert time.monotonic() - began < 10 and not any(t.is_alive() for t in watcher._threads)
    watched.server.delay = 30
    watcher = watched.watcher(client=KubeClient(Source(str(watched.server.kubeconfig()))))
    watcher.start()
    time.sleep(0.2)
    began = time.monotonic()
    watcher.stop()
    assert time.monotonic() - began < 10 and not any(t.is_alive() for t in watcher._threads)


def test_at_rest_it_costs_next_to_nothing(watched):
    """With 110 pods, passes aside: of each the cost is in the test below."""
    for number in range(110):
        watched.server.put(pod(f"pod{number}", host_network=True))
    watcher = watched.started()
    until(lambda: not len(watcher._queue))
    time.sleep(1.5)
    gc.disable()  # a collection of all that the other tests have left takes longer than the limit
    try:
        before = _cpu()
        time.sleep(3)
        used = _cpu() - before
    finally:
        gc.enable()
    assert used / 3 < 0.005


def test_a_pass_over_110_networks_is_short(watched):
    for number in range(110):
        name, address = f"pod{number}", f"10.55.1.{number + 2}"
        watched.server.put(pod(name, ip=address))
        watched.attach(name, address=address)
    watcher = watched.started(settle=3600, grace=3600)
    watcher.reconcile()
    before = _cpu()
    watcher.reconcile()
    assert (_cpu() - before) / module.INTERVAL_SECONDS < 0.005


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
