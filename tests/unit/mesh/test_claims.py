"""Which claims are accepted, as data: what no small tailnet shows."""

from __future__ import annotations

import time
from ipaddress import ip_network

import pytest

from headcni.mesh.claims import MOST_ALARMS, MOST_BLOCKED, Plan, Rules, hear, plan, rules_of
from headcni.mesh.localapi import Peer, Status
from headcni.mesh.prefix import Prefix

TAG = "tag:headcni"
CLUSTER = (ip_network("10.0.0.0/8"), ip_network("fd44::/32"))
OWN = (ip_network("10.1.0.0/24"), ip_network("fd44:0:1::/64"))


def rules(**how: object) -> Rules:
    return rules_of(CLUSTER, OWN, **{"tags": (TAG,), **how})


def peer(name: str, *routes: str, **how: object) -> Peer:
    return Peer(name, name, routes, (), True, False, tags=(TAG,))._replace(**how)


def planned(*peers: Peer, given: Rules | None = None, before=(), have=()) -> Plan:
    """By what two passes saw, one after the other."""
    given = given or rules()
    first = hear(status(*before), given, {})
    heard = hear(status(*peers), given, first.claims)
    return plan(heard, given, [Prefix.parse(one) for one in have])


def status(*peers: Peer) -> Status:
    return Status("1.102.5", "Running", "here", (), (), (), peers, tags=(TAG,))


def shown(prefixes) -> set[str]:
    return set(map(str, prefixes))


@pytest.mark.parametrize("claimed", ["10.2.0.0/23", "10.2.0.0/25", "10.2.0.9/32", "fd44:0:2::/63"])
def test_even_a_node_may_only_have_a_range_of_a_nodes_length(claimed):
    found = planned(peer("node", claimed, "10.3.0.0/24"))
    assert shown(found.wanted) == {"10.3.0.0/24"}
    assert [one.reason for one in found.refusals] == ["prefix-length"]
    assert "but a node's range is a /" in found.warnings[0].message


SEVERAL = {"sizes": ((4, 24), (4, 25))}


@pytest.mark.parametrize(("have", "wins"), [("10.2.0.0/24", "old"), ("10.2.0.0/25", "new")])
def test_of_two_lengths_that_are_allowed_the_range_with_a_route_wins(have, wins):
    peers = peer("old", "10.2.0.0/24"), peer("new", "10.2.0.0/25")
    found = planned(*peers, given=rules(**SEVERAL), have=[have])
    assert shown(found.wanted) == {have}
    (refusal,) = found.refusals
    assert refusal.reason == "overlap"
    assert refusal.peer == {"old": "new", "new": "old"}[wins]
    assert wins in refusal.other


def test_without_a_route_the_one_that_headscale_names_as_primary_wins_else_the_larger():
    large, small = peer("large", "10.2.0.0/24"), peer("small", "10.2.0.128/25")
    found = planned(large, small, given=rules(**SEVERAL))
    assert shown(found.wanted) == {"10.2.0.0/24"}
    assert shown(found.blocked) == {"10.2.0.128/25"}
    found = planned(large, small._replace(primary=small.routes), given=rules(**SEVERAL))
    assert shown(found.wanted) == {"10.2.0.128/25"}


def test_an_offline_nodes_range_wins_over_a_nodes_part_of_it_but_not_over_the_same():
    away = peer("away", online=False)
    known = peer("away", "10.2.0.0/24")
    part = peer("new", "10.2.0.0/25")
    found = planned(away, part, before=[known], given=rules(**SEVERAL), have=["10.2.0.0/24"])
    assert shown(found.wanted) == {"10.2.0.0/24"}
    assert shown(found.blocked) == {"10.2.0.0/25"}
    found = planned(away, peer("new", "10.2.0.0/24"), before=[known])
    assert shown(found.wanted) == {"10.2.0.0/24"}
    assert (found.refusals, found.alarms, found.blocked) == ((), (), frozenset())


def test_a_node_that_lost_its_tag_while_it_is_offline_loses_its_routes():
    known = peer("away", "10.2.0.0/24")
    assert not planned(known._replace(routes=(), online=False, tags=()), before=[known]).wanted


def test_two_nodes_with_one_range_keep_one_route_and_raise_an_alarm():
    found = planned(peer("a", "10.2.0.0/24"), peer("b", "10.2.0.0/24"), peer("c", "10.2.0.0/24"))
    assert shown(found.wanted) == {"10.2.0.0/24"}
    (alarm,) = found.alarms
    assert (alarm.claimants, alarm.holds_back) == (("a", "b", "c"), False)
    assert "a serves 10.2.0.0/24, and b serves 10.2.0.0/24 and 1 more" in alarm.message


