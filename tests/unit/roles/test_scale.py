"""With more hosts, no task of a playbook may cost each host more.

What costs the controller most is another host's variables: a millisecond for each look. So these
are counted, in runs of the real playbooks without nodes. No clock is involved.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from controller_cost import Cost, measured

FEW, MANY = 3, 6
IN_KUBERNETES = {"headcni_node_kubernetes_server": "node1"}
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
        "Take the approval back",
        "Remove the identity",
        "Take the daemons' identities at Kubernetes back",
    ):
        assert hosts[once] == 1
