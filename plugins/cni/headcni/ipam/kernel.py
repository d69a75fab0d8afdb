"""Whether an address is in use on this node, according to /proc, for a plugin without netlink."""

from __future__ import annotations

from ..model import Address

_CACHED_ROUTE = 0x01000000  # RTF_CACHE: a remembered path to somewhere, not a route


def in_use(address: Address, proc_net: str = "/proc/net") -> bool:
    """True if the host has the address itself, or a route to exactly this address.

    Neighbour entries do not count: they outlive a deleted pod by minutes.
    """
    try:
        if address.version == 4:
            return _in_fib_trie(address, f"{proc_net}/fib_trie")
        return _in_ipv6_routes(address, f"{proc_net}/ipv6_route")
    except OSError:
        return False  # a kernel without IPv6, or without these files


def _in_fib_trie(address: Address, path: str) -> bool:
    """Reads all tables: a leaf "|-- 10.0.0.7", then a line "/32 host LOCAL" for each prefix."""
    leaf, inside = f"|-- {address}", False
    with open(path, encoding="ascii") as file:
        for line in file:
            text = line.strip()
            if text.startswith("/32 ") and inside:
                return True
            if not text.startswith("/"):
                inside = text == leaf
    return False


def _in_ipv6_routes(address: Address, path: str) -> bool:
    start = f"{int(address):032x} 80 "
    with open(path, encoding="ascii") as file:
        for line in file:
            if line.startswith(start) and not int(line.split()[8], 16) & _CACHED_ROUTE:
                return True
    return False
