"""Which routes are to be approved for which node, and which are refused."""

from __future__ import annotations

import time
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest
from ansible_collections.headcni.mesh.plugins.module_utils import route_plan
from ansible_collections.headcni.mesh.plugins.module_utils.headscale import HeadscaleError
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_objects import Node
from ansible_collections.headcni.mesh.plugins.module_utils.route_plan import (
    Plan,
    Wanted,
    by_label,
    refuse,
    told,
    unserved,
)
from hypothesis import given
from hypothesis import strategies as st


def node(number: int, *approved: str, **more: Any) -> Node:
    return Node(
        **{
            "id": str(number),
            "key": f"nodekey:{number:064}",
            "name": f"node{number}",
            "hostname": f"node{number}",
            "approved": approved,
            "online": True,
            **more,
        }
    )


def wants(number: int, *routes: str, **more: Any) -> dict[str, Any]:
    return {"name": f"node{number}", "routes": routes, **more}


def parse(nodes: Any) -> list[Wanted]:
    """With no mistake in it."""
    wanted, mistakes = route_plan.parse(nodes)
    refuse(mistakes)
    return wanted


def plan(held: list[Node], wanted: list[Wanted], **how: Any) -> Plan:
    """In which no node is refused."""
    made = route_plan.plan(held, wanted, **how)
    refuse(made.problems)
    return made


def planned(held: list[Node], *wanted: dict[str, Any], **how: Any) -> dict[str, tuple[str, ...]]:
    return {a.wanted.label: a.after for a in plan(held, parse(wanted), **how).approvals}


def test_other_routes_of_the_node_stay():
    held = [node(1, "192.168.7.0/24", "0.0.0.0/0", "::/0"), node(2)]
    assert planned(held, wants(1, "10.244.1.0/24")) == {
        "node1": ("0.0.0.0/0", "10.244.1.0/24", "192.168.7.0/24", "::/0")
    }


def test_purge_takes_back_the_others_and_absent_only_the_named():
    held = [node(1, "10.244.1.0/24", "192.168.7.0/24")]
    assert planned(held, wants(1, "10.244.1.0/24"), purge=True) == {"node1": ("10.244.1.0/24",)}
    assert planned(held, wants(1, "10.244.1.0/24"), absent=True) == {"node1": ("192.168.7.0/24",)}


def test_what_is_approved_changes_nothing_however_it_is_spelled():
    held = [node(1, "fd44:0:0:1::/64", "10.244.1.0/24")]
    (approval,) = plan(held, parse([wants(1, "10.244.1.0/24", "FD44::1:0:0:0:0/64")])).approvals
    assert not approval.changed


@pytest.mark.parametrize(
    ("held", "wanted", "said"),
    [
        ([], [wants(1, "10.1.0.0/16"), wants(2, "10.1.0.0/16")], "10.1.0.0/16 for node"),
        ([], [wants(1, "10.1.0.0/16"), wants(2, "10.1.2.0/24")], "10.1.2.0/24 for node2 overlaps "),
        ([], [wants(1, "fd44::/48"), wants(2, "fd44:0:0:2::/64")], "of node1"),
        ([node(3, "10.1.2.0/24")], [wants(1, "10.1.0.0/16")], r"of node node3 \(id 3\), online"),
        ([node(3, "10.1.0.0/16")], [wants(1, "10.1.2.0/24")], "of node node3"),
        ([node(3, served=("10.1.0.0/16",))], [wants(1, "10.1.2.0/24")], "of node node3"),
        ([node(3, "10.1.2.3/16")], [wants(1, "10.1.2.0/24")], "overlaps 10.1.2.3/16 of node node3"),
        ([node(3, "10.1.0.0/16", online=False)], [wants(1, "10.1.0.0/16")], "offline"),
    ],
)
def test_a_range_of_another_node_is_refused(held, wanted, said):
    with pytest.raises(HeadscaleError, match=said) as raised:
        plan([node(1), node(2), *held], parse(wanted))
    assert "headscale_node state=absent" in str(raised.value)


def test_a_range_that_a_node_of_the_call_holds_already_is_refused_unless_purged():
    held = [node(1, "10.1.0.0/16"), node(2)]
    wanted = parse([wants(1), wants(2, "10.1.0.0/16")])
    with pytest.raises(HeadscaleError, match=r"for node2 overlaps 10.1.0.0/16 of node1"):
        plan(held, wanted)
    assert plan(held, wanted, purge=True).approvals[1].after == ("10.1.0.0/16",)


@pytest.mark.parametrize("name", ["node1", "1", f"nodekey:{1:064}"])
def test_two_identities_of_one_machine_may_share_a_range(name):
    held = [node(1, "10.1.0.0/16"), node(2)]
    assert planned(held, wants(2, "10.1.0.0/16", same_machine_as=[name])) == {
        "node2": ("10.1.0.0/16",)
    }
    both = [wants(1, "10.1.0.0/16"), wants(2, "10.1.0.0/16", same_machine_as=[name])]
    assert len(planned([node(1), node(2)], *both)) == 2


