"""The pool as data: what may be handed out, and in which order."""

from __future__ import annotations

import random
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headcni.ipam import pool
from headcni.model import Range
from tests.unit.cni.ipam_support import ipam_config

points = st.integers(0, 60)
spans = st.tuples(points, points).map(lambda pair: (min(pair), max(pair)))


class ListedSpace:
    """Free space that is searched the slow and obvious way."""

    def __init__(self, free: set[int]) -> None:
        self.intervals = pool.without([(0, 100)], sorted(set(range(101)) - free))

    def at_or_after(self, point: int) -> tuple[int, int] | None:
        return next((span for span in self.intervals if span[1] >= point), None)


def members(intervals: list[tuple[int, int]]) -> list[int]:
    return [point for first, last in intervals for point in range(first, last + 1)]


def handed_out(**section: str) -> list[str]:
    """All that the one range of a small subnet can give."""
    range_ = ipam_config(**section).range_sets[0][0]
    width = range_.subnet.max_prefixlen // 8
    return [str(ip_address(n.to_bytes(width, "big"))) for n in members(pool.usable(range_))]


@given(spans, st.lists(spans, max_size=8))
def test_cutting_holes_leaves_exactly_the_points_outside_of_them(whole, holes):
    left = pool.cut(whole, holes)
    expected = [
        point
        for point in range(whole[0], whole[1] + 1)
        if not any(first <= point <= last for first, last in holes)
    ]
    assert members(left) == expected
    assert all(last + 1 < first for (_, last), (first, _) in zip(left, left[1:]))


@given(st.lists(spans, max_size=6), st.sets(points))
def test_taking_points_out_of_intervals_leaves_exactly_the_others(holes, taken):
    intervals = pool.cut((0, 60), holes)
    left = pool.without(intervals, sorted(taken))
    assert members(left) == [point for point in members(intervals) if point not in taken]
    assert pool.size(left) == len(members(left))


@given(st.sets(st.integers(10, 90)), st.one_of(st.none(), st.integers(10, 90)))
def test_sequential_takes_the_next_free_one_after_the_last_and_wraps(free, last):
    chosen = pool.sequential(ListedSpace(free), (10, 90), last, random.randrange)
    above = [point for point in free if last is None or point > last]
    assert chosen == (min(above) if above else min(free, default=None))


@given(st.sets(st.integers(10, 90)), st.one_of(st.none(), st.integers(10, 90)))
def test_dense_pack_takes_the_lowest_free_one(free, last):
    chosen = pool.dense_pack(ListedSpace(free), (10, 90), last, random.randrange)
    assert chosen == min(free, default=None)


@given(st.sets(st.integers(10, 90)), st.randoms(use_true_random=False))
def test_random_takes_a_free_one_whenever_there_is_any(free, source):
    chosen = pool.scattered(ListedSpace(free), (10, 90), None, source.randrange)
    assert (chosen in free) if free else chosen is None


def test_random_spreads_evenly_over_what_is_free():
    source = random.Random(7)
    free = set(range(10, 30)) | {50} | set(range(70, 90))
    seen = dict.fromkeys(free, 0)
    for _ in range(20_000):
        seen[pool.scattered(ListedSpace(free), (10, 90), None, source.randrange)] += 1
    fair = 20_000 / len(free)
    assert all(0.7 * fair < count < 1.3 * fair for count in seen.values()), seen


