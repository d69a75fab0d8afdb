"""A network in the form that is quickest to compare."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import NamedTuple


class Prefix(NamedTuple):
    """A network, small and quick to compare: thousands may be read every half minute."""

    family: int
    address: bytes
    length: int

    @classmethod
    def parse(cls, cidr: str) -> Prefix:
        address, _unused, length = cidr.partition("/")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        packed = socket.inet_pton(family, address)
        return cls(family, packed, int(length) if length else len(packed) * 8)

    def covers(self, other: Prefix) -> bool:
        if self.family != other.family or self.length > other.length:
            return False
        whole, bits = divmod(self.length, 8)
        if self.address[:whole] != other.address[:whole]:
            return False
        return not bits or (self.address[whole] ^ other.address[whole]) >> (8 - bits) == 0

    def overlaps(self, other: Prefix) -> bool:
        return self.covers(other) or other.covers(self)

    def shortened(self, length: int) -> Prefix:
        """The network of this length that contains it. With its own length: without host bits."""
        host_bits = len(self.address) * 8 - length
        number = int.from_bytes(self.address, "big") >> host_bits << host_bits
        return Prefix(self.family, number.to_bytes(len(self.address), "big"), length)

    def __str__(self) -> str:
        return f"{socket.inet_ntop(self.family, self.address)}/{self.length}"


def packed(addresses: Iterable[object]) -> dict[int, bytes]:
    """The packed addresses by family. The last one of a family counts."""
    found = {}
    for address in addresses:
        prefix = Prefix.parse(str(address))
        found[prefix.family] = prefix.address
    return found
