"""Connections that the kernel remembers although they lead to the wrong place.

A client of UDP or SCTP that keeps its port keeps its conntrack entry, and with it the address that
its first packet was translated to. So entries are deleted when a host port comes or goes. TCP does
not need that: a new connection replaces the old entry.

When an address is released, entries of every protocol are deleted: network policies let established
connections pass, and the next pod with the address must not inherit any.

One dump walks the kernel's whole table (6 ms if it is empty, some 20 with 50,000 entries). The
kernel filters what it sends (CTA_FILTER, Linux 5.8), and the filter is applied here once more.
"""

from __future__ import annotations

import _socket as socket  # without what `socket` imports
import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from ipaddress import ip_address

from ..errors import CniError
from ..model import Address
from ..record import TYPE_CHECKING, NamedTuple
from . import netns
from .netlink import (
    Netlink,
    Request,
    attribute,
    attributes,
    nested,
    netfilter,
    u8,
    u32,
)

if TYPE_CHECKING:
    from typing import Callable, Optional

UDP, SCTP = 17, 132
COUNT = "net/netfilter/nf_conntrack_count"
AT_ONCE = 64  # deletions in one send
# For each question the kernel walks through its whole table, which takes milliseconds. So up to so
# many entries are listed with one question, and looked through here.
FEW = 64
EACH = 8  # up to so many ports or addresses are asked about one by one
_CTNETLINK = 1 << 8
_GET, _DELETE = _CTNETLINK | 1, _CTNETLINK | 2
_ORIG, _REPLY, _ID, _ZONE, _FILTER = 1, 2, 12, 18, 25
_TUPLE_IP, _TUPLE_PROTO = 1, 2
_PROTO_NUM, _SRC_PORT, _DST_PORT = 1, 2, 3
_BY_SOURCE, _BY_PROTOCOL, _BY_DST_PORT = 0x01, 0x08, 0x20
_ENOENT = 2

_told = False


class Tuple(NamedTuple):
    """One direction of a connection. ICMP has no ports."""

    source: bytes
    destination: bytes
    protocol: int
    source_port: int
    destination_port: int


class Entry(NamedTuple):
    family: int
    original: Tuple
    reply: Tuple
    key: bytes  # what a deletion needs to name it


class Question(NamedTuple):
    """What to ask the kernel for; fields that are None are not filtered by."""

    family: int
    protocol: Optional[int] = None
    port: Optional[int] = None  # of the original destination
    source: Optional[bytes] = None
    reply_source: Optional[bytes] = None


class HostPort(NamedTuple):
    """host_ip is None for every address of the node."""

    protocol: int
    host_ip: Optional[Address]
    port: int
    pod_ip: Address
    pod_port: int


def forget_ports(ports: Sequence[HostPort]) -> None:
    """Delete what clients of these host ports have: entries to the port itself, translated or not,
    and entries that lead to the pod's port."""
    for version in (4, 6):
        mine = [port for port in ports if port.pod_ip.version == version]
        for protocol in (UDP, SCTP):
            chosen = [port for port in mine if port.protocol == protocol]
            if chosen:
                matches = _port_matcher(chosen)
                _forget(_about_ports(version, protocol, chosen), matches, (UDP, SCTP))


def forget_addresses(addresses: Sequence[Address]) -> None:
    """Delete the entries of pods that had these addresses, before others get them."""
    for version in (4, 6):
        packed = [one.packed for one in addresses if one.version == version]
        if packed:
            _forget(_about_addresses(_family(version), packed), _address_matcher(packed))


def _about_ports(version: int, protocol: int, ports: Sequence[HostPort]) -> list[Question]:
    family = _family(version)
    if len(ports) > EACH:
        return [Question(family, protocol)]
    found = {Question(family, protocol, port=port.port): None for port in ports}
    pods = {Question(family, protocol, reply_source=port.pod_ip.packed): None for port in ports}
    return [*found, *pods]


def _port_matcher(ports: Sequence[HostPort]) -> Callable[[Entry], bool]:
    pods = {(port.pod_ip.packed, port.pod_port) for port in ports}
    hosts = {(port.host_ip.packed if port.host_ip else b"", port.port) for port in ports}
    is_local = _Local()

    def matches(entry: Entry) -> bool:
        original, reply = entry.original, entry.reply
        if (reply.source, reply.source_port) in pods:
            return True
        if (original.destination, original.destination_port) in hosts:
            return True
        # Of any address of the node's: a pod's own question to a server elsewhere stays.
        return (b"", original.destination_port) in hosts and is_local(original.destination)

    return matches


class _Local:
    """Whether an address is one of the node's; each is looked up once."""

    def __init__(self) -> None:
        self._known: dict[bytes, bool] = {}

    def __call__(self, packed: bytes) -> bool:
        if packed not in self._known:
            from . import link

            with Netlink() as kernel:
                route = link.route_to(kernel, ip_address(packed))
            self._known[packed] = route is not None and route[7] == link.RTN_LOCAL
        return self._known[packed]