@pytest.mark.parametrize("route", ["10.2.0.5/24", "fd44:0:2::5/64"])
def test_host_bits_do_not_make_another_range_of_it(route):
    masked = str(ip_network(route, strict=False))
    found = planned(peer("a", route), peer("b", masked))
    assert shown(found.wanted) == {masked}
    assert len(found.alarms) == 1


@pytest.mark.parametrize("route", ["10.2.0.0/33", "fd44::/129", "nonsense", "10.2.0.0/-1", "/24"])
def test_what_is_no_prefix_is_passed_over(route):
    found = planned(peer("a", route, "10.3.0.0/24"))
    assert shown(found.wanted) == {"10.3.0.0/24"}


@pytest.mark.parametrize("tagged", [True, False])
def test_only_a_node_that_serves_our_very_own_range_holds_us_back(tagged):
    tags = (TAG,) if tagged else ()
    for route, held in (("10.1.0.0/24", tagged), ("10.1.0.0/25", False), ("10.0.0.0/15", False)):
        found = planned(peer("thief", route, tags=tags))
        assert any(alarm.holds_back for alarm in found.alarms) == held
        assert not any(alarm.holds_back for alarm in found.warnings)
        assert found.refusals
    found = planned(peer("thief", "10.1.0.0/25", "10.1.0.0/24", tags=tags))
    assert (found.alarms or found.warnings)[0].prefix == "10.1.0.0/24"


def test_where_no_tag_is_asked_for_nobody_can_hold_us_back():
    found = planned(peer("thief", "10.1.0.0/24", tags=()), given=rules(tags=()))
    assert [alarm.holds_back for alarm in found.alarms] == [False]
    assert found.warnings == ()


def test_one_of_several_tags_is_enough():
    given = rules(tags=(TAG, "tag:edge"))
    found = planned(peer("edge", "10.2.0.0/24", tags=("tag:edge", "tag:x")), given=given)
    assert shown(found.wanted) == {"10.2.0.0/24"}


def test_the_service_range_may_lie_in_the_cluster_range_and_is_kept_free():
    given = rules(service=(ip_network("10.96.0.0/16"), ip_network("fd00:96::/112")))
    found = planned(peer("a", "10.96.7.0/24", "fd00:96::/120", "0.0.0.0/0", "::/0"), given=given)
    assert [one.reason for one in found.refusals] == ["service-range"] * 2
    assert not found.wanted


def test_a_node_that_offers_all_services_to_the_tailnet_is_no_problem_and_gets_no_route():
    given = rules(service=(ip_network("10.96.0.0/16"),))
    found = planned(peer("a", "10.96.0.0/16"), given=given)
    assert found.refusals == () and not found.wanted and found.warnings == ()
    found = planned(peer("thief", "10.96.0.0/16", tags=()), given=given)
    assert [one.reason for one in found.refusals] == ["untagged"]


def test_a_flood_of_claims_makes_few_alarms_and_a_bounded_number_of_routes():
    nodes = [peer(f"node{i}", f"10.2.{i}.0/24") for i in range(40)]
    flood = [f"10.2.{i % 40}.{i // 40 % 256}/32" for i in range(40 * 256)]
    greedy = peer("greedy", *flood, tags=())
    others = [peer(f"other{i}", f"10.2.1.{i}/32", tags=()) for i in range(MOST_ALARMS + 9)]
    found = planned(*nodes, greedy, *others)
    assert len(found.wanted) == 40
    assert len(found.blocked) == MOST_BLOCKED
    assert len(found.warnings) == MOST_ALARMS + 1
    assert found.warnings[-1].message.startswith("10 more of this kind")
    assert f"and {len(flood) - 1} more" in found.warnings[0].message
    assert max(len(alarm.message) for alarm in found.warnings) < 400


def test_the_time_for_a_plan_grows_with_the_number_of_peers_and_not_with_its_square():
    def seconds(count: int) -> float:
        peers = [peer(f"n{i}", f"10.{100 + i // 256}.{i % 256}.0/24") for i in range(count)]
        # Each has a part of another's range as well, so there is something to refuse for each.
        peers += [
            peer(f"x{i}", f"10.{100 + i // 256}.{i % 256}.9/32", tags=()) for i in range(count)
        ]
        given = rules_of(CLUSTER, OWN, (), ((4, 24), (4, 25)), (TAG,))
        took = []
        for _ in range(3):
            heard = hear(status(*peers), given, {})
            began = time.process_time()
            found = plan(heard, given)
            took.append(time.process_time() - began)
            assert len(found.blocked) == min(count, MOST_BLOCKED)
        return min(took)

    small, large = seconds(500), seconds(4000)
    assert large < 8 * small * 3, f"500 peers: {small:.3f} s, 4,000: {large:.3f} s"
