"""The classic BPF program that checks every frame of one pod.

The kernel runs it for each frame that arrives on the host's end of the pod's veth. Offsets count
from the frame's Ethernet header. The result is tc's verdict: drop the frame, or ask the next
filter. A program that reads beyond the end of a frame ends with the verdict "accept", so the
frame's length is compared before each read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address

from ..record import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from typing import Optional, Tuple, TypeAlias, Union

DROP, NEXT_FILTER = 2, 0xFFFFFFFF  # TC_ACT_SHOT, TC_ACT_UNSPEC

_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE, _LOAD_LENGTH = 0x20, 0x28, 0x30, 0x80
_AT_X_WORD, _AT_X_HALF, _AT_X_BYTE = 0x40, 0x48, 0x50
_SET_A, _SET_X, _TO_X, _FROM_X, _STORE, _RESTORE = 0x00, 0x01, 0x07, 0x87, 0x02, 0x60
_ADD, _ADD_X, _SUBTRACT, _SHIFT_LEFT, _MASK = 0x04, 0x0C, 0x14, 0x64, 0x54
_JUMP, _IF_EQUAL, _IF_AT_LEAST, _IF_AT_LEAST_X, _RETURN = 0x05, 0x15, 0x35, 0x3D, 0x06
_HAS_VLAN_TAG = 0xFFFFF000 + 48  # SKF_AD_OFF + SKF_AD_VLAN_TAG_PRESENT
_LONGEST_CONDITIONAL_JUMP = 255

_IPV4, _ARP, _IPV6 = 0x0800, 0x0806, 0x86DD
_SOURCE_MAC, _KIND = 6, 12
_SOURCE4, _DESTINATION4, _END4 = 14 + 12, 14 + 16, 14 + 20
_ARP_MAC, _ARP_ADDRESS, _ARP_END = 14 + 8, 14 + 14, 14 + 28
_NEXT_HEADER, _SOURCE6, _END6 = 14 + 6, 14 + 8, 14 + 40
_HOP_BY_HOP, _ROUTING, _FRAGMENT, _ICMPV6, _OPTIONS = 0, 43, 44, 58, 60
_FRAGMENT_OFFSET = 0xFFF8  # its bits in the third and fourth byte of a fragment header
_EXTENSIONS = 3  # headers that are followed to find ICMPv6; a frame with more of them is dropped
_SOLICITATION, _ADVERTISEMENT = 135, 136
_FROM_ROUTERS = 134, 137  # router advertisement, redirect
_MULTICAST_REPORTS = 131, 132, 143
_OF_SENDER, _OF_TARGET = 1, 2  # options of neighbour discovery with a link-layer address

_INSTRUCTION = struct.Struct("=HBBI")
_OPERAND = struct.Struct("=I")


class Identity(NamedTuple):
    """Whom a pod may send as."""

    mac: bytes
    own4: tuple[IPv4Address, ...]
    own6: tuple[IPv6Address, ...]  # with the link-local address

    def words(self) -> list[int]:
        """Everything that differs between two programs with as many addresses."""
        found = [*struct.unpack("!IH", self.mac), len(self.own4), len(self.own6)]
        found += map(int, self.own4)
        for address in self.own6:
            found += struct.unpack("!4I", address.packed)
        return found


class _Word(NamedTuple):
    """An operand that is taken from Identity.words()."""

    number: int


_MAC = _Word(0), _Word(1)
_Address: TypeAlias = "Tuple[_Word, ...]"
_Operand: TypeAlias = "Union[int, _Word]"
_NEXT = ""  # the place of the next instruction


class _Template(NamedTuple):
    """Instructions without the identity's words, and where these belong."""

    instructions: bytes
    operands: tuple[tuple[int, int], ...]  # the offset of an operand, the number of its word

    def filled(self, words: list[int]) -> bytes:
        made = bytearray(self.instructions)
        for offset, number in self.operands:
            _OPERAND.pack_into(made, offset, words[number])
        return bytes(made)


