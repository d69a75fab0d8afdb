"""A packet's way through a desired table: the expressions of its rules, as the kernel would work.

It reads the messages and not what the compiler knows, so a rule that says something else than was
meant is found.
"""

from __future__ import annotations

import struct
from ipaddress import ip_address
from typing import Any, NamedTuple

from headcni.datapath.netlink import attributes

NEW, ESTABLISHED = 8, 2


class Packet(NamedTuple):
    source: str
    destination: str
    protocol: int
    port: int = 0
    iifname: str = "headcni0"
    oifname: str = "headcni0"
    state: int = NEW
    pkttype: int = 0
    hop_limit: int = 64

    def header(self) -> bytes:
        source, destination = ip_address(self.source), ip_address(self.destination)
        if source.version == 4:
            return bytes(12) + source.packed + destination.packed
        return bytes(7) + bytes([self.hop_limit]) + source.packed + destination.packed

    def meta(self, key: int) -> bytes:
        name = {6: self.iifname, 7: self.oifname}.get(key)
        if name is not None:
            return name.encode().ljust(16, b"\0")
        version = ip_address(self.source).version
        return bytes([{15: 2 if version == 4 else 10, 16: self.protocol, 19: self.pkttype}[key]])


def passes(desired: Any, packet: Packet, bases: tuple[str, ...] = ("from_pods", "to_pods")) -> bool:
    return all(_verdict(desired, packet, base) != "drop" for base in bases)


def _verdict(desired: Any, packet: Packet, chain: str) -> str:
    """accept, drop, or return at the end of the chain."""
    for rule in desired.chains[chain].rules:
        code, leads_to = _rule(desired, packet, rule)
        if code in ("accept", "drop", "return"):
            return code
        if code in ("jump", "goto"):
            found = _verdict(desired, packet, leads_to)
            if found != "return" or code == "goto":
                return found
    return "return"


_CODES = {0: "drop", 1: "accept", -3: "jump", -4: "goto", -5: "return"}


def _rule(desired: Any, packet: Packet, rule: bytes) -> tuple[str, str]:
    registers = bytearray(128)
    for _unused, expression in attributes(rule):
        parts = dict(attributes(expression))
        name = parts[1].rstrip(b"\0").decode()
        have = dict(attributes(parts.get(2, b"")))
        if name == "meta":
            _store(registers, _number(have[1]), packet.meta(_number(have[2])))
        elif name == "ct":
            _store(registers, _number(have[1]), struct.pack("=I", packet.state))
        elif name == "payload":
            base, offset, length = (_number(have[kind]) for kind in (2, 3, 4))
            data = packet.header() if base == 1 else struct.pack("!HH", 40000, packet.port)
            if base == 2 and offset == 0 and packet.protocol == 58:
                data = bytes([packet.port])  # the type
            _store(registers, _number(have[1]), data[offset : offset + length])
        elif name == "bitwise":
            (mask,) = attributes(have[4])
            at = _at(_number(have[1]))
            registers[at : at + 4] = bytes(a & b for a, b in zip(registers[at : at + 4], mask[1]))
        elif name == "cmp":
            (wanted,) = attributes(have[3])
            at = _at(_number(have[1]))
            value = bytes(registers[at : at + len(wanted[1])])
            how = _number(have[2])
            matches = {0: value == wanted[1], 1: value != wanted[1]}
            if not {**matches, 3: value <= wanted[1], 5: value >= wanted[1]}[how]:
                return "", ""
        elif name == "lookup":
            found = _look_up(desired, registers, have)
            if found is None:
                return "", ""
            if found != ("", ""):
                return found
        elif name == "immediate":
            verdict = dict(attributes(dict(attributes(have[2]))[2]))
            (code,) = struct.unpack("!i", verdict[1])
            return _CODES[code], verdict.get(2, b"").rstrip(b"\0").decode()
    return "", ""


def _look_up(desired: Any, registers: bytearray, have: dict[int, bytes]) -> tuple[str, str] | None:
    name = have[1].rstrip(b"\0").decode()
    of, held = desired.sets[name], desired.elements[name]
    sizes = {"ipv4_addr": 4, "ipv6_addr": 16, "inet_service": 2, "ifname": 16}
    length = sum(sizes[part] for part in of.key)
    at = _at(_number(have[2]))
    key = bytes(registers[at : at + length])
    if of.interval:
        keys = [one for one in held if one[0] <= key <= one[1]]
        assert len(keys) <= 1, "intervals overlap"
    else:
        keys = [key] if key in held else []
    if _number(have.get(5, bytes(4))):
        return None if keys else ("", "")
    if not keys:
        return None
    verdict = held[keys[0]]
    return (verdict.code, verdict.chain) if verdict is not None else ("", "")


def _number(value: bytes) -> int:
    return int(struct.unpack("!I", value)[0])


def _at(register: int) -> int:
    """In bytes: 1 to 4 are of sixteen, from 8 on they are of four."""
    return (register - 1) * 16 if register < 8 else (register - 8) * 4


def _store(registers: bytearray, register: int, value: bytes) -> None:
    at = _at(register)
    registers[at : at + len(value)] = value