def test_random_by_default_draws_from_the_kernel():
    drawn = {pool.system_below(1 << 64) for _ in range(8)}
    assert len(drawn) == 8
    assert all(0 <= pool.system_below(3) < 3 for _ in range(50))


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"subnet": "10.1.2.0/29"}, [f"10.1.2.{n}" for n in range(2, 7)]),
        (
            {"subnet": "10.1.2.0/29", "gateway": "10.1.2.4"},
            [f"10.1.2.{n}" for n in (1, 2, 3, 5, 6)],
        ),
        ({"subnet": "10.1.2.0/29", "gateway": "192.0.2.1"}, [f"10.1.2.{n}" for n in range(1, 7)]),
        ({"subnet": "10.1.2.0/30"}, ["10.1.2.2"]),
        (
            {"subnet": "10.1.2.0/28", "rangeStart": "10.1.2.0", "rangeEnd": "10.1.2.3"},
            ["10.1.2.2", "10.1.2.3"],
        ),
        (
            {"subnet": "10.1.0.0/16", "rangeStart": "10.1.2.255", "rangeEnd": "10.1.3.0"},
            ["10.1.2.255", "10.1.3.0"],
        ),
        (
            {"subnet": "10.1.2.0/29", "exclude": ["10.1.2.3", "10.1.2.4/31", "10.9.0.0/16"]},
            ["10.1.2.2", "10.1.2.6"],
        ),
        ({"subnet": "10.1.2.0/31"}, ["10.1.2.1"]),
        ({"subnet": "10.1.2.0/31", "gateway": "169.254.1.1"}, ["10.1.2.0", "10.1.2.1"]),
        ({"subnet": "10.1.2.7/32"}, ["10.1.2.7"]),
        ({"subnet": "fd00::/125"}, [f"fd00::{n}" for n in range(2, 8)]),
        ({"subnet": "fd00::/125", "gateway": "fe80::1"}, [f"fd00::{n}" for n in range(1, 8)]),
        ({"subnet": "fd00::/127"}, ["fd00::1"]),
        ({"subnet": "fd00::9/128"}, ["fd00::9"]),
        ({"subnet": "fd00::/125", "exclude": ["fd00::3-fd00::6"]}, ["fd00::2", "fd00::7"]),
    ],
    ids=str,
)
def test_network_broadcast_gateway_and_exclusions_are_never_handed_out(section, expected):
    assert handed_out(**section) == expected


def test_the_gateway_of_one_range_is_not_handed_out_by_another():
    config = ipam_config(
        ranges=[
            [
                {"subnet": "10.1.2.0/24", "rangeStart": "10.1.2.10", "rangeEnd": "10.1.2.12"},
                {
                    "subnet": "10.1.2.0/24",
                    "rangeStart": "10.1.2.20",
                    "rangeEnd": "10.1.2.22",
                    "gateway": "10.1.2.11",
                },
            ]
        ]
    )
    first = config.range_sets[0][0]
    assert len(members(pool.usable(first, pool.gateways(config.range_sets)))) == 2


@settings(max_examples=50)
@given(st.integers(20, 32), st.integers(0, 2**32 - 1))
def test_an_ipv4_subnet_has_as_many_addresses_as_arithmetic_says(prefixlen, number):
    subnet = ip_network((number, prefixlen), strict=False)
    range_ = Range(subnet, subnet[0], subnet[-1], None)
    reserved = 2 if prefixlen <= 30 else 0
    assert pool.size(pool.usable(range_)) == subnet.num_addresses - reserved


def test_a_slash_64_is_one_interval_less_the_anycast_address_and_the_gateway():
    range_ = ipam_config(subnet="fd00:1:2:3::/64").range_sets[0][0]
    (span,) = pool.usable(range_)
    assert pool.size([span]) == 2**64 - 2


def test_the_same_ranges_read_the_same_and_others_differently():
    same = [pool.describe(ipam_config(subnet="10.1.2.0/24").range_sets) for _ in range(2)]
    other = [
        ipam_config(subnet="10.1.2.0/25"),
        ipam_config(subnet="10.1.2.0/24", gateway="10.1.2.9"),
        ipam_config(subnet="10.1.2.0/24", rangeStart="10.1.2.9"),
        ipam_config(subnet="10.1.2.0/24", exclude=["10.1.2.9"]),
        ipam_config(subnet="10.1.2.0/24", ranges=[[{"subnet": "fd00::/64"}]]),
    ]
    assert same[0] == same[1]
    assert len({same[0], *(pool.describe(config.range_sets) for config in other)}) == 6
