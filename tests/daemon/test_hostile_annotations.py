"""A pod's author fills an annotation with junk: what it costs the daemon, and other pods."""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from contextlib import contextmanager

import pytest

from headcni.shim import request

ANNOTATIONS = "io.kubernetes.cri.pod-annotations"
LONGEST = 256 << 10  # all annotations of a pod, by Kubernetes
ATTACKERS = 4
DAEMON = "import sys; from headcni.daemon.main import main; sys.exit(main(sys.argv[5:]))"


@pytest.fixture
def daemon(node):
    """The whole daemon, with its log and its events, on a node without a mesh."""
    config = node.tmp / "config.yaml"
    config.write_text(
        json.dumps(
            {
                "daemon": {"socket": str(node.socket), "dataDir": str(node.tmp / "data")},
                "tailscale": {"socket": {"path": str(node.tmp / "no.sock")}},
                "network": {"podCIDR": {"nodeLocal": "10.55.1.0/24"}, "firewall": "none"},
                "monitoring": {"enabled": False},
            }
        )
    )
    argv, env = node.python_command("-c", DAEMON)
    return node.start_command([*argv, *4 * ["-"], "--config", str(config)], env, "msg=ready")


def annotated(node, annotations):
    given = {ANNOTATIONS: annotations}
    return node.conf(capabilities={ANNOTATIONS: True}, runtimeConfig=given)


def commas(node):
    return annotated(node, {"headcni.dev/ip": "," * LONGEST})


def rss(process):
    """MiB."""
    with open(f"/proc/{process.pid}/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def ask(node, conf, container, **how):
    """The answer to an ADD, as the shim would get it, without the time that the shim takes."""
    env = node.environment("ADD", container=container, CNI_NETNS="/no/such/namespace", **how)
    netns = f"net:[{os.stat(node.netns.path).st_ino}]".encode()
    stdin = conf if isinstance(conf, bytes) else json.dumps(conf).encode()
    sent = {os.fsencode(key): os.fsencode(value) for key, value in env.items()}
    with node.connect() as connection:
        connection.settimeout(60)
        connection.sendall(request(sent, netns, stdin))
        received = bytearray()
        while more := connection.recv(1 << 20):
            received += more
    return received


@contextmanager
def under_attack(node, conf):
    """So many calls at a time, one after the other, until the block ends."""
    over, stdin = threading.Event(), json.dumps(conf).encode()

    def attack(number):
        while not over.is_set():
            ask(node, stdin, f"attacker{number}", args="K8S_POD_NAMESPACE=evil;K8S_POD_NAME=pod")

    attackers = [threading.Thread(target=attack, args=(n,)) for n in range(ATTACKERS)]
    for one in attackers:
        one.start()
    try:
        time.sleep(0.5)
        yield
    finally:
        over.set()
        for one in attackers:
            one.join(60)


def add_seconds(node, count=15):
    """The median time of another pod's ADD, from the plugin's start to its end."""
    conf, took = node.conf(), []
    for _unused in range(count):
        pod = node.pod()
        began = time.monotonic()
        node.add(conf, pod, args="K8S_POD_NAMESPACE=good;K8S_POD_NAME=web").succeeds()
        took.append(time.monotonic() - began)
        node.delete(conf, pod).succeeds()
    return statistics.median(took)


def test_an_annotation_of_commas_gets_a_short_answer_and_a_short_log_line(node, daemon):
    answer = ask(node, commas(node), "attacker")
    assert b"headcni.dev/ip" in answer
    assert len(answer) < 8192
    node.wait_for(lambda: node.said("pod-failed"))
    assert max(map(len, node.log.read_text().splitlines())) < 8192


def test_annotations_do_not_fill_the_daemons_memory(node, daemon):
    ask(node, node.conf(), "warm-up")
    before = rss(daemon)
    for number in range(100):
        ask(node, commas(node), f"attacker{number}")
    assert rss(daemon) - before < 16


def test_large_annotations_that_are_nobodys_mistake_are_not_kept_in_memory(node, daemon):
    """A configuration that was understood is remembered for the next pod with the same."""
    ask(node, node.conf(), "warm-up")
    before = rss(daemon)
    for number in range(100):
        conf = annotated(node, {"example.com/notes": f"{number}" + "x" * LONGEST})
        ask(node, conf, f"author{number}")
    assert rss(daemon) - before < 16


@pytest.mark.parametrize(
    "annotations",
    [
        {"headcni.dev/ip": "," * LONGEST},
        {f"example.com/{number:05}": "" for number in range(LONGEST // 17)},
    ],
    ids=["commas", "15000 annotations"],
)
def test_four_such_calls_do_not_starve_another_pods_add(node, daemon, annotations):
    add_seconds(node, 3)
    alone = add_seconds(node)
    with under_attack(node, annotated(node, annotations)):
        meanwhile = add_seconds(node)
    print(f"ADD alone {1000 * alone:.1f} ms, meanwhile {1000 * meanwhile:.1f} ms")
    # Twice is the aim, and what a quiet machine shows. Other tests run beside this one; without the
    # limits it was 23 times.
    assert meanwhile < 6 * alone
