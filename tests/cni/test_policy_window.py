"""There is no moment at which a pod is not protected: packets are sent without end, from before the
pod exists, and none that is forbidden may arrive. Each packet is a connection of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cni_node import CniNode, Namespace
from patience import until
from policy_node import (
    PolicyDaemon,
    add,
    daemon_of,
    namespace_object,
    pod_args,
    pod_object,
    policy_object,
)

STREAM = Path(__file__).parent.parent / "support/stream.py"
TURNS = 6  # pods that are added while packets are sent
SETTLE = 0.3
DENY = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
OPEN = {"podSelector": {}, "ingress": [{}], "egress": [{}]}
NEW_ADDRESSES = ("10.55.1.77", "fd55:0:0:1::77")
OWNERSHIP = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 9)


class Stream:
    """A process that sends or counts (stream.py)."""

    def __init__(self, netns: Namespace, *arguments: str) -> None:
        command = ["ip", "netns", "exec", netns.name, sys.executable, str(STREAM), *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def said(self) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def streaming(netns: Namespace, *arguments: str) -> Iterator[Stream]:
    made = Stream(netns, *arguments)
    try:
        yield made
    finally:
        made.end()


def world_of(*policies: dict[str, Any]) -> dict[str, Any]:
    return {
        "pods": [
            *(pod_object("shop", f"pod{number}", {"app": "new"}) for number in range(TURNS)),
            pod_object("shop", "web", {"app": "web"}),
            pod_object("ops", "mate", {"app": "mate"}),
        ],
        "namespaces": [namespace_object("shop"), namespace_object("ops")],
        "policies": list(policies),
    }


def conf_of(node: CniNode, datapath: str) -> dict[str, Any]:
    return node.dual(enable_network_policy=True, datapath=datapath)


def addresses_of(answer: Any) -> list[str]:
    return [one["address"].partition("/")[0] for one in answer.ok["ips"]]


class Turns:
    """Pods are added and deleted while packets go to and from the address that each gets."""

    def __init__(self, node: CniNode, datapath: str, daemon: PolicyDaemon | None) -> None:
        self.node, self.daemon = node, daemon
        self.conf = conf_of(node, datapath)
        self.sent = self.left = self.arrived = 0

    def go(self, mate: Namespace, mates: list[str]) -> None:
        world = [self.node.OUTSIDE_IP, self.node.OUTSIDE_IP6]
        ranges = {4: "10.55.1.0/24", 6: "fd55:0:0:1::/64"}
        for version, via in ((4, self.node.NODE_IP), (6, self.node.NODE_IP6)):
            self.node.outside.ip(f"-{version} route replace {ranges[version]} via {via}")
        with ExitStack() as streams:

            def stream(netns: Namespace, *arguments: str) -> Stream:
                return streams.enter_context(streaming(netns, *arguments))

            counters = [stream(mate, "count"), stream(self.node.outside, "count")]
            senders = [
                stream(mate, "send", *NEW_ADDRESSES),
                stream(self.node.outside, "send", *NEW_ADDRESSES),
            ]
            for number in range(TURNS):
                self._turn(number, [*mates, *world])
            self.sent += sum(one.said() for one in senders)
            self.left += sum(len(one.said()) for one in counters)

    def _turn(self, number: int, targets: list[str]) -> None:
        pod = self.node.pod()
        args = pod_args("shop", f"pod{number}") + f";IP={','.join(NEW_ADDRESSES)}"
        where = self.daemon.socket if self.daemon else str(self.node.tmp / "none.sock")
        with streaming(pod, "count") as counter, streaming(pod, "send", *targets) as sender:
            answer = self.node.add(self.conf, pod, args=args, HEADCNI_SOCKET=where)
            assert sorted(addresses_of(answer)) == sorted(NEW_ADDRESSES)
            time.sleep(SETTLE)
            self.sent += sender.said()
            self.node.delete(self.conf, pod, HEADCNI_SOCKET=where).succeeds()
            self.arrived += len(counter.said())


def added(node: CniNode, datapath: str, daemon: PolicyDaemon, namespace: str, name: str) -> Any:
    netns, answer = add(node, conf_of(node, datapath), name, namespace, daemon)
    return netns, addresses_of(answer)


def test_without_policies_the_streams_get_through(node, datapath):
    """Or else the other tests would prove nothing."""
    with daemon_of(node) as daemon:
        daemon.ask("world", world_of())
        mate, addresses = added(node, datapath, daemon, "ops", "mate")
        turns = Turns(node, datapath, daemon)
        turns.go(mate, addresses)
        assert turns.left > 100 and turns.arrived > 100


def test_a_new_pod_is_protected_from_its_first_packet(node, datapath):
    with daemon_of(node) as daemon:
        daemon.ask("world", world_of(policy_object("shop", "deny", DENY)))
        mate, addresses = added(node, datapath, daemon, "ops", "mate")
        turns = Turns(node, datapath, daemon)
        turns.go(mate, addresses)
        assert (turns.left, turns.arrived) == (0, 0), f"of {turns.sent}"
        assert turns.sent > 1000


def test_a_new_pod_without_the_daemon_is_closed_if_policies_are_known(node, datapath):
    with daemon_of(node) as daemon:
        daemon.ask("world", world_of(policy_object("other", "deny", DENY)))
        mate, addresses = added(node, datapath, daemon, "ops", "mate")
        daemon.kill()
        turns = Turns(node, datapath, None)
        turns.go(mate, addresses)
        assert (turns.left, turns.arrived) == (0, 0), f"of {turns.sent}"
        assert turns.sent > 1000


def test_a_new_pod_without_the_daemon_is_open_if_no_policy_is_known(node, datapath):
    with daemon_of(node) as daemon:
        daemon.ask("world", world_of())
        mate, addresses = added(node, datapath, daemon, "ops", "mate")
        daemon.kill()
        turns = Turns(node, datapath, None)
        turns.go(mate, addresses)
        assert turns.left > 100 and turns.arrived > 100


def test_a_pod_whose_labels_are_not_known_is_closed_until_they_are(node, datapath):
    known = world_of(policy_object("other", "deny", DENY))
    known["pods"] = [one for one in known["pods"] if one["metadata"]["name"] != "web"]
    with daemon_of(node) as daemon:
        daemon.ask("world", known)
        mate, addresses = added(node, datapath, daemon, "ops", "mate")
        web, _unused = added(node, datapath, daemon, "shop", "web")
        with streaming(mate, "count") as counter, streaming(web, "send", *addresses):
            time.sleep(SETTLE)
            assert counter.said() == []
            found = pod_object("shop", "web", {"app": "web"})
            daemon.ask("pod", {"key": ["shop", "web"], "object": found})
            time.sleep(SETTLE)
            assert counter.said()


def test_unknown_pods_are_open_if_the_operator_says_so(node, datapath):
    known = world_of(policy_object("other", "deny", DENY))
    known["pods"] = [one for one in known["pods"] if one["metadata"]["name"] != "web"]
    with daemon_of(node) as daemon:
        daemon.ask("world", known)
        daemon.ask("configure", ["allow", 0])
        mate, addresses = added(node, datapath, daemon, "ops", "mate")
        web, _unused = added(node, datapath, daemon, "shop", "web")
        with streaming(mate, "count") as counter, streaming(web, "send", *addresses):
            time.sleep(SETTLE)
            assert counter.said()
            daemon.ask("configure", ["deny", 0])
            began = time.monotonic()
            time.sleep(SETTLE)
            assert [one for one in counter.said() if one > began] == []


@contextmanager
def protected(node: CniNode, datapath: str) -> Iterator[tuple[PolicyDaemon, Stream, Stream]]:
    """A pod that may not send, and sends without end; who counts, and who sends."""
    with daemon_of(node) as daemon:
        daemon.ask("world", world_of(policy_object("shop", "deny", DENY)))
        mate, addresses = added(node, datapath, daemon, "ops", "mate")
        web, _unused = added(node, datapath, daemon, "shop", "web")
        with streaming(mate, "count") as counter, streaming(web, "send", *addresses) as sender:
            yield daemon, counter, sender


def test_a_new_policy_is_in_force_as_soon_as_the_enforcer_says_so(node, datapath):
    with protected(node, datapath) as (daemon, counter, _sender):
        policy = {"key": ["shop", "deny"], "object": policy_object("shop", "deny", DENY)}
        late = 0
        for _unused in range(10):
            daemon.ask("policy", {"key": ["shop", "deny"]})
            before = time.monotonic()
            until(lambda since=before: any(one > since for one in counter.said()), what="a packet")
            daemon.ask("policy", policy)
            began = time.monotonic()
            time.sleep(0.05)
            late += sum(one > began for one in counter.said())
        assert late == 0


def test_nothing_gets_through_while_other_policies_change(node, datapath):
    with protected(node, datapath) as (daemon, counter, sender):
        number, sent = 0, 0
        while number < 60 or sent <= 1000:
            number, sent = number + 1, sender.said()
            name = f"more{number % 7}"
            ports = [{"port": 1 + number, "endPort": 100 + number}]
            spec = {"podSelector": {}, "ingress": [{"ports": ports}]}
            found = policy_object("shop", name, spec) if number % 3 else None
            daemon.ask("policy", {"key": ["shop", name], "object": found})
        assert counter.said() == [], f"of {sent}"
        assert daemon.ask("repair") == []


def test_the_rules_stay_when_the_daemon_is_killed_and_when_it_comes_back(node, datapath):
    with protected(node, datapath) as (daemon, counter, sender):
        daemon.kill()
        time.sleep(SETTLE)
        with daemon_of(node) as again:
            time.sleep(SETTLE)
            assert not again.ask("report")["complete"]
            again.ask("world", world_of(policy_object("shop", "deny", DENY)))
            assert again.ask("report")["complete"]
            time.sleep(SETTLE)
            assert counter.said() == [], f"of {sender.said()}"
            again.ask("policy", {"key": ["shop", "deny"]})
            time.sleep(SETTLE)
            assert counter.said(), "and the new daemon changes them"


def test_the_rules_stay_when_the_daemon_is_stopped_for_another_release(node, datapath):
    with protected(node, datapath) as (daemon, counter, sender):
        daemon.stop()
        time.sleep(SETTLE)
        with daemon_of(node) as again:
            again.ask("world", world_of(policy_object("shop", "deny", DENY)))
            time.sleep(SETTLE)
        assert counter.said() == [], f"of {sender.said()}"


@pytest.mark.skipif(not OWNERSHIP, reason="before Linux 6.9 a flush is repaired, not prevented")
@pytest.mark.parametrize("command", ["flush ruleset", "delete table inet headcni-policy"])
def test_nothing_gets_through_when_somebody_flushes_nftables(node, datapath, command):
    with protected(node, datapath) as (_daemon, counter, sender):
        for _unused in range(5):
            node.netns.run("nft", command, check=False)
            time.sleep(0.1)
        assert counter.said() == [], f"of {sender.said()}"
        assert sender.said() > 1000


def test_a_table_that_was_flushed_without_the_daemon_is_closed_for_the_next_pod(node, datapath):
    """As after a reboot: the store remembers that there are policies."""
    with protected(node, datapath) as (daemon, counter, _sender):
        daemon.kill()
        node.netns.run("nft", "flush", "ruleset")
        netns = node.pod()
        add(node, conf_of(node, datapath), "pod1", pod=netns)
        began = time.monotonic()
        with streaming(netns, "send", *addresses_of_mate(node)):
            time.sleep(SETTLE)
        late = [one for one in counter.said() if one > began]
        assert late == []
        with daemon_of(node, interval=1.0) as again:
            again.ask("world", world_of(policy_object("other", "deny", DENY)))
            with streaming(netns, "send", *addresses_of_mate(node)):
                time.sleep(SETTLE)
            assert counter.said() > late, "it is opened once its policies are known"


def addresses_of_mate(node: CniNode) -> list[str]:
    """The first pod has the first addresses."""
    return ["10.55.1.2", "fd55:0:0:1::2"]


def test_a_foreign_change_of_the_table_is_repaired_at_once(node, datapath):
    """On a kernel where a table can be changed by others, which is made so here."""
    with protected(node, datapath) as (daemon, counter, _sender):
        for command in (
            "flush ruleset",
            "delete table inet headcni-policy",
            "flush chain inet headcni-policy from_pods",
            "flush map inet headcni-policy egress4",
        ):
            daemon.ask("disown")
            before = daemon.ask("report")["repairs"]
            node.netns.run("nft", command)
            flushed = time.monotonic()
            until(lambda before=before: daemon.ask("report")["repairs"] > before)
            repaired = time.monotonic()
            time.sleep(SETTLE)
            assert [one for one in counter.said() if one > repaired] == []
            assert repaired - flushed < 2.0
