"""With more hosts, no task of a playbook may cost each host more.

What costs the controller most is another host's variables: a millisecond for each look. So these
are counted, in runs of the real playbooks without nodes, and so are comparisons of two hosts. No
clock is involved.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from controller_cost import Cost, measured

FEW, MANY = 3, 6
IN_KUBERNETES = {"headcni_node_kubernetes_server": "node1"}
NAMES = {
    **IN_KUBERNETES,
    "headcni_names_host": "node1",
    "headcni_names_domain": "mesh.example.org",
    "headcni_names_service_routes": ("node1", "node3"),
    "headcni_node_service_cidr": "11.0.0.0/16",
}
FORMER = {"headcni_former_url": "http://192.0.2.9", "headcni_former_api_key": "x"}


@cache
def costs(playbook: str, **given: Any) -> tuple[Cost, Cost]:
    few, many = (measured(f"playbooks/{playbook}.yml", hosts, **given) for hosts in (FEW, MANY))
    assert set(few.tasks) == set(many.tasks)
    return few, many


@pytest.mark.parametrize(
    ("playbook", "given"),
    [
        ("site", IN_KUBERNETES),
        ("site", {"fresh": False}),
        ("uninstall", IN_KUBERNETES),
        ("upgrade", {"headcni_serial": "100%"}),
        ("switch_mode", {"headcni_mode": "host"}),
        ("move_server", {"headcni_yes": True, **FORMER}),
        ("names", NAMES),
        ("verify", {"sample": MANY}),  # each node asks others than the next
    ],
    ids=lambda one: one if isinstance(one, str) else " ".join(map(str, one)),
)
def test_twice_the_hosts_look_up_twice_as_many_variables(playbook, given):
    few, many = costs(playbook, **given)
    worse = {
        name: (few.tasks[name]["reads"], task["reads"])
        for name, task in many.tasks.items()
        if task["reads"] > few.tasks[name]["reads"] * MANY / FEW
    }
    assert worse == {}
    assert sum(task["reads"] for task in many.tasks.values()) > 0


@pytest.mark.parametrize("playbook", ["site", "uninstall"])
def test_no_task_compares_every_host_with_every_other(playbook):
    """Ansible does so, several times, for a task that includes: it keeps the hosts in a list. What
    all hosts do, nothing to do or not, is imported."""
    few, many = costs(playbook, fresh=False)
    worse = {
        name: (few.tasks[name]["comparisons"], task["comparisons"])
        for name, task in many.tasks.items()
        if task["comparisons"] > few.tasks[name]["comparisons"] * MANY / FEW
    }
    assert worse == {}


def test_a_comparison_of_two_hosts_is_counted(tmp_path):
    included = tmp_path / "included.yml"
    included.write_text(json.dumps([{"ansible.builtin.debug": {"msg": "here"}}]))
    playbook = tmp_path / "play.yml"
    tasks = [{"name": "Include it", "ansible.builtin.include_tasks": str(included)}]
    playbook.write_text(json.dumps([{"hosts": "headcni", "gather_facts": False, "tasks": tasks}]))
    few, many = (measured(playbook, hosts).tasks["headcni: Include it"] for hosts in (FEW, MANY))
    assert many["comparisons"] > few["comparisons"] * MANY / FEW


def test_the_calls_of_functions_are_the_same_in_every_run(tmp_path):
    """The benchmark of a thousand hosts relies on it."""
    playbook = tmp_path / "play.yml"
    tasks = [{"name": "Say it", "ansible.builtin.debug": {"msg": "{{ inventory_hostname }}"}}]
    playbook.write_text(json.dumps([{"hosts": "headcni", "gather_facts": False, "tasks": tasks}]))
    first, second = (measured(playbook, FEW, count_calls=True).calls for _ in range(2))
    assert first == second > 0


def test_the_options_of_a_role_do_not_read_everyones_variables_for_each_host(tmp_path):
    """Ansible checks a role's options once for each host."""
    playbook = tmp_path / "play.yml"
    play = {"hosts": "headcni", "gather_facts": False, "roles": ["headcni.mesh.headscale_routes"]}
    playbook.write_text(json.dumps([play]))
    for name, task in measured(playbook, FEW).tasks.items():
        assert task["reads"] == 0 or task["run_once"], name


def test_kubernetes_and_headscale_are_asked_once_for_all_hosts_when_they_leave():
    _few, many = costs("uninstall", **IN_KUBERNETES)
    hosts = {name.rpartition(" : ")[2]: task["hosts"] for name, task in many.tasks.items()}
    for once in (
        "Withdraw the approval of the nodes' routes",
        "Remove the nodes from Headscale",
        "Remove the daemons' identities from Kubernetes",
    ):
        assert hosts[once] == 1
