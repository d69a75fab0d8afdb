"""What pods may reach of the tailnet: `all`, `pods` or a list of addresses and ports.

Their packets to the tailnet leave with the node's address, so without a limit each pod has the
rights of the node. An access is kept as one text: "all", "pods", or entries with commas between
them, as an annotation has it. Two that mean the same are the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_network

from . import light_json as json
from .model import Address, Network
from .record import TYPE_CHECKING, NamedTuple
from .shared.modes import LINKS

if TYPE_CHECKING:
    from typing import Tuple

ALL, PODS = "all", "pods"
ANNOTATION = "headcni.dev/tailnet-access"  # on a Kubernetes namespace
RANGES = {4: "100.64.0.0/10", 6: "fd7a:115c:a1e0::/48"}  # of every tailnet
MOST_ENTRIES = 64
LONGEST = 4096  # characters of an annotation
LONGEST_ENTRY = 64
MOST_NAMESPACES = 1000
MOST_LISTS = 64  # that differ: each is a chain of the nft table
NAMESPACE = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"

EXPECTED_ENTRY = (
    "an address or a range, with or without a port: 100.64.0.7, 100.64.0.0/24:443, "
    "100.64.0.7:53/udp, [fd7a:115c:a1e0::7]:443"
)
EXPECTED = f"all, pods, or a list; each of its entries is {EXPECTED_ENTRY}"

_PORT = r"(?::(\d{1,5})(?:-(\d{1,5}))?(?:/(tcp|udp|sctp))?)?\Z"
# Compiled where they are used, which most calls never do.
_FORMS = (
    r"([0-9.]+(?:/\d{1,2})?)" + _PORT,
    r"\[([0-9a-fA-F:.]+(?:/\d{1,3})?)\]" + _PORT,
    r"([0-9a-fA-F:.]+(?:/\d{1,3})?)()()()\Z",
)


class WrongAccess(ValueError):
    """What was expected in place of an entry. `at` is the entry's place in a list; -1 for all."""

    def __init__(self, expected: str, at: int = -1) -> None:
        super().__init__(expected)
        self.at = at


class Destination(NamedTuple):
    """An entry. Without a port, everything at these addresses."""

    network: Network
    first: int = 0
    last: int = 0
    protocol: str = ""  # "" for tcp, udp and sctp

    def __str__(self) -> str:
        bits = self.network.max_prefixlen
        whole = self.network.prefixlen == bits
        shown = str(self.network.network_address if whole else self.network)
        if not self.first:
            return shown
        span = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        protocol = f"/{self.protocol}" if self.protocol else ""
        return f"{f'[{shown}]' if bits == 128 else shown}:{span}{protocol}"


def destination(text: object) -> Destination:
    """An entry; a WrongAccess says what it should be."""
    if not isinstance(text, str) or len(text) > LONGEST_ENTRY:
        raise WrongAccess(EXPECTED_ENTRY)
    import re  # most nodes limit nobody

    match = next(filter(None, (re.match(form, text) for form in _FORMS)), None)
    if match is None:
        raise WrongAccess(EXPECTED_ENTRY)
    try:
        network = ip_network(match[1], strict=False)
    except ValueError:
        raise WrongAccess(EXPECTED_ENTRY) from None
    first = int(match[2] or 0)
    last = int(match[3] or first)
    if match[2] and not 0 < first <= last < 65536:
        raise WrongAccess("a port from 1 to 65535, or a range of them such as 8000-8100")
    found = Destination(network, first, last, match[4] or "")
    try:
        ip_network(match[1])
    except ValueError:
        raise WrongAccess(f"the network itself: {found}") from None
    return found