def test_a_third_node_is_still_refused_what_two_identities_share():
    held = [node(1, "10.1.0.0/16"), node(2), node(3)]
    wanted = [wants(2, "10.1.0.0/16", same_machine_as=["node1"]), wants(3, "10.1.5.0/24")]
    with pytest.raises(HeadscaleError, match="for node3 overlaps"):
        plan(held, parse(wanted))


def test_a_former_identity_that_is_no_more_is_passed_over():
    assert planned([node(2)], wants(2, "10.1.0.0/16", same_machine_as=["gone"]))


def test_exit_nodes_and_ranges_that_others_share_are_no_affair_of_ours():
    held = [node(1), node(2, "0.0.0.0/0", "::/0"), node(3, "10.9.0.0/16"), node(4, "10.9.0.0/16")]
    assert planned(held, wants(1, "10.1.0.0/16")) == {"node1": ("10.1.0.0/16",)}


def test_a_nodes_own_ranges_may_be_within_one_another():
    assert planned([node(1)], wants(1, "10.1.0.0/16", "10.1.2.0/24"))


def test_all_nodes_that_are_not_there_are_named_at_once():
    wanted = [wants(1), wants(8), {"node_key": "nodekey:9", "label": "alpha", "routes": []}]
    with pytest.raises(
        HeadscaleError, match=r"know node8; .*know alpha \(node_key nodekey:9\); see "
    ):
        plan([node(1)], parse(wanted))


def test_in_check_mode_a_node_may_be_about_to_join_but_not_with_anothers_range():
    wanted = parse([wants(1, "10.1.0.0/16"), wants(8, "10.8.0.0/16")])
    found = plan([node(1)], wanted, may_miss=True)
    assert [one.label for one in found.coming] == ["node8"]
    with pytest.raises(HeadscaleError, match="overlaps"):
        plan([node(1, "10.8.0.0/16")], wanted, may_miss=True)


def test_a_node_that_is_gone_has_nothing_to_withdraw():
    assert plan([], parse([wants(8, "10.8.0.0/16")]), absent=True).approvals == ()


def test_a_name_that_several_have_is_refused_with_their_ids():
    held = [node(1), node(2, hostname="node1", online=False)]
    with pytest.raises(
        HeadscaleError, match=r"ambiguous: id 1 \(node1, online\), id 2 \(node2, offline\); give"
    ):
        plan(held, parse([wants(1, "10.1.0.0/16")]))


def test_one_node_by_two_names_is_refused():
    with pytest.raises(HeadscaleError, match="node1 and 1 are both node node1"):
        plan([node(1)], parse([wants(1), {"id": "1", "routes": []}]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "a", "routes": ["10.1.2.3/24"]}, r"host bits set: did you mean 10.1.2.0/24\?"),
        ({"name": "a", "routes": ["10.1.2.0"]}, r"no prefix length: did you mean 10.1.2.0/32\?"),
        ({"name": "a", "routes": ["10.1.2.0/33"]}, "expected a CIDR such as"),
        ({"name": "a", "routes": ["pods"]}, r"nodes\[0\].routes\[0\] \(a\): 'pods', expected"),
        ({"name": "a", "routes": ["0.0.0.0/0"]}, "exit node"),
        ({"name": "a", "routes": ["::/0"]}, "exit node"),
        ({"routes": []}, r"nodes\[0\] \(nodes\[0\]\): give one of node_key, id and name"),
        ({"label": "x", "node_key": "", "routes": []}, r"\(x\): give one of"),
        ({"name": "a", "id": "1", "routes": []}, "give one of"),
        ({"node_key": "mkey:1", "routes": []}, "expected nodekey: and 64 digits"),
    ],
)
def test_bad_input_is_named_with_its_place_and_what_was_meant(given, said):
    with pytest.raises(HeadscaleError, match=said):
        parse([given])


def test_a_label_stands_for_one_node():
    with pytest.raises(HeadscaleError, match=r"nodes\[1\] \(a\): named twice"):
        parse([wants(1, label="a"), wants(2, label="a")])


def test_every_mistake_is_named_at_once():
    with pytest.raises(HeadscaleError) as raised:
        parse([wants(1, "x", "10.0.0.1/8"), {"routes": ["y"]}])
    assert all(part in str(raised.value) for part in ("'x'", "'10.0.0.1/8'", "'y'", "give one of"))


def test_what_is_not_served_is_said_with_what_stands_in_its_way():
    held = [node(1, available=("10.1.0.0/16",)), node(2), node(3, online=False), node(4), node(5)]
    wanted = parse([wants(n, f"10.{n}.0.0/16") for n in (1, 2, 3, 4)])
    approvals = plan(held, wanted).approvals
    now = [
        replace(held[0], served=("10.1.0.0/16",)),
        held[1],
        held[2],
        replace(held[3], available=("10.4.0.0/16",)),
        replace(held[4], served=("10.4.0.0/16",)),
    ]
    assert [one.what for one in unserved(now, approvals)] == [
        "node2: 10.2.0.0/16 is not served: the node does not advertise it",
        "node3: 10.3.0.0/16 is not served: the node is offline",
        "node4: 10.4.0.0/16 is not served: node5 (id 5) serves it",
    ]
    assert "node1: the node is gone" in told(unserved(now[1:], approvals))


