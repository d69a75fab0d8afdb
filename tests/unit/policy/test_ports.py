"""Ports without overlaps, and blocks as ranges."""

from __future__ import annotations

import random
from ipaddress import ip_address, ip_network

import pytest

from headcni.policy.blocks import ranges
from headcni.policy.objects import Block
from headcni.policy.ports import Allowed, Span, spans

TCP, UDP = 6, 17


def test_overlapping_rules_become_spans():
    found = spans([Allowed("a", TCP, 80, 80), Allowed("b", TCP, 1, 1024), Allowed("a", UDP, 5, 6)])
    both, b = frozenset("ab"), frozenset("b")
    assert found == {
        TCP: (Span(1, 79, b), Span(80, 80, both), Span(81, 1024, b)),
        UDP: (Span(5, 6, frozenset("a")),),
    }


def test_neighbours_with_the_same_sources_are_one_span():
    assert spans([Allowed("a", TCP, 1, 5), Allowed("a", TCP, 6, 9), Allowed("a", TCP, 3, 7)]) == {
        TCP: (Span(1, 9, frozenset("a")),)
    }


@pytest.mark.parametrize("seed", range(20))
def test_spans_say_the_same_as_the_rules(seed):
    pick = random.Random(seed)
    allowed = []
    for _unused in range(pick.randint(1, 12)):
        first = pick.randint(0, 40)
        allowed.append(Allowed(pick.choice("abcd"), TCP, first, pick.randint(first, 45)))
    found = spans(allowed)[TCP]
    for port in range(50):
        expected = {one.source for one in allowed if one.first <= port <= one.last}
        holding = [one for one in found if one.first <= port <= one.last]
        assert len(holding) == bool(expected)
        assert not expected or holding[0].sources == expected


@pytest.mark.parametrize("seed", range(20))
def test_ranges_contain_what_the_blocks_contain(seed):
    pick = random.Random(seed)
    blocks = []
    for _unused in range(pick.randint(1, 5)):
        network = ip_network((0x0A000000 + pick.randrange(256), pick.randint(24, 32)), strict=False)
        inside = [one for one in (25, 28, 31) if one > network.prefixlen]
        without = tuple(
            ip_network((int(network[0]) + pick.randrange(network.num_addresses), one), strict=False)
            for one in inside
            if pick.random() < 0.6
        )
        blocks.append(Block(network, without))
    found = ranges(blocks, 4)
    assert list(found) == sorted(found)
    for number in range(0x0A000000, 0x0A000000 + 256):
        address = ip_address(number)
        holding = [one for one in found if one[0] <= address.packed <= one[1]]
        assert len(holding) == any(block.contains(address) for block in blocks), address


def test_each_ip_version_has_its_own_ranges():
    blocks = [Block(ip_network("::/0"), (ip_network("fd00::/8"),)), Block(ip_network("10.0.0.0/8"))]
    assert len(ranges(blocks, 4)) == 1
    assert len(ranges(blocks, 6)) == 2
    assert ranges([Block(ip_network("0.0.0.0/0"))], 4) == ((bytes(4), b"\xff" * 4),)
