"""Which hosts a playbook works on, and that a misspelt group is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.headcni.mesh.plugins.filter.mesh_hosts import mesh_hosts
from ansible_collections.headcni.mesh.plugins.filter.mesh_members import mesh_members
from ansible_collections.headcni.mesh.plugins.filter.mesh_socket import mesh_socket
from lab_command import CHECKOUT

OURS = {"all": ["a", "b", "c"], "ungrouped": [], "headcni": ["a", "b"], "web": ["c"]}
K3S_ANSIBLE = {"all": ["s", "n"], "k3s_cluster": ["s", "n"], "server": ["s"], "agent": ["n"]}
PLAYBOOKS = sorted((CHECKOUT / "playbooks").glob("*.yml"))


@pytest.mark.parametrize(
    ("groups", "given", "pattern"),
    [
        (OURS, "", "headcni"),
        (OURS, "web", "web"),
        (OURS, "all:!web", "all:!web"),
        (K3S_ANSIBLE, "", "k3s_cluster"),
        (K3S_ANSIBLE | {"headcni": ["s"]}, "", "headcni"),
        (K3S_ANSIBLE | {"headcni": []}, "", "k3s_cluster"),
    ],
)
def test_the_group_is_ours_or_the_one_of_k3s_ansible_or_the_one_given(groups, given, pattern):
    assert mesh_hosts(groups, given) == pattern


@pytest.mark.parametrize(
    ("groups", "given", "said"),
    [
        ({"all": [], "ungrouped": []}, "", "no group 'headcni' with hosts in it"),
        ({"all": ["c"], "web": ["c"]}, "", "groups with hosts: web"),
        ({"all": ["c"], "headcni": [], "web": ["c"]}, "", "-e headcni_hosts=GROUP"),
        (OURS, "hedcni", "headcni_hosts: 'hedcni' matches no host"),
        (OURS, "web:&headcni", "headcni_hosts: 'web:&headcni' matches no host"),
    ],
)
def test_an_empty_or_misspelt_group_is_an_error_that_says_what_to_do(groups, given, said):
    with pytest.raises(AnsibleFilterError, match=None) as problem:
        mesh_hosts(groups, given)
    assert said in str(problem.value)


def test_nodes_outside_of_the_limit_are_members_too():
    assert mesh_members(OURS, "", ["a"]) == ["a", "b"]
    assert mesh_members(OURS, "all", ["a"]) == ["a", "b", "c"]


def test_hosts_of_another_playbook_are_members_by_themselves():
    assert mesh_members(OURS, "", ["c"]) == ["c"]
    assert mesh_members({"all": ["c"], "web": ["c"]}, "", ["c"]) == ["c"]


def test_a_moved_socket_is_the_nodes_own_tailscaled_and_never_ours():
    moved = {"tailscale_socket": "/srv/ts.sock"}
    assert mesh_socket("host", moved) == "/srv/ts.sock"
    assert mesh_socket("daemon", moved) == "/run/headcni/tailscaled.sock"
    assert mesh_socket("host", {}) == "/run/tailscale/tailscaled.sock"
    with pytest.raises(AnsibleFilterError, match="mode: hots, expected host or daemon"):
        mesh_socket("hots", {})


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.stem)
def test_no_playbook_names_a_group_or_a_socket_itself(playbook):
    plays = yaml.safe_load(playbook.read_text())
    own = [play for play in plays if "hosts" in play]
    assert {play["hosts"] for play in own} == {
        "{{ groups | headcni.mesh.mesh_hosts(headcni_hosts | default('')) }}"
    }
    first = own[0]["tasks"][0]
    assert first["ansible.builtin.import_tasks"] == "tasks/check_names.yml"
    assert "tailscaled.sock" not in playbook.read_text()


def run(inventory: str, folder: Path, *words: str) -> tuple[int, str]:
    (folder / "hosts.yml").write_text(inventory)
    done = subprocess.run(
        [
            Path(sys.executable).with_name("ansible-playbook"),
            *("-i", folder / "hosts.yml", CHECKOUT / "playbooks" / "upgrade.yml"),
            *("--list-hosts", *words),
        ],
        env={
            **os.environ,
            "ANSIBLE_COLLECTIONS_PATH": str(CHECKOUT / "collections"),
            "ANSIBLE_FORCE_COLOR": "0",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_ansible_stops_at_an_inventory_without_nodes(tmp_path):
    code, said = run("web: {hosts: {c: {}}}\n", tmp_path)
    assert code != 0 and "no group 'headcni' with hosts in it" in said


def test_ansible_takes_the_groups_of_k3s_ansible_as_they_are(tmp_path):
    groups = "k3s_cluster: {children: {server: {hosts: {s: }}, agent: {hosts: {n: }}}}\n"
    code, said = run(groups, tmp_path)
    assert code == 0 and said.count("hosts (2)") == 3