def _about_addresses(family: int, packed: Sequence[bytes]) -> list[Question]:
    if len(packed) > EACH:
        return [Question(family)]
    sent = [Question(family, source=one) for one in packed]
    return [*sent, *(Question(family, reply_source=one) for one in packed)]


def _address_matcher(packed: Sequence[bytes]) -> Callable[[Entry], bool]:
    gone = set(packed)

    def matches(entry: Entry) -> bool:
        original = entry.original
        return bool({original.source, original.destination, entry.reply.source} & gone)

    return matches


def _forget(
    questions: Iterable[Question],
    matches: Callable[[Entry], bool],
    protocols: Collection[int] = (),
) -> None:
    """A node that cannot do this still networks pods: it is said once, and not to the pod."""
    global _told
    tracked = netns.read_sysctl(COUNT)
    if tracked in (None, "0"):
        return  # connections are not tracked here, or there are none
    if int(tracked or 0) <= FEW:
        questions = dict.fromkeys(Question(one.family, one.protocol) for one in questions)
    try:
        with netfilter() as kernel:
            for question in questions:
                listed = _listed(kernel, question, protocols)
                _delete(kernel, question.family, filter(matches, listed))
    except (CniError, OSError) as problem:
        if not _told:
            _told = True
            print(
                f'msg="stale connections cannot be deleted" error="{problem}" '
                'fix="load nf_conntrack_netlink"',
                file=sys.stderr,
            )


def _listed(kernel: Netlink, question: Question, protocols: Collection[int]) -> Iterator[Entry]:
    for body in kernel.dump(_request(question)):
        entry = parse(question.family, body, protocols)
        if entry is not None:
            yield entry


def _request(question: Question) -> Request:
    original, reply = b"", b""
    flags, reply_flags = 0, 0
    if question.source is not None:
        flags |= _BY_SOURCE
        original += _ip_source(question.family, question.source)
    if question.protocol is not None:
        flags |= _BY_PROTOCOL
        protocol = [u8(_PROTO_NUM, question.protocol)]
        if question.port is not None:
            flags |= _BY_DST_PORT
            protocol.append(attribute(_DST_PORT, struct.pack("!H", question.port)))
        original += nested(_TUPLE_PROTO, *protocol)
    if question.reply_source is not None:
        reply_flags |= _BY_SOURCE
        reply += _ip_source(question.family, question.reply_source)
    body = _general(question.family)
    body += nested(_ORIG, original) if original else b""
    body += nested(_REPLY, reply) if reply else b""
    body += nested(_FILTER, u32(1, flags), u32(2, reply_flags))
    return Request(_GET, 0, body, "list tracked connections")


def _ip_source(family: int, packed: bytes) -> bytes:
    return nested(_TUPLE_IP, attribute(1 if family == socket.AF_INET else 3, packed))


def parse(family: int, body: bytes, protocols: Collection[int] = ()) -> Optional[Entry]:
    """An entry from its message. With `protocols`, None for an entry of any other."""
    have = dict(attributes(body[4:]))
    original, reply = _tuple(have.get(_ORIG, b"")), _tuple(have.get(_REPLY, b""))
    if original is None or reply is None:
        return None
    if protocols and original.protocol not in protocols:
        return None
    key = nested(_ORIG, have[_ORIG])
    for kind in (_ZONE, _ID):
        if kind in have:
            key += attribute(kind, have[kind])
    return Entry(family, original, reply, key)


def _tuple(data: bytes) -> Optional[Tuple]:
    parts = dict(attributes(data))
    addresses = dict(attributes(parts.get(_TUPLE_IP, b"")))
    protocol = dict(attributes(parts.get(_TUPLE_PROTO, b"")))
    if len(addresses) != 2 or _PROTO_NUM not in protocol:
        return None
    source, destination = (addresses[kind] for kind in sorted(addresses))
    ports = (
        struct.unpack("!H", protocol.get(kind, bytes(2)))[0] for kind in (_SRC_PORT, _DST_PORT)
    )
    return Tuple(source, destination, protocol[_PROTO_NUM][0], *ports)


def _delete(kernel: Netlink, family: int, entries: Iterable[Entry]) -> None:
    requests = [
        Request(
            _DELETE,
            0,
            _general(family) + entry.key,
            "delete a tracked connection",
            fine=(_ENOENT,),
        )
        for entry in entries
    ]
    for start in range(0, len(requests), AT_ONCE):
        kernel.do(requests[start : start + AT_ONCE])


def _general(family: int) -> bytes:
    return struct.pack("=BBH", family, 0, 0)


def _family(version: int) -> int:
    return socket.AF_INET if version == 4 else socket.AF_INET6