class _Assembler:
    """Instructions with named places to jump to, which must come later in the program."""

    def __init__(self) -> None:
        self._code: list[tuple[int, str, str, _Operand]] = []
        self._places: dict[str, int] = {}

    def place(self, name: str) -> None:
        self._places[name] = len(self._code)

    def new_name(self) -> str:
        return f"#{len(self._code)}"

    def add(self, operation: int, operand: _Operand = 0) -> None:
        self._code.append((operation, _NEXT, _NEXT, operand))

    def jump(self, to: str) -> None:
        self._code.append((_JUMP, to, _NEXT, 0))

    def jump_if(self, condition: int, value: _Operand, to: str) -> None:
        self._code.append((condition, to, _NEXT, value))

    def jump_unless(self, condition: int, value: _Operand, to: str) -> None:
        self._code.append((condition, _NEXT, to, value))

    def end(self, verdict: int) -> None:
        self.add(_RETURN, verdict)

    def assembled(self) -> _Template:
        if len(self._code) > _LONGEST_CONDITIONAL_JUMP:
            self._lengthen_jumps()
        made, operands = bytearray(), []
        for at, (operation, if_true, if_false, operand) in enumerate(self._code):
            jumps = [self._places[name] - at - 1 if name else 0 for name in (if_true, if_false)]
            if isinstance(operand, _Word):
                operands.append((len(made) + 4, operand.number))
                operand = 0
            if operation == _JUMP:
                jumps, operand = [0, 0], jumps[0]
            made += _INSTRUCTION.pack(operation, *jumps, operand)
        return _Template(bytes(made), tuple(operands))

    def _lengthen_jumps(self) -> None:
        """For pods with many addresses: unconditional jumps have no limit."""
        short, self._code = self._code, []
        begin_at = []
        for operation, if_true, if_false, operand in short:
            begin_at.append(len(self._code))
            if operation == _JUMP or not (if_true or if_false):
                self._code.append((operation, if_true, if_false, operand))
                continue
            here = f"after {len(self._code)}"
            taken, other = (_NEXT, here) if if_true else (here, _NEXT)
            self._code += [(operation, taken, other, operand), (_JUMP, if_true or if_false, "", 0)]
            self._places[here] = -len(self._code)
        for name, at in self._places.items():
            self._places[name] = -at if name.startswith("after ") else begin_at[at]


def loopback_program() -> bytes:
    """For a pod that may send as anybody: drops only what is from or for 127.0.0.0/8."""
    code = _Assembler()
    code.add(_LOAD_HALF, _KIND)
    code.jump_unless(_IF_EQUAL, _IPV4, "accept")
    code.add(_LOAD_LENGTH)
    code.jump_unless(_IF_AT_LEAST, _END4, "drop")
    for at in (_DESTINATION4, _SOURCE4):
        code.add(_LOAD_BYTE, at)
        code.jump_if(_IF_EQUAL, 127, "drop")
    _verdicts(code)
    return code.assembled().instructions


def _verdicts(code: _Assembler) -> None:
    code.place("accept")
    code.end(NEXT_FILTER)
    code.place("drop")
    code.end(DROP)


def program(identity: Identity) -> bytes:
    """Lets a pod send as itself only."""
    template = _template(len(identity.own4), len(identity.own6))
    return template.filled(identity.words())


def identity_in(instructions: bytes) -> Optional[Identity]:
    """The identity that a program checks; None if this release would not write that program."""
    try:
        operands = [operand for *_unused, operand in _INSTRUCTION.iter_unpack(instructions)]
        count = operands[-2]
        words = operands[-2 - count : -2]
        mac, (count4, count6) = struct.pack("!IH", *words[:2]), words[2:4]
        end4, end6 = 4 + count4, 4 + count4 + 4 * count6
        if not 0 < count < len(operands) - 2 or len(words) != end6:
            return None
        found = Identity(
            mac,
            tuple(map(IPv4Address, words[4:end4])),
            tuple(
                IPv6Address(struct.pack("!4I", *words[at : at + 4])) for at in range(end4, end6, 4)
            ),
        )
    except (struct.error, ValueError, IndexError):
        return None
    return found if program(found) == instructions else None