def parse(value: object) -> str:
    """An access in its one form, from a configuration or an annotation."""
    if isinstance(value, str):
        text = value.strip()
        if len(text) > LONGEST:
            raise WrongAccess(f"at most {LONGEST} characters")
        if text in (ALL, PODS):
            return text
        if not text:
            raise WrongAccess(EXPECTED)
        value = [part.strip() for part in text.split(",")]
    if not isinstance(value, (list, tuple)):
        raise WrongAccess(EXPECTED)
    if len(value) > MOST_ENTRIES:
        raise WrongAccess(f"at most {MOST_ENTRIES} entries; this has {len(value)}")
    found = set()
    for at, entry in enumerate(value):
        if entry in (ALL, PODS):
            raise WrongAccess(f"{EXPECTED_ENTRY}; {entry} stands alone, without a list", at)
        try:
            found.add(destination(entry))
        except WrongAccess as wrong:
            raise WrongAccess(str(wrong), at) from None
    ordered = sorted(found, key=lambda one: (one.network.version, *one))
    return ",".join(map(str, ordered)) or PODS


@lru_cache(maxsize=MOST_LISTS)
def destinations(access: str) -> Tuple[Destination, ...]:
    """Those of a list; none for `all` and `pods`."""
    return () if access in (ALL, PODS) else tuple(map(destination, access.split(",")))


def allows(access: str, address: Address, port: int, protocol: str) -> bool:
    """Whether it opens a port of an address that is of the tailnet."""
    return access == ALL or any(
        one.network.version == address.version
        and address in one.network
        and (not one.first or one.first <= port <= one.last)
        and one.protocol in ("", protocol)
        for one in destinations(access)
    )


class Policy(NamedTuple):
    """Who may reach what: the node's value, and those of namespaces."""

    node: str = ALL
    namespaces: Tuple[Tuple[str, str], ...] = ()
    links: Tuple[str, ...] = ()  # that lead to the tailnet, beside those that always do
    mesh: Tuple[str, ...] = ()  # ranges of pods and services; (): those of the node's networks
    configured: Tuple[str, ...] = ()  # the namespaces whose value is not their annotation's

    def of(self, namespace: str) -> str:
        return dict(self.namespaces).get(namespace, self.node)

    @property
    def is_open(self) -> bool:
        """Whether no pod is limited, so that there is nothing to enforce."""
        return all(access == ALL for access in self.accesses)

    @property
    def accesses(self) -> Tuple[str, ...]:
        """All that differ: the node's first."""
        return tuple(dict.fromkeys((self.node, *sorted(one for _unused, one in self.namespaces))))

    def as_text(self) -> str:
        """As the store keeps it; "" for one that limits nobody."""
        if self.is_open:
            return ""
        lists = self.accesses  # each once, however many namespaces have it
        places = {name: lists.index(access) for name, access in self.namespaces}
        kept = {"accesses": lists, "namespaces": places, "links": self.links}
        return json.dumps({**kept, "mesh": self.mesh, "configured": self.configured})


OPEN = Policy()
# After the store was lost: pods were limited, and nobody remembers what they were allowed.
FORGOTTEN = Policy(PODS, (("", PODS),))


def policy(
    node: str,
    annotated: Mapping[str, str],
    configured: Mapping[str, str],
    links: Iterable[str] = (),
    mesh: Iterable[Network] = (),
) -> Policy:
    """Of more lists than the nft table is to have, those that come last are taken for `pods`."""
    namespaces = {**annotated, **configured}
    listed = sorted(one for one in set(namespaces.values()) if one not in (ALL, PODS, node))
    beyond = set(listed[MOST_LISTS:])
    kept = tuple(
        (name, PODS if access in beyond else access) for name, access in sorted(namespaces.items())
    )
    extra = tuple(sorted(set(links) - set(LINKS.values())))
    ranges = tuple(sorted(set(map(str, mesh))))
    found = Policy(node, kept, extra, ranges, tuple(sorted(configured)))
    return OPEN if found.is_open else found  # as the store gives it back


@lru_cache(maxsize=4)
def from_text(text: str) -> Policy:
    """As the store keeps it. What cannot be read limits all pods: it was no `all` that was written
    there."""
    if not text:
        return OPEN
    try:
        kept = json.loads(text)
        lists = [parse(one) for one in kept["accesses"]]
        namespaces = tuple((name, lists[at]) for name, at in kept["namespaces"].items())
        more = (tuple(map(str, kept.get(key, ()))) for key in ("links", "mesh", "configured"))
        return Policy(lists[0], namespaces, *more)
    except (ValueError, LookupError, TypeError, AttributeError):
        return Policy(PODS)
