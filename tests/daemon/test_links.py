"""DEL answers before the link is deleted: nobody may notice, whatever happens in between."""

from __future__ import annotations

import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest
from cni_node import EMPTY

ALONE = {"HEADCNI_SOCKET": ""}  # the shim asks nobody
PORT = {
    "capabilities": {"portMappings": True},
    "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]},
}
# A server whose thread for links waits as long as a file is there.
SLOW = """
import os, time
from headcni import deferred
from headcni.daemon.cni import links, server

class Slow:
    @staticmethod
    def finish(store, kernel):
        while os.path.exists({hold!r}):
            time.sleep(0.01)
        return deferred.finish(store, kernel)

links.deferred = Slow
raise SystemExit(server.main())
"""


class Held:
    """What the daemon is about to delete, is deleted when release() says so."""

    def __init__(self, node, *options):
        self.hold = node.tmp / "hold"
        self.hold.touch()
        self.server = node.start(*options, code=SLOW.format(hold=str(self.hold)))

    def release(self):
        self.hold.unlink()


@pytest.fixture
def held(node):
    return Held(node)


def one_address(node, **changes):
    return pool(node, "10.55.1.9", **changes)


def pool(node, last, **changes):
    ipam = {
        "type": "headcni-ipam",
        "subnet": "10.55.1.0/24",
        "rangeStart": "10.55.1.9",
        "rangeEnd": last,
        "strategy": "dense-pack",
    }
    return node.conf(ipam=ipam, **changes)


def added_and_deleted(node, conf, pod=None):
    pod = pod or node.pod()
    result = node.add(conf, pod).ok
    node.delete(conf, pod).succeeds()
    return result["interfaces"][-2]["name"], result


def test_nothing_passes_and_nothing_is_known_of_the_pod_once_del_has_answered(node, held, datapath):
    pod, conf = node.pod(), node.dual(datapath=datapath, **PORT)
    link, result = added_and_deleted(node, conf, pod)
    left = node.leftovers()
    assert left["links"] == {link} and len(left["tombstone"]) == 1
    assert left["attachment"] == left["port"] == left["mapped"] == []
    assert len(left["allocation"]) == 2
    (shown,) = node.netns.ip_json(f"link show {link}")
    assert "UP" not in shown["flags"]
    (inside,) = pod.ip_json("link show eth0")
    assert "NO-CARRIER" in inside["flags"]
    for family in ("-4", "-6"):
        assert link not in node.netns.ip(f"{family} route show table all type unicast")
    assert node.check(conf, pod, result).error["code"] == 3
    node.delete(conf, pod).succeeds()
    held.release()
    assert node.is_empty()
    assert pod.links() == {"lo"}


def test_the_ifb_of_an_egress_limit_goes_with_the_link(node, held):
    rates = {"egressRate": 4_000_000, "egressBurst": 400_000}
    limits = {"capabilities": {"bandwidth": True}, "runtimeConfig": {"bandwidth": rates}}
    pod, conf = node.pod(), node.conf(**limits)
    node.add(conf, pod).succeeds()
    assert len(node.leftovers()["links"]) == 2
    node.delete(conf, pod).succeeds()
    held.release()
    assert node.is_empty()


def test_an_address_is_not_given_out_before_the_link_is_gone(node, held):
    conf = pool(node, "10.55.1.19")
    _, result = added_and_deleted(node, conf)
    assert result["ips"][0]["address"] == "10.55.1.9/24"
    assert node.add(conf).address == "10.55.1.10"
    held.release()
    node.wait_for(lambda: node.leftovers()["tombstone"] == [])
    assert node.add(conf).address == "10.55.1.9"


def test_a_pool_that_is_full_only_of_such_addresses_has_one(node, held):
    conf = one_address(node)
    link, _ = added_and_deleted(node, conf)
    pod = node.pod()
    result = node.add(conf, pod).ok
    assert result["ips"][0]["address"] == "10.55.1.9/24"
    assert link not in node.netns.links()
    held.release()
    node.check(conf, pod, result).succeeds()
    assert node.add(conf).error["code"] == 11  # this one is used


def test_an_address_that_is_asked_for_is_given_though_it_was_held_back(node, held):
    conf, args = node.conf(), "IP=10.55.1.77"
    pod = node.pod()
    assert node.add(conf, pod, args=args).address == "10.55.1.77"
    node.delete(conf, pod).succeeds()
    assert node.add(conf, args=args).address == "10.55.1.77"
    assert node.add(conf, args=args).error["code"] == 103


@pytest.mark.parametrize("container", ["the same", "another"])
def test_the_same_namespace_can_be_used_again_at_once(node, held, datapath, container):
    pod, conf = node.pod(), node.conf(datapath=datapath)
    added_and_deleted(node, conf, pod)
    name = pod.name if container == "the same" else "another"
    result = node.add(conf, pod, container=name).ok
    held.release()
    node.wait_for(lambda: node.leftovers()["tombstone"] == [])
    node.check(conf, pod, result, container=name).succeeds()
    node.delete(conf, pod, container=name).succeeds()
    assert node.is_empty()


