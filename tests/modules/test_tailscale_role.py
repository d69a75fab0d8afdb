"""The role on nodes: predicted, done, done once; what an operator changed stays; no key is left."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tailscale_nodes import Nodes, nodes_of
from tailscale_site import NEWER

PLAY = """\
- hosts: headcni
  gather_facts: false
  vars: {_tailscale_trust_preflight: true}
  tasks:
    - ansible.builtin.include_role: {name: headcni.mesh.tailscale, tasks_from: preflight}
    - ansible.builtin.include_role: {name: headcni.mesh.tailscale, tasks_from: install}
    - ansible.builtin.include_role: {name: headcni.mesh.tailscale, tasks_from: status}
    - ansible.builtin.debug: {msg: "must log in: {{ tailscale_standing.needs_login }}"}
    - ansible.builtin.include_role: {name: headcni.mesh.tailscale, tasks_from: join}
    - ansible.builtin.debug: {msg: "key: {{ tailscale_standing.node_key }}"}
"""
# What the modules of the collection do on a node, apart from what the controller does by itself.
MODULES = (
    r"TASK \[headcni.mesh.tailscale : (Check which|Install Tailscale \(|Ask tail|Join the tail)"
)


@dataclass(frozen=True)
class Mesh:
    nodes: Nodes
    folder: Path

    def key(self, *options: str) -> str:
        make = "/opt/lab/headscale/headscale preauthkeys create --user 1 --expiration 1h"
        return self.nodes.on(f"{make} {' '.join(options)} | tail -1", "control")

    def play(self, *words: str, check: bool = True, **variables: object) -> str:
        """Variables go by a file, as an operator's vault does."""
        (self.folder / "vars.json").write_text(json.dumps(variables))
        (self.folder / "play.yml").write_text(PLAY)
        done = self.nodes.lab.run(
            *(".venv/bin/ansible-playbook", "-i", "inventories/lab", str(self.folder / "play.yml")),
            *("-e", f"@{self.folder}/vars.json", *words),
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def prefs(self, node: str, socket: str = "") -> dict[str, object]:
        command = f"tailscale {f'--socket={socket}' if socket else ''} debug prefs"
        found: dict[str, object] = json.loads(self.nodes.on(command, node))
        return found


def recap(output: str) -> dict[str, dict[str, int]]:
    lines = output.partition("PLAY RECAP")[2].splitlines()[1:]
    return {
        line.split()[0]: {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", line)}
        for line in lines
        if " : ok=" in line
    }


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Iterator[Mesh]:
    with nodes_of("tailscale", 2) as nodes:
        nodes.on("/opt/lab/headscale/headscale users create headcni", "control")
        yield Mesh(nodes, tmp_path_factory.mktemp("play"))


def test_artis3n_348_and_524_a_dry_run_on_bare_nodes_runs_through_and_predicts(bare):
    said = bare.play("--check", "--diff")
    assert {host: counts["failed"] for host, counts in recap(said).items()} == {
        "node1": 0,
        "node2": 0,
    }
    assert all(counts["changed"] == 2 for counts in recap(said).values())
    assert said.count("must log in: True") == 2
    assert bare.nodes.on("ls /usr/sbin/tailscaled /etc/default/tailscaled 2>/dev/null; true") == ""


@pytest.fixture(scope="module")
def first(bare) -> dict[str, str]:
    """The first run, with a look at every command line on a node meanwhile."""
    key = bare.key("--reusable")
    watch = (
        "systemd-run --quiet --unit=watch sh -c 'while :; do"
        ' cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr "\\0" "\\n"'
        " | grep -a hskey-[a]uth; sleep 0.02; done'"
    )
    bare.nodes.on(watch)
    bare.nodes.on("sh -c 'sleep 1' hskey-auth-decoy")
    said = bare.play("-vvv", "--diff", tailscale_auth_key=key, tailscale_accept_routes=True)
    bare.nodes.on("systemctl stop watch")
    return {"key": key, "said": said}


def test_the_first_run_installs_and_joins_every_node(bare, first):
    for node in ("node1", "node2"):
        status = json.loads(bare.nodes.on("tailscale status --json", node))
        assert (status["BackendState"], status["Version"][: len(NEWER)]) == ("Running", NEWER)
        assert f"key: {status['Self']['PublicKey']}" in first["said"]
    assert "pong from node2" in bare.nodes.on("tailscale ping --until-direct=false -c 3 node2")
    prefs = bare.prefs("node1")
    assert (prefs["RouteAll"], prefs["NoSNAT"], prefs["CorpDNS"]) == (True, True, False)


def test_the_key_is_shown_nowhere_and_left_nowhere(bare, first):
    assert first["key"] not in first["said"]
    assert "decoy" in bare.nodes.on("journalctl --no-pager --unit=watch")
    for node in ("node1", "node2"):
        seen = bare.nodes.on(
            "journalctl --no-pager | grep hskey-[a]uth | grep -cv decoy;"
            " grep -rl hskey-auth /run /etc /root /tmp /var --exclude-dir=journal; true",
            node,
        )
        assert seen == "0"


def test_artis3n_320_and_357_a_second_run_changes_nothing_and_needs_no_key(bare, first):
    for words in ([], ["--check", "--diff"]):
        said = bare.play(*words)
        assert {host: counts["changed"] for host, counts in recap(said).items()} == {
            "node1": 0,
            "node2": 0,
        }
        assert said.count("must log in: False") == 2
        assert len(re.findall(MODULES, said)) == 3


def test_k3s_11803_what_the_user_set_stays(bare, first):
    bare.nodes.on("tailscale set --advertise-routes=192.168.7.0/24")
    bare.nodes.on("tailscale set --auto-update=false --nickname=mine")
    before = bare.prefs("node1")
    bare.play(tailscale_advertise_routes=["10.9.0.0/24"])
    after = bare.prefs("node1")
    assert set(after["AdvertiseRoutes"]) == {"192.168.7.0/24", "10.9.0.0/24"}
    assert {**before, "AdvertiseRoutes": None} == {**after, "AdvertiseRoutes": None}


def test_k3s_13597_a_rebooted_node_is_still_joined(bare, first):
    key = json.loads(bare.nodes.on("tailscale status --json"))["Self"]["PublicKey"]
    bare.nodes.lab("reboot", "node1")
    said = bare.play("--limit", "node1")
    assert recap(said)["node1"]["changed"] == 0
    assert f"key: {key}" in said


def test_a_node_that_cannot_log_in_does_not_hold_up_the_others(bare, first):
    bare.nodes.on("tailscale logout")
    said = bare.play(check=False, tailscale_hostname="{{ inventory_hostname }}")
    assert recap(said)["node1"]["failed"] == 1
    assert (recap(said)["node2"]["failed"], recap(said)["node2"]["changed"]) == (0, 1)
    assert "auth_key: none given, and this node must log in: it is not logged in" in " ".join(
        said.split()
    )
    bare.play(tailscale_auth_key=bare.key())
    assert json.loads(bare.nodes.on("tailscale status --json"))["BackendState"] == "Running"


def test_the_same_on_the_socket_of_a_second_tailscaled(bare, first):
    """As in daemon mode: programs only, and a service that is not tailscaled.service."""
    before = bare.nodes.process("node2")
    socket = "/run/headcni/tailscaled.sock"
    bare.nodes.on(
        "mkdir -p /run/headcni && systemd-run --quiet --unit=second -E TS_DEBUG_USE_DERP_HTTP=true"
        f" /usr/sbin/tailscaled --tun=userspace-networking --port=0 --socket={socket}"
        " --statedir=/var/lib/headcni/tailscaled; sleep 1",
        "node2",
    )
    mode = {"tailscale_service": "none", "tailscale_socket": socket}
    said = bare.play("--limit", "node2", tailscale_auth_key=bare.key(), **mode)
    assert "must log in: True" in said
    assert recap(said)["node2"]["changed"] == 1
    again = bare.play("--limit", "node2", **mode)
    assert recap(again)["node2"]["changed"] == 0
    assert bare.prefs("node2", socket)["NoSNAT"] is True
    assert bare.nodes.process("node2") == before
    assert len(json.loads(bare.nodes.on("tailscale status --json", "node2"))["Peer"]) == 2
