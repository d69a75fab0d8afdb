"""Who is checked, and what the BPF program that checks a pod does with frames."""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headcni.datapath import guard
from headcni.datapath.guard_program import (
    DROP,
    NEXT_FILTER,
    Identity,
    identity_in,
    loopback_program,
    program,
)
from headcni.model import PodRef

MAC = bytes.fromhex("0a580a370102")
OWN4, OWN6 = IPv4Address("10.55.1.2"), IPv6Address("fd55::2")
LINK_LOCAL = guard.link_local(MAC.hex(":"))
POD = Identity(MAC, (OWN4,), (OWN6, LINK_LOCAL))
# With so many addresses conditional jumps do not reach the end of the program.
MANY = Identity(
    MAC,
    (*(IPv4Address(f"10.55.2.{number}") for number in range(40)), OWN4),
    (*(IPv6Address(f"fd55:2::{number}") for number in range(40)), OWN6, LINK_LOCAL),
)


@pytest.mark.parametrize(
    ("exempt", "pod", "checked"),
    [
        ((), PodRef("a", "b"), True),
        (("a/b",), PodRef("a", "b"), False),
        (("a/*",), PodRef("a", "b"), False),
        (("a/*",), PodRef("aa", "b"), True),
        (("*/b?",), PodRef("a", "b1"), False),
        (("A/b",), PodRef("a", "b"), True),
        (("*/*",), PodRef(), True),  # nobody said which pod it is
    ],
)
def test_a_pod_is_checked_unless_the_network_exempts_it(exempt, pod, checked) -> None:
    assert guard.applies(True, exempt, pod) is checked
    assert guard.applies(False, exempt, pod) is False


def test_the_link_local_address_is_that_of_the_kernel() -> None:
    assert str(guard.link_local("0a:58:0a:37:01:02")) == "fe80::858:aff:fe37:102"


def run(instructions: bytes, frame: bytes, tagged: int = 0) -> int:
    """As the kernel does it, except that a read beyond the end of the frame is an error here."""
    code = list(struct.iter_unpack("=HBBI", instructions))
    a = x = at = 0
    memory: dict[int, int] = {}
    while True:
        operation, if_true, if_false, operand = code[at]
        at += 1
        size, mode = {0x08: 2, 0x10: 1}.get(operation & 0x18, 4), operation & 0xE0
        if operation & 7 == 0 and mode in (0x20, 0x40):
            start = operand + (x if mode == 0x40 else 0)
            if start == 0xFFFFF000 + 48:
                a = tagged
            else:
                assert start + size <= len(frame), "it reads beyond the end of the frame"
                a = int.from_bytes(frame[start : start + size], "big")
        elif operation == 0x80:
            a = len(frame)
        elif operation == 0x00:
            a = operand
        elif operation == 0x01:
            x = operand
        elif operation == 0x07:
            x = a
        elif operation == 0x02:
            memory[operand] = a
        elif operation == 0x60:
            a = memory[operand]
        elif operation == 0x05:
            at += operand
        elif operation == 0x06:
            return operand
        elif operation & 7 == 5:
            right = x if operation & 8 else operand
            holds = a == right if operation & 0xF0 == 0x10 else a >= right
            at += if_true if holds else if_false
        else:
            a = {
                0x04: a + operand,
                0x0C: a + x,
                0x14: a - operand,
                0x54: a & operand,
                0x64: a << operand,
            }[operation] & 0xFFFFFFFF


def ethernet(kind: int, payload: bytes, mac: bytes = MAC) -> bytes:
    return bytes(6) + mac + struct.pack("!H", kind) + payload


def ipv4(source: IPv4Address = OWN4, to: str = "10.55.1.3", mac: bytes = MAC) -> bytes:
    return ethernet(0x0800, bytes(12) + source.packed + IPv4Address(to).packed, mac)


def ipv6(source: IPv6Address, protocol: int, payload: bytes) -> bytes:
    head = struct.pack("!LHBB", 6 << 28, len(payload), protocol, 64)
    return ethernet(0x86DD, head + source.packed + bytes(16) + payload)


def arp(mac: bytes, address: IPv4Address) -> bytes:
    return ethernet(0x0806, bytes(8) + mac + address.packed + bytes(10))


def discovery(kind: int, target: IPv6Address, option: int = 0, mac: bytes = MAC) -> bytes:
    said = bytes([kind]) + bytes(7) + target.packed
    return said + (bytes([option, 1]) + mac if option else b"")


