"""Former names of variables work with a warning; contradictions stop a run."""

from __future__ import annotations

import pytest
from ansible.utils.display import Display
from ansible_collections.headcni.mesh.plugins.filter.variable_names import variable_names
from ansible_collections.headcni.mesh.plugins.plugin_utils.former_names import FORMER

GROUPS = {"all": ["a", "b"], "headcni": ["a", "b"], "rack1": ["a"]}


@pytest.fixture(autouse=True)
def told(monkeypatch):
    found: list[str] = []
    monkeypatch.setattr(
        Display, "deprecated", lambda self, msg, version, **_: found.append(f"{version}: {msg}")
    )
    return found


def look(told, **variables):
    return variable_names(["a", "b"], {"a": variables, "b": {}}, GROUPS)


def test_the_names_of_today_cause_nothing(told):
    found = look(told, headcni_headscale_url="https://h", headcni_mode="daemon")
    assert (found, told) == ({"problems": [], "former": []}, [])


@pytest.mark.parametrize("name", FORMER)
def test_each_former_name_is_told_with_the_name_that_it_has_now(told, name):
    found = look(told, **{name: "host"})
    assert found == {"problems": [], "former": [name]}
    assert told == [f"0.3.0: {name} (set for a) is now {FORMER[name]}"]


def test_two_names_that_disagree_about_the_mode_are_a_problem(told):
    found = look(told, headcni_mode="host", headcni_node_mode="daemon")
    assert found["problems"] == [
        "a: headcni_mode is host, and its former name headcni_node_mode is daemon: "
        "remove headcni_node_mode"
    ]


def test_a_mode_that_does_not_exist_is_a_problem(told):
    assert look(told, headcni_mode="hots")["problems"] == [
        "a: headcni_mode: hots, expected host or daemon"
    ]


def test_many_hosts_with_the_same_mistake_are_one_problem(told):
    hosts = [f"n{number}" for number in range(1, 1001)]
    wrong = {host: {"headcni_mode": "x", "headcni_node_magic_dns_domain": "d"} for host in hosts}
    found = variable_names(hosts, wrong, {"all": hosts, "headcni": hosts})
    assert found["problems"] == [
        "n1, n2, n3, n4, n5, n6, n7, n8 and 992 more: headcni_mode: x, expected host or daemon"
    ]
    assert len(told) == 1


def test_a_pattern_that_comes_too_late_is_a_problem(told):
    (problem,) = look(told, headcni_hosts="rack1")["problems"]
    assert problem.startswith("headcni_hosts: rack1, in the inventory, has no effect")
    assert look(told, headcni_hosts="headcni")["problems"] == []