def test_a_range_that_the_other_identity_serves_is_served():
    held = [node(1, "10.1.0.0/16", served=("10.1.0.0/16",)), node(2)]
    approvals = plan(held, parse([wants(2, "10.1.0.0/16", same_machine_as=["node1"])])).approvals
    assert unserved(held, approvals) == []


def test_a_node_that_is_refused_does_not_keep_the_others_from_theirs():
    held = [node(1), node(2), node(3), node(9, "10.2.0.0/16", online=False)]
    wanted = parse([*(wants(n, f"10.{n}.0.0/16") for n in (1, 2, 3)), wants(8, "10.8.0.0/16")])
    made = route_plan.plan(held, wanted)
    assert [approval.wanted.label for approval in made.approvals] == ["node1", "node3"]
    found = by_label(made.problems)
    assert set(found) == {"node2", "node8"}
    assert (
        "10.2.0.0/16 for node2 overlaps 10.2.0.0/16 of node node9 (id 9), offline" in found["node2"]
    )
    assert "headscale_node state=absent" in found["node2"]
    assert found["node8"].startswith("Headscale does not know node8; see that it has joined")


def test_of_two_nodes_that_ask_for_one_range_neither_gets_it():
    held = [node(1), node(2), node(3)]
    wanted = parse([wants(1, "10.1.0.0/16"), wants(2, "10.1.2.0/24"), wants(3, "10.3.0.0/16")])
    made = route_plan.plan(held, wanted)
    assert [approval.wanted.label for approval in made.approvals] == ["node3"]
    assert set(by_label(made.problems)) == {"node1", "node2"}
    assert told(made.problems).count("overlaps") == 1


def test_nor_does_one_get_the_range_of_a_node_that_is_refused():
    """It was to give it up, and keeps it now."""
    held = [node(1, "10.1.0.0/16"), node(2), node(3), node(9, "10.9.0.0/16")]
    wanted = parse([wants(1, "10.9.0.0/16"), wants(2, "10.1.0.0/16"), wants(3, "10.3.0.0/16")])
    made = route_plan.plan(held, wanted, purge=True)
    assert [approval.wanted.label for approval in made.approvals] == ["node3"]
    assert "of node node1 (id 1), online" in by_label(made.problems)["node2"]


def test_in_check_mode_what_is_about_to_join_is_refused_by_itself_too():
    wanted = parse([wants(7, "10.7.0.0/16"), wants(8, "10.8.0.0/16")])
    made = route_plan.plan([node(1, "10.8.0.0/16")], wanted, may_miss=True)
    assert [one.label for one in made.coming] == ["node7"]
    assert set(by_label(made.problems)) == {"node8"}


def test_a_node_of_which_it_cannot_be_said_who_is_meant_is_refused_by_itself():
    held = [node(1), node(2, hostname="node1"), node(3), node(4)]
    wanted = [wants(1, "10.1.0.0/16"), wants(3), {"id": "3", "routes": []}, wants(4, "10.4.0.0/16")]
    made = route_plan.plan(held, parse(wanted))
    assert [approval.wanted.label for approval in made.approvals] == ["node4"]
    assert set(by_label(made.problems)) == {"node1", "node3", "3"}


def test_a_mistake_is_that_of_its_node_and_a_label_of_two_is_neithers():
    given = [wants(1, "10.1.0.0/16"), wants(2, "x"), wants(3, label="a"), wants(4, label="a")]
    wanted, mistakes = route_plan.parse(given)
    assert [one.label for one in wanted] == ["node1"]
    assert set(by_label(mistakes)) == {"node2", "a"}


cidrs = st.builds(
    lambda bits, length: str(ip_network((bits << 20, length), strict=False)),
    st.integers(0, (1 << 12) - 1),
    st.integers(1, 14),
)


@given(st.lists(st.tuples(st.integers(1, 4), cidrs), max_size=12))
def test_a_call_is_refused_just_if_two_nodes_ranges_overlap(pairs):
    of: dict[int, list[str]] = {}
    for number, cidr in pairs:
        of.setdefault(number, []).append(cidr)
    clash = any(ip_network(a).overlaps(ip_network(b)) for n, a in pairs for m, b in pairs if n != m)
    held = [node(number) for number in range(1, 5)]
    try:
        plan(held, parse([wants(number, *routes) for number, routes in of.items()]))
    except HeadscaleError:
        assert clash
    else:
        assert not clash


def test_five_thousand_nodes_are_planned_in_no_time():
    held = [node(n, f"10.{n >> 8}.{n & 255}.0/24") for n in range(5000)]
    wanted = parse([wants(n, f"10.{n >> 8}.{n & 255}.0/24") for n in range(0, 5000, 10)])
    began = time.monotonic()
    assert not any(a.changed for a in plan(held, wanted).approvals)
    took = time.monotonic() - began
    print(f"500 of 5,000 nodes: {took * 1000:.0f} ms")
    assert took < 5
