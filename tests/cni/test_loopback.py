"""loopback: the answers of the CNI project's own plugin, and its effect."""

from __future__ import annotations

import json
import subprocess

import pytest
from cni_node import Answer

from lab import tools

VERSIONS = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"]
PREVIOUS = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:01", "sandbox": "/run/netns/x"}],
    "ips": [{"interface": 0, "address": "10.55.1.2/24", "gateway": "10.55.1.1"}],
    "dns": {"nameservers": ["10.55.1.1"]},
}


def conf(version="1.1.0", **more):
    return {"cniVersion": version, "name": "cni-loopback", "type": "loopback", **more}


@pytest.fixture
def pod(node):
    """As a runtime hands it over: its lo is down."""
    made = node.pod()
    made.ip("link set lo down")
    return made


@pytest.fixture
def ours(node):
    return lambda verb, *words, **how: node.call(verb, *words, plugin="loopback", **how)


@pytest.fixture
def go(node):
    """The CNI project's, called the same way."""

    def call(verb, given, pod=None, **how):
        done = subprocess.run(
            ["ip", "netns", "exec", node.netns.name, str(tools.CNI.bin / "loopback")],
            input=json.dumps(given),
            text=True,
            capture_output=True,
            env=node.environment(verb, pod, **how),
            timeout=30,
            check=False,
        )
        answer = json.loads(done.stdout) if done.stdout.strip() else {}
        return Answer(done.returncode, answer, done.stderr)

    return call


def is_up(pod):
    return "UP" in pod.ip_json("link show lo")[0]["flags"]


def told(answer):
    """A result without what is empty, which says nothing."""
    return {key: value for key, value in answer.ok.items() if value}


def as_of_1_0(answer):
    """The Go plugin has one shape for all versions, so that is what can be compared. Ours has each
    version's own: before 1.0.0 an address says its family, before 0.3.0 there are no lists."""
    said = told(answer)
    if said["cniVersion"] in ("0.1.0", "0.2.0"):
        return [said["ip4"]["ip"], said["ip6"]["ip"]]
    families = [ip.pop("version", None) for ip in said["ips"]]
    assert families == (["4", "6"] if said["cniVersion"] < "1" else [None, None])
    return said


@pytest.mark.parametrize("version", VERSIONS)
def test_add_brings_lo_up_and_answers_as_the_go_plugin_does(ours, go, pod, version):
    mine = as_of_1_0(ours("ADD", conf(version), pod))
    assert is_up(pod) and pod.addresses("lo") == {"127.0.0.1/8", "::1/128"}
    pod.ip("link set lo down")
    theirs = told(go("ADD", conf(version), pod))
    assert mine in (theirs, [ip["address"] for ip in theirs["ips"]])
    assert as_of_1_0(ours("ADD", conf(version), pod)) == mine


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0", "1.0.0", "1.1.0"])
def test_in_a_chain_the_result_before_it_is_passed_on(ours, go, pod, version):
    ips = [{"version": "4", **ip} if version < "1" else ip for ip in PREVIOUS["ips"]]
    given = conf(version, prevResult={**PREVIOUS, "cniVersion": version, "ips": ips})
    assert told(ours("ADD", given, pod)) == told(go("ADD", given, pod))
    assert is_up(pod)


def test_del_takes_lo_down_and_is_fine_with_a_pod_that_is_gone(ours, go, pod):
    ours("ADD", conf(), pod)
    for call in (ours, go):
        call("DEL", conf(), pod).succeeds()
        assert not is_up(pod)
    pod.remove()
    for call in (ours, go):
        call("DEL", conf(), pod).succeeds()
        call("DEL", conf(), container="c1").succeeds()


def test_check_finds_lo_down_and_an_address_that_was_taken_away(ours, go, pod):
    given = conf(prevResult=ours("ADD", conf(), pod).ok)
    ours("CHECK", given, pod).succeeds()
    go("CHECK", given, pod).succeeds()
    pod.ip("addr del 127.0.0.1/8 dev lo")
    assert "lacks 127.0.0.1/8" in ours("CHECK", given, pod).error["msg"]
    pod.ip("link set lo down")
    for call in (ours, go):
        assert "is down" in call("CHECK", given, pod).error["msg"]


def test_version_gc_and_status_answer_as_the_go_plugin_does(ours, go):
    assert set(ours("VERSION", conf()).ok["supportedVersions"]) == set(
        go("VERSION", conf()).ok["supportedVersions"]
    )
    for verb, given in (("STATUS", conf()), ("GC", conf(**{"cni.dev/valid-attachments": []}))):
        for call in (ours, go):
            answer = call(verb, given)
            assert (answer.code, answer.json) == (0, {})


def test_an_address_that_is_no_loopback_address_is_refused_by_both(ours, go, pod):
    pod.ip("addr add 10.55.1.9/32 dev lo")
    for call in (ours, go):
        error = call("ADD", conf(), pod).error
        assert "10.55.1.9" in error["msg"]


WRONG = [
    ("ADD", conf("9.9.9"), {}, 1, "cniVersion is 9.9.9"),
    ("CHECK", conf("0.3.1"), {}, 1, "has no CHECK"),
    ("GC", conf("1.0.0"), {}, 1, "has no GC"),
    ("ADD", "{", {}, 6, "not JSON"),
    ("ADD", "[]", {}, 6, "not a JSON object"),
    ("CHECK", conf(), {}, 7, "prevResult is missing"),
    ("ADD", conf(prevResult=[]), {}, 7, "prevResult"),
    ("ADD", conf("0.2.0", prevResult=PREVIOUS), {}, 7, "prevResult"),
    ("ADD", conf(), {"container": "?"}, 4, "CNI environment"),
    ("ADD", conf(), {"CNI_NETNS": "/nowhere"}, 102, "cannot be opened"),
    ("ADD", conf(), {"CNI_NETNS": "/proc/self/status"}, 102, "not a network namespace"),
]


@pytest.mark.parametrize(("verb", "given", "how", "code", "said"), WRONG)
def test_what_is_wrong_gets_its_code_and_a_sentence(ours, pod, verb, given, how, code, said):
    error = ours(verb, given, pod, **how).error
    assert (error["code"], said in error["msg"]) == (code, True), error
    assert not is_up(pod)


def test_the_nodes_own_lo_is_left_alone(ours, node):
    error = ours("ADD", conf(), node.netns).error
    assert "the node's own network namespace" in error["msg"]
    ours("DEL", conf(), node.netns).succeeds()
    assert is_up(node.netns)


def test_it_runs_on_every_python(ours, node, pod, python):
    node.python = python
    given = conf(prevResult=ours("ADD", conf(), pod).ok)
    ours("CHECK", given, pod).succeeds()
    ours("DEL", given, pod).succeeds()