@lru_cache(maxsize=16)
def _template(count4: int, count6: int) -> _Template:
    own4 = [_Word(4 + number) for number in range(count4)]
    start6 = 4 + count4
    own6 = [
        tuple(_Word(start6 + 4 * number + part) for part in range(4)) for number in range(count6)
    ]
    code = _Assembler()
    code.add(_LOAD_WORD, _HAS_VLAN_TAG)  # the kernel has taken the tag itself off already
    code.jump_unless(_IF_EQUAL, 0, "drop")
    _require_mac(code, _LOAD_WORD, _LOAD_HALF, _SOURCE_MAC)
    code.add(_LOAD_HALF, _KIND)
    code.jump_if(_IF_EQUAL, _IPV6, "ipv6")
    code.jump_if(_IF_EQUAL, _ARP, "arp")
    code.jump_unless(_IF_EQUAL, _IPV4, "drop")
    _check_ipv4(code, own4)
    code.place("arp")
    _check_arp(code, own4)
    code.place("ipv6")
    _check_ipv6(code, own6)
    _verdicts(code)
    # Never executed: from here, whoever lists the filter can read whom it is about.
    count = 4 + count4 + 4 * count6
    for number in range(count):
        code.add(_SET_A, _Word(number))
    code.add(_SET_A, count)
    code.end(DROP)  # the kernel wants a verdict at the end
    return code.assembled()


def _require_mac(code: _Assembler, word: int, half: int, at: int) -> None:
    first, last = _MAC
    code.add(word, at)
    code.jump_unless(_IF_EQUAL, first, "drop")
    code.add(half, at + 4)
    code.jump_unless(_IF_EQUAL, last, "drop")


def _check_ipv4(code: _Assembler, own4: list[_Word]) -> None:
    code.add(_LOAD_LENGTH)
    code.jump_unless(_IF_AT_LEAST, _END4, "drop")
    code.add(_LOAD_BYTE, _DESTINATION4)
    code.jump_if(_IF_EQUAL, 127, "drop")
    code.add(_LOAD_WORD, _SOURCE4)
    for address in own4:
        code.jump_if(_IF_EQUAL, address, "accept")
    code.jump("drop")


def _check_arp(code: _Assembler, own4: list[_Word]) -> None:
    code.add(_LOAD_LENGTH)
    code.jump_unless(_IF_AT_LEAST, _ARP_END, "drop")
    _require_mac(code, _LOAD_WORD, _LOAD_HALF, _ARP_MAC)
    code.add(_LOAD_WORD, _ARP_ADDRESS)
    code.jump_if(_IF_EQUAL, 0, "accept")  # a pod that looks for duplicates has no address yet
    for address in own4:
        code.jump_if(_IF_EQUAL, address, "accept")
    code.jump("drop")


def _check_ipv6(code: _Assembler, own6: list[_Address]) -> None:
    code.add(_LOAD_LENGTH)
    code.jump_unless(_IF_AT_LEAST, _END6, "drop")
    code.add(_SET_X, _END6)
    code.add(_LOAD_BYTE, _NEXT_HEADER)
    for _unused in range(_EXTENSIONS):
        _follow_extension(code)
    code.jump_if(_IF_EQUAL, _ICMPV6, "icmpv6")
    for kind in (_HOP_BY_HOP, _ROUTING, _OPTIONS, _FRAGMENT):
        code.jump_if(_IF_EQUAL, kind, "drop")
    code.jump("source")
    code.place("icmpv6")
    _check_icmpv6(code, own6)
    code.place("source")
    _jump_if_equal(code, own6, _LOAD_WORD, _SOURCE6, "accept")
    code.jump("drop")