NOBODY, OTHER4, OTHER6 = IPv6Address(0), IPv4Address("10.55.1.9"), IPv6Address("fd55::9")
OTHER_MAC = bytes(6)
HOP_BY_HOP = bytes([58, 0, 5, 2, 0, 0, 1, 0])
PASSES = {
    "IPv4": ipv4(),
    "ARP": arp(MAC, OWN4),
    "an ARP probe": arp(MAC, IPv4Address(0)),
    "TCP on IPv6": ipv6(OWN6, 6, bytes(20)),
    "an echo from the link-local address": ipv6(LINK_LOCAL, 58, bytes([128]) + bytes(7)),
    "an advertisement": ipv6(OWN6, 58, discovery(136, OWN6, 2)),
    "an advertisement without an option": ipv6(OWN6, 58, discovery(136, LINK_LOCAL)),
    "a solicitation": ipv6(OWN6, 58, discovery(135, OTHER6, 1)),
    "detection of duplicates": ipv6(NOBODY, 58, discovery(135, OWN6, 14)),
    "a report of groups": ipv6(NOBODY, 0, HOP_BY_HOP + bytes([143]) + bytes(7)),
    "a later fragment": ipv6(OWN6, 44, bytes([58, 0, 0, 8]) + bytes(4)),
}
DROPPED = {
    "a foreign MAC": ipv4(mac=OTHER_MAC),
    "a foreign IPv4 address": ipv4(OTHER4),
    "for the node's loopback": ipv4(to="127.0.0.1"),
    "ARP for a foreign address": arp(MAC, OTHER4),
    "ARP for a foreign MAC": arp(OTHER_MAC, OWN4),
    "a foreign IPv6 address": ipv6(OTHER6, 17, bytes(8)),
    "an advertisement of a foreign address": ipv6(OWN6, 58, discovery(136, OTHER6, 2)),
    "an advertisement of a foreign MAC": ipv6(OWN6, 58, discovery(136, OWN6, 2, OTHER_MAC)),
    "an advertisement of another kind": ipv6(OWN6, 58, discovery(136, OWN6, 1)),
    "a solicitation from a foreign address": ipv6(OTHER6, 58, discovery(135, OTHER6, 1)),
    "a solicitation with a foreign MAC": ipv6(OWN6, 58, discovery(135, OTHER6, 1, OTHER_MAC)),
    "detection of somebody else's duplicates": ipv6(NOBODY, 58, discovery(135, OTHER6)),
    "a router advertisement": ipv6(OWN6, 58, bytes([134]) + bytes(15)),
    "a redirect": ipv6(LINK_LOCAL, 58, bytes([137]) + bytes(39)),
    "a hidden advertisement": ipv6(OWN6, 0, HOP_BY_HOP + discovery(136, OTHER6, 2)),
    "hidden in a first fragment": ipv6(
        OWN6, 44, bytes([58, 0, 0, 1]) + bytes(4) + discovery(136, OTHER6, 2)
    ),
    "behind too many headers": ipv6(OWN6, 60, (bytes([60]) + bytes(7)) * 4 + bytes(20)),
    "another protocol": ethernet(0x88B5, bytes(50)),
    "a second tag": ethernet(0x8100, bytes(50)),
}


@pytest.mark.parametrize("identity", [POD, MANY], ids=["one address", "many addresses"])
@pytest.mark.parametrize(
    ("frame", "verdict"),
    [
        *(pytest.param(frame, NEXT_FILTER, id=what) for what, frame in PASSES.items()),
        *(pytest.param(frame, DROP, id=what) for what, frame in DROPPED.items()),
    ],
)
def test_a_pod_sends_as_itself_only(identity, frame, verdict) -> None:
    assert run(program(identity), frame) == verdict
    assert run(program(identity), frame, tagged=1) == DROP


@pytest.mark.parametrize("frame", PASSES.values(), ids=PASSES)
def test_no_frame_is_read_beyond_its_end(frame) -> None:
    for length in range(14, len(frame) + 1):
        run(program(POD), frame[:length])
        run(loopback_program(), frame[:length])


@given(
    kind=st.sampled_from([0x0800, 0x0806, 0x86DD]),
    next_header=st.sampled_from([0, 6, 17, 43, 44, 58, 60]),
    rest=st.binary(max_size=120),
)
def test_nothing_that_a_pod_invents_is_read_beyond_its_end(kind, next_header, rest) -> None:
    frame = ethernet(kind, bytes(6) + bytes([next_header, 64]) + OWN6.packed + rest)
    assert run(program(POD), frame) in (DROP, NEXT_FILTER)


@pytest.mark.parametrize("identity", [POD, MANY, Identity(MAC, (), (LINK_LOCAL,))])
def test_a_program_tells_whom_it_is_about(identity) -> None:
    assert identity_in(program(identity)) == identity


def test_another_program_is_known_as_such() -> None:
    made = program(POD)
    for other in (b"", loopback_program(), made[:-8], made[8:], made[:4] + b"\1" + made[5:]):
        assert identity_in(other) is None


def test_a_pod_that_is_not_checked_is_kept_off_loopback() -> None:
    for frame, verdict in ((ipv4(OTHER4), NEXT_FILTER), (ipv4(to="127.0.0.1"), DROP)):
        assert run(loopback_program(), frame) == verdict
    assert run(loopback_program(), ipv4(IPv4Address("127.0.0.1"))) == DROP
    assert run(loopback_program(), arp(MAC, OTHER4)) == NEXT_FILTER