def test_a_second_pod_by_the_same_names_keeps_its_link_and_its_address(node, held):
    """The thread knows of the first when the second comes."""
    conf = one_address(node)
    first, second = node.pod(), node.pod()
    node.add(conf, first, container="web").succeeds()
    node.delete(conf, first, container="web").succeeds()
    result = node.add(conf, second, container="web").ok
    held.release()
    added_and_deleted(node, node.conf(name="other"))  # has the thread finish another round
    node.wait_for(lambda: node.leftovers()["tombstone"] == [])
    node.check(conf, second, result, container="web").succeeds()


def test_gc_leaves_nothing_of_them(node, held):
    conf = node.conf()
    added_and_deleted(node, conf)
    node.call("GC", {**conf, "cni.dev/valid-attachments": []}).succeeds()
    assert node.leftovers() == EMPTY


def test_a_namespace_that_is_gone_takes_its_link_along(node, held):
    pod, conf = node.pod(), node.conf()
    added_and_deleted(node, conf, pod)
    pod.remove()
    held.release()
    assert node.is_empty()


def test_many_are_deleted_and_no_address_stays_behind(node, held, datapath):
    conf, pods = node.dual(datapath=datapath), [node.pod() for _ in range(20)]
    with ThreadPoolExecutor(8) as workers:
        list(workers.map(lambda pod: added_and_deleted(node, conf, pod), pods))
    assert len(node.leftovers()["tombstone"]) == len(node.leftovers()["links"]) == 20
    held.release()
    assert node.is_empty()
    assert all(pod.links() == {"lo"} for pod in pods)


class TestKilled:
    """The daemon dies between the answer and the deletion."""

    @pytest.fixture
    def left(self, node, held):
        """The pod's namespace; its link is down, and there."""
        pod = node.pod()
        added_and_deleted(node, node.conf(), pod)
        node.end(held.server, signal.SIGKILL)
        held.release()
        assert len(node.leftovers()["tombstone"]) == len(node.leftovers()["links"]) == 1
        return pod

    def test_the_next_one_finishes_it(self, node, left):
        node.start()
        assert node.is_empty()
        assert left.links() == {"lo"}

    @pytest.mark.parametrize("verb", ["ADD", "DEL", "GC"])
    def test_whoever_works_without_it_finishes_it(self, node, left, verb):
        conf, other = node.conf(), node.pod()
        if verb == "GC":
            conf["cni.dev/valid-attachments"] = []
        node.call(verb, conf, other, **ALONE).succeeds()
        assert left.links() == {"lo"}
        node.delete(node.conf(), other, **ALONE).succeeds()
        assert node.leftovers() == EMPTY

    def test_who_only_looks_sees_no_pod_and_no_trouble(self, node, left):
        assert node.check(node.conf(), left, {}, **ALONE).error["code"] == 3
        node.call("STATUS", node.conf(), **ALONE).succeeds()

    def test_the_same_namespace_can_be_used_without_it(self, node, left):
        conf = node.conf()
        result = node.add(conf, left, **ALONE).ok
        node.check(conf, left, result, **ALONE).succeeds()
        node.start()
        node.check(conf, left, result).succeeds()

    def test_a_link_that_somebody_made_by_the_same_name_is_not_touched(self, node, left):
        (name,) = node.leftovers()["links"]
        node.netns.ip(f"link del {name}")
        node.netns.ip(f"link add {name} type bridge")
        node.start()
        node.wait_for(lambda: node.leftovers()["tombstone"] == [])
        assert node.leftovers() == {**EMPTY, "links": {name}}

    def test_after_a_reboot_nothing_is_known_of_it(self, node, left):
        with sqlite3.connect(node.tmp / "data" / "headcni.db") as db:
            db.execute("UPDATE meta SET value = 'another' WHERE key = 'boot'")
        left.remove()  # as all namespaces and links are, by then
        node.wait_for(lambda: node.leftovers()["links"] == set())
        node.call("STATUS", node.conf(), **ALONE).succeeds()
        assert node.leftovers() == EMPTY


class TestStopped:
    def test_it_finishes_what_waits(self, node, held):
        added_and_deleted(node, node.conf())
        held.server.send_signal(signal.SIGTERM)
        node.wait_for(lambda: not node.socket.exists())
        assert len(node.leftovers()["tombstone"]) == 1
        held.release()
        assert held.server.wait(20) == 0
        assert node.leftovers() == EMPTY

    def test_it_does_not_wait_forever_and_loses_nothing(self, node):
        held = Held(node, "--limit", "1")
        added_and_deleted(node, node.conf())
        assert node.end(held.server) == 1
        assert len(node.leftovers()["tombstone"]) == 1
        node.start()
        assert node.is_empty()


def test_a_failure_is_told_and_tried_again(node):
    once = (
        "from headcni.daemon.cni import links, server\n"
        "from headcni.errors import CniError\n"
        "finish, calls = links.deferred.finish, []\n"
        "class Once:\n"
        "    def finish(store, kernel):\n"
        "        calls.append(store)\n"
        "        if len(calls) == 2: raise CniError(999, 'no luck today')\n"
        "        return finish(store, kernel)\n"
        "links.deferred, links.RETRY_SECONDS = Once, 0.1\n"
        "server.main()\n"
    )
    node.start(code=once)
    node.call("STATUS", node.conf()).succeeds()
    added_and_deleted(node, node.conf())
    assert node.is_empty()
    assert node.said("no luck today") == 1
