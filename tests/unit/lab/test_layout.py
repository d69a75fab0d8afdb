"""Who has which place in a lab."""

from __future__ import annotations

import ipaddress
from dataclasses import replace

from lab import image
from lab.layout import MOST_NODES, MOST_VMS, Plan, node_names, vm_names

PLAN = Plan(
    ipaddress.IPv4Network("172.30.0.0/24"),
    ipaddress.IPv6Network("fd00::/64"),
    ("node1",),
    "1.2.3",
    vms=("vm1", "vm2"),
    dual_stack=True,
)


def test_nobody_moves_when_the_lab_grows():
    grown = replace(PLAN, nodes=tuple(node_names(3)), vms=tuple(vm_names(4)))
    for machine in PLAN.machines:
        assert grown.address(machine) == PLAN.address(machine)
        assert grown.address6(machine) == PLAN.address6(machine)


def test_the_largest_lab_has_an_address_for_everybody():
    most = replace(PLAN, nodes=tuple(node_names(MOST_NODES)), vms=tuple(vm_names(MOST_VMS)))
    taken = {most.address(machine) for machine in most.machines} | {most.gateway, most.host}
    assert len(taken) == MOST_NODES + MOST_VMS + 3
    assert max(taken) < PLAN.underlay.broadcast_address


def test_a_plan_is_read_as_it_was_written(tmp_path):
    class Place:
        plan_file = tmp_path / "plan.json"

    PLAN.save(Place.plan_file)
    assert Plan.load(Place) == PLAN  # type: ignore[arg-type]


def test_virtual_machines_take_turns_with_debian_12_and_13():
    suites = [image.of(machine).suite for machine in ("node1", "vm1", "vm2", "vm3")]
    assert suites == ["bookworm", "bookworm", "trixie", "bookworm"]
    assert len({image.of(machine).root for machine in ("node1", "vm1", "vm2")}) == 3
