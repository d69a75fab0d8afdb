"""headcnictl on a node with systemd, a journal, a tailscaled and a mesh."""

from __future__ import annotations

import json
import re

import pytest

from tests.lab.test_daemon import daemons as daemons
from tests.lab.test_daemon import pods as pods

CTL = "/opt/headcni/current/bin/headcnictl"
FOLDER = "/root/of-headcnictl"


@pytest.fixture(scope="module")
def node(daemons):
    """Runs a shell command on node1; `headcnictl` is on its PATH."""
    daemons.on("node1", f"mkdir -p {FOLDER}; ln -sf {CTL} /usr/local/bin/headcnictl")
    yield lambda command, check=True: daemons.on("node1", command, check)
    daemons.on("node1", f"rm -rf {FOLDER} /usr/local/bin/headcnictl")


def test_the_logs_are_those_of_the_journal_with_systemds_and_the_runtimes_lines(node):
    said = 'echo plugin type=\\"headcni\\" failed: a test; echo something else'
    node(f"systemd-run --quiet --wait --collect --unit=kubelet.service sh -c '{said}'")
    node("journalctl --sync")
    lines = [json.loads(line) for line in node("headcnictl logs --json").splitlines()]
    assert {line["source"] for line in lines} == {"daemon", "tailscaled", "plugin"}
    assert lines == sorted(lines, key=lambda line: line["time"])
    messages = [line["message"] for line in lines]
    assert any(message.startswith("part=daemon msg=ready") for message in messages)
    assert any("Started headcni-daemon" in message for message in messages)
    assert 'plugin type="headcni" failed: a test' in messages
    assert "something else" not in messages
    short = node("headcnictl logs --only daemon --lines 3").splitlines()
    assert len(short) == 3 and all(" daemon " in line for line in short)
    assert node("headcnictl logs --since 2030-01-01") == ""
    assert node("headcnictl logs --since soon; echo $?", check=False).endswith("2\n")


def test_logs_are_followed_until_they_are_interrupted(node):
    said = node(
        "(timeout -s INT 8 headcnictl logs --follow --lines 1; echo code $?) > /run/followed &"
        " sleep 3; systemctl reload headcni-daemon; wait; cat /run/followed"
    )
    lines = said.splitlines()
    assert any("Reloaded" in line or "Reloading" in line for line in lines), said
    assert len(lines) == len(set(lines))
    assert "Traceback" not in said


def test_config_and_metrics_are_those_of_the_daemon(node):
    answer = json.loads(node("headcnictl config show --json"))
    known = {one["key"]: one for one in answer["settings"]}
    assert answer["daemon"] is True
    assert known["network.podCIDR.base"]["value"] == ["10.55.0.0/16", "fd55::/48"]
    assert known["tailscale.interfaceName"]["value"] == "tailscale0"
    found = {
        one["name"]: one
        for one in json.loads(node("headcnictl metrics --json", check=False))["metrics"]
    }
    assert found["headcni_condition"]["outside"] is False, found["headcni_condition"]
    paths = {one["labels"]["path"] for one in found["headcni_peers"]["series"]}
    assert {"direct", "derp"} <= paths
    wide = [line for line in node("headcnictl metrics", check=False).splitlines() if len(line) > 80]
    assert wide == []


def test_a_support_bundle_of_a_real_node_is_complete_and_has_no_keys(node, pods):
    file = f"{FOLDER}/bundle.tar.gz"
    parts = json.loads(node(f"headcnictl support-bundle {file} --json"))["parts"]
    assert node(f"stat -c %a {file}") == "600\n"
    incomplete = {part["name"]: part["problem"] for part in parts if part["problem"]}
    assert set(incomplete) <= {"versions/units.txt"}, incomplete
    assert not any(part["cut"] for part in parts)
    read = f"tar -xOzf {file} --wildcards"
    assert "table inet headcni" in node(f"{read} '*/network/nft.txt'")
    assert "msg=ready" in node(f"{read} '*/logs.txt'")
    assert json.loads(node(f"{read} '*/status.json'"))["ready"] is True
    assert json.loads(node(f"{read} '*/pods.json'"))[0]["addresses"] == [pods["node1"]]
    everything = node(f"tar -xOzf {file}")
    state = node("cat /var/lib/tailscale/tailscaled.state; tailscale status --json")
    keys = set(re.findall(r"\b[a-z]*key:([0-9a-f]{16,})", state))
    assert keys and not [key for key in keys if key in everything]


def test_a_node_is_restored_with_its_pods_running(node, daemons, pods):
    file = f"{FOLDER}/backup.tar.gz"
    before = json.loads(node("headcnictl pods --json"))
    assert json.loads(node(f"headcnictl backup {file} --json"))["pods"] == len(before) == 1
    assert "systemctl stop" in node(f"headcnictl restore {file} 2>&1", check=False)
    node(f"headcnictl restore --check {file}")
    node("systemctl stop headcni-daemon && rm -r /var/lib/cni/headcni/* /etc/headcni/config.yaml")
    try:
        node(f"headcnictl restore {file}")
        assert json.loads(node("headcnictl pods --json")) == before
    finally:
        node("systemctl start headcni-daemon")
    daemons.wait("node1", "headcnictl status >/dev/null 2>&1", seconds=90)
    node(f"ip netns exec warm ping -c 2 -W 5 {pods['node2']}")
    said = json.loads(node("headcnictl diagnose --json", check=False))["problems"]
    assert said["pods"] == []


def test_words_are_completed_in_the_nodes_own_shell(node):
    asked = "COMP_WORDS=(headcnictl config e); COMP_CWORD=2; _headcnictl; echo ${COMPREPLY[@]}"
    script = f"source <(headcnictl completion bash); {asked}"
    assert node(f"bash -c '{script}'") == "explain\n"
