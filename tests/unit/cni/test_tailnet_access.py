"""What pods may reach of the tailnet: how it is read, kept and turned into rules."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest

from headcni import tailnet_access
from headcni.datapath import ruleset, tailnet
from headcni.tailnet_access import ALL, OPEN, PODS, Policy, WrongAccess, parse

POD, POD6 = ip_address("10.1.0.7"), ip_address("fd00::7")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("all", ALL),
        (" pods ", PODS),
        ([], PODS),
        (["100.64.0.7"], "100.64.0.7"),
        (["100.64.0.7/32"], "100.64.0.7"),
        (["100.64.0.0/24:443"], "100.64.0.0/24:443"),
        (["100.64.0.7:53/udp"], "100.64.0.7:53/udp"),
        (["100.64.0.7:8000-8100/tcp"], "100.64.0.7:8000-8100/tcp"),
        (["[fd7a:115c:a1e0::7]:443"], "[fd7a:115c:a1e0::7]:443"),
        (["[FD7A:115C:A1E0:0::/64]:443"], "[fd7a:115c:a1e0::/64]:443"),
        (["fd7a:115c:a1e0::/64"], "fd7a:115c:a1e0::/64"),
        (["[fd7a:115c:a1e0::7]"], "fd7a:115c:a1e0::7"),
        ("100.64.0.8, 100.64.0.7,100.64.0.8", "100.64.0.7,100.64.0.8"),
        (["fd7a:115c:a1e0::7", "100.64.0.7"], "100.64.0.7,fd7a:115c:a1e0::7"),
    ],
)
def test_what_is_understood_has_one_form_that_can_be_read_again(given, kept):
    assert parse(given) == kept
    assert parse(kept) == kept


@pytest.mark.parametrize(
    ("given", "at", "expected"),
    [
        ("", -1, "all, pods, or a list"),
        (True, -1, "all, pods, or a list"),
        ({"a": 1}, -1, "all, pods, or a list"),
        ("none", 0, "an address or a range"),
        (["100.64.0.7", "100.64.0.300"], 1, "an address or a range"),
        (["100.64.0.7:"], 0, "an address or a range"),
        (["100.64.0.7:0"], 0, "a port from 1 to 65535"),
        (["100.64.0.7:65536"], 0, "a port from 1 to 65535"),
        (["100.64.0.7:90-80"], 0, "a port from 1 to 65535"),
        (["100.64.0.7:53/icmp"], 0, "an address or a range"),
        (["fd7a:115c:a1e0::7%eth0"], 0, "an address or a range"),
        (["web.example.com:443"], 0, "an address or a range"),
        ([7], 0, "an address or a range"),
        ([["100.64.0.7"]], 0, "an address or a range"),
        (["100.64.0.1/24:443"], 0, "the network itself: 100.64.0.0/24:443"),
        (["[fd7a:115c:a1e0::7/64]:443"], 0, "the network itself: [fd7a:115c:a1e0::/64]:443"),
        (["100.64.0.7", "all"], 1, "all stands alone"),
        ("pods,100.64.0.7", 0, "pods stands alone"),
        (["1" * 65], 0, "an address or a range"),
        (["100.64.0.7"] * 65, -1, "at most 64 entries; this has 65"),
        ("100.64.0.7," * 400, -1, "at most 4096 characters"),
    ],
)
def test_what_is_wrong_is_told_with_its_place_and_what_is_right(given, at, expected):
    with pytest.raises(WrongAccess) as raised:
        parse(given)
    assert expected in str(raised.value)
    assert raised.value.at == at
    assert len(str(raised.value)) < 300


def test_without_limits_there_is_nothing_in_the_table_and_nothing_in_the_store():
    for policy in (OPEN, Policy(ALL, (("shop", ALL),))):
        assert policy.is_open and policy.as_text() == ""
        assert tailnet.chains(policy) == "" and tailnet.set_names(policy) == []
        assert ruleset.digest((), policy) == ruleset.digest((), OPEN)


def test_a_policy_is_read_as_it_was_kept():
    policy = tailnet_access.policy(
        PODS, {"shop": ALL}, {"bank": "100.64.0.7:443"}, ["ts7"], [ip_network("10.244.0.0/16")]
    )
    assert tailnet_access.from_text(policy.as_text()) == policy
    assert policy.links == ("ts7",)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"accesses": ["nonsense"], "namespaces": {}}'])
def test_a_policy_that_cannot_be_read_opens_nothing(text):
    assert tailnet_access.from_text(text) == Policy(PODS)


def test_of_too_many_lists_the_last_are_taken_for_pods():
    given = {f"n{number:03}": f"100.64.0.0/24:{1000 + number}" for number in range(70)}
    kept = dict(tailnet_access.policy(ALL, given, {}).namespaces)
    assert sum(access == PODS for access in kept.values()) == 6
    assert kept["n000"] == given["n000"] and kept["n069"] == PODS


def test_only_pods_that_differ_from_their_range_are_elements():
    policy = Policy(PODS, (("shop", ALL), ("bank", PODS)))
    ranges = [ip_network("10.1.0.0/24"), ip_network("fd00::/64")]
    pods = [("other", POD), ("bank", POD), ("shop", POD6), ("other", ip_address("10.9.0.1"))]
    assert tailnet.members(policy, ranges, pods) == {
        "tailnet_all_6": (POD6,),
        "tailnet_pods_4": (ip_address("10.9.0.1"),),
    }
    unlimited = Policy(ALL, (("shop", PODS),))
    assert tailnet.members(unlimited, ranges, [("other", POD), ("shop", POD)]) == {
        "tailnet_pods_4": (POD,)
    }