def _follow_extension(code: _Assembler) -> None:
    """A has the number of the header at X. If that is an extension, move both on to the next."""
    follow, fragment, done = (f"{what} {code.new_name()}" for what in ("follow", "first", "done"))
    code.jump_if(_IF_EQUAL, _ICMPV6, "icmpv6")
    code.jump_if(_IF_EQUAL, _FRAGMENT, fragment)
    for kind in (_HOP_BY_HOP, _ROUTING, _OPTIONS):
        code.jump_if(_IF_EQUAL, kind, follow)
    code.jump("source")
    code.place(fragment)
    _require_bytes(code, 8)
    code.add(_AT_X_HALF, 2)
    code.add(_MASK, _FRAGMENT_OFFSET)
    code.jump_unless(_IF_EQUAL, 0, "source")  # only the first fragment has further headers
    code.add(_AT_X_BYTE, 0)
    code.add(_STORE, 0)
    code.add(_SET_A, 8)
    code.jump(done)
    code.place(follow)
    _require_bytes(code, 8)
    code.add(_AT_X_BYTE, 0)
    code.add(_STORE, 0)
    code.add(_AT_X_BYTE, 1)
    code.add(_ADD, 1)
    code.add(_SHIFT_LEFT, 3)
    code.place(done)
    code.add(_ADD_X)
    code.add(_TO_X)
    code.add(_RESTORE, 0)


def _require_bytes(code: _Assembler, size: int) -> None:
    """From X on. No frame that comes here is shorter than an IPv6 header, so the subtraction does
    not go below zero."""
    code.add(_LOAD_LENGTH)
    code.add(_SUBTRACT, size)
    code.jump_unless(_IF_AT_LEAST_X, 0, "drop")


def _check_icmpv6(code: _Assembler, own6: list[_Address]) -> None:
    """X is where the ICMPv6 header begins."""
    _require_bytes(code, 4)
    code.add(_AT_X_BYTE, 0)
    for kind in _FROM_ROUTERS:  # a pod is not a router for its neighbours
        code.jump_if(_IF_EQUAL, kind, "drop")
    code.jump_if(_IF_EQUAL, _ADVERTISEMENT, "target")
    code.jump_if(_IF_EQUAL, _SOLICITATION, "solicitation")
    for kind in _MULTICAST_REPORTS:
        code.jump_if(_IF_EQUAL, kind, "report")
    code.jump("source")
    # A pod that has no address yet may report groups, and look for duplicates of its own address.
    code.place("report")
    _jump_if_equal(code, [_NOWHERE], _LOAD_WORD, _SOURCE6, "accept")
    code.jump("source")
    code.place("solicitation")
    _jump_if_equal(code, [_NOWHERE], _LOAD_WORD, _SOURCE6, "target")
    _require_own_mac_in_option(code, _OF_SENDER)  # whoever is asked learns this MAC
    code.jump("source")
    code.place("target")
    _require_bytes(code, 24)
    _jump_if_equal(code, own6, _AT_X_WORD, 8, "own target")
    code.jump("drop")
    code.place("own target")
    code.add(_AT_X_BYTE, 0)
    code.jump_if(_IF_EQUAL, _SOLICITATION, "accept")
    _require_own_mac_in_option(code, _OF_TARGET)


_NOWHERE = (0, 0, 0, 0)


def _require_own_mac_in_option(code: _Assembler, kind: int) -> None:
    """In the first option, if the message has one."""
    code.add(_LOAD_LENGTH)
    code.add(_SUBTRACT, 25)
    code.jump_unless(_IF_AT_LEAST_X, 0, "source")
    _require_bytes(code, 32)
    code.add(_AT_X_BYTE, 24)
    code.jump_unless(_IF_EQUAL, kind, "drop")
    _require_mac(code, _AT_X_WORD, _AT_X_HALF, 26)


def _jump_if_equal(
    code: _Assembler, addresses: Sequence[Sequence[_Operand]], word: int, at: int, to: str
) -> None:
    """To compare IPv6 addresses, in the frame at `at`."""
    for address in addresses:
        another = f"another {code.new_name()}"
        for number, value in enumerate(address):
            code.add(word, at + 4 * number)
            if number < 3:
                code.jump_unless(_IF_EQUAL, value, another)
            else:
                code.jump_if(_IF_EQUAL, value, to)
        code.place(another)
