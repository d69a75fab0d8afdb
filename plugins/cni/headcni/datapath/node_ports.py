"""Host ports that no pod may have: the node itself uses them.

A host port leads to its pod before the node's own sockets are looked at, so it would take a
listener's clients away. The kernel is asked who listens when a pod comes with host ports. Whoever
begins to listen later does not take the port from the pod.
"""

from __future__ import annotations

import _socket as socket  # without what `socket` imports
import errno
import struct
import sys
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from typing import NamedTuple

from ..errors import INVALID_CONFIG, PORT_TAKEN, CniError
from ..model import NetworkConfig
from .netlink import NETLINK_SOCK_DIAG, KernelError, Netlink, Request, attributes
from .ruleset import Port

SOCK_DIAG_BY_FAMILY, INET_DIAG_SKV6ONLY = 20, 11
# Each with the state of a socket that waits for anybody: TCP_LISTEN, and, for UDP, TCP_CLOSE. A UDP
# socket with a peer (a resolver's question) is ESTABLISHED; what is in TIME_WAIT does not listen.
_PROTOCOLS = {"tcp": (socket.IPPROTO_TCP, 10), "udp": (socket.IPPROTO_UDP, 7)}
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_REQUEST = struct.Struct("=BBBBI48s")  # inet_diag_req_v2
_ANSWER_SIZE = 72  # of inet_diag_msg; attributes follow


class Listener(NamedTuple):
    protocol: str
    address: str  # "" for any of both families; 0.0.0.0 and :: for any of one
    port: int


def refuse_those_of_the_node(network: NetworkConfig, ports: Sequence[Port]) -> None:
    """CniError if one of the ports is reserved, or the node listens there."""
    for port in ports:
        _refuse_loopback(port)
        for reserved in network.reserved_ports:
            if port.protocol in reserved.protocols and (
                reserved.first <= port.host_port <= reserved.last
            ):
                raise CniError(
                    PORT_TAKEN,
                    f"host port {port.host_port}/{port.protocol} is reserved for the node",
                    f"reserved_ports of the network {network.name} has {reserved}; choose another"
                    " hostPort, or have the node's operator change the list",
                )
    if network.host_ports_over_listeners:
        return
    wanted = {(port.protocol, port.host_port) for port in ports}
    for protocol in sorted({protocol for protocol, _unused in wanted} & set(_PROTOCOLS)):
        for listener in listeners(protocol):
            if (protocol, listener.port) in wanted:
                for port in ports:
                    if _takes(port, listener):
                        raise _taken(port, listener)


def _refuse_loopback(port: Port) -> None:
    """127.0.0.53 and the like are the node's own services; IPv6 cannot lead ::1 to a pod."""
    if port.host_ip and port.host_ip != "127.0.0.1" and ip_address(port.host_ip).is_loopback:
        raise CniError(
            INVALID_CONFIG,
            f"hostIP {port.host_ip} of host port {port.host_port}/{port.protocol} is a loopback"
            " address that no pod may have",
            "expected 127.0.0.1 or another address of the node, or no hostIP",
        )


def _takes(port: Port, listener: Listener) -> bool:
    """Whether the host port would get packets that the listener gets now."""
    if (port.protocol, port.host_port) != (listener.protocol, listener.port):
        return False
    if not listener.address:
        return True
    address = ip_address(listener.address)
    if address.version != port.family:
        return False
    if address.is_unspecified:
        return True
    if port.host_ip:
        return port.host_ip == listener.address
    # The nft table leads no other loopback address than 127.0.0.1 to pods.
    return not address.is_loopback or listener.address == "127.0.0.1"


def _taken(port: Port, listener: Listener) -> CniError:
    where = listener.address or "any address"
    option = {"tcp": "t", "udp": "u"}[port.protocol]
    return CniError(
        PORT_TAKEN,
        f"host port {port.host_port}/{port.protocol} is taken: the node listens there",
        f"a program listens on {where}; see: ss -{option}lnp sport = {port.host_port}; choose"
        " another hostPort, or end that program",
    )


def listeners(protocol: str) -> Iterator[Listener]:
    """The sockets of this thread's network namespace that wait for anybody."""
    try:
        found = [one for family in _FAMILIES for one in _asked(protocol, family)]
    except KernelError as problem:
        if problem.errno != errno.ENOENT:  # a kernel without the modules tcp_diag and udp_diag
            raise
        yield from _listed(protocol)
    else:
        yield from found


def _asked(protocol: str, family: int) -> Iterator[Listener]:
    """By sock_diag, which leaves out all connections: reading the table takes many times longer."""
    number, state = _PROTOCOLS[protocol]
    body = _REQUEST.pack(family, number, 0, 0, 1 << state, bytes(48))
    request = Request(SOCK_DIAG_BY_FAMILY, 0, body, f"list who listens for {protocol}")
    with Netlink(NETLINK_SOCK_DIAG) as kernel:
        for found in kernel.dump(request, must_know=True):
            port = int.from_bytes(found[4:6], "big")
            only_six = any(
                kind == INET_DIAG_SKV6ONLY and value[:1] == b"\1"
                for kind, value in attributes(found[_ANSWER_SIZE:])
            )
            raw = found[8:24] if family == socket.AF_INET6 else found[8:12]
            yield Listener(protocol, _address(raw, only_six), port)


def _listed(protocol: str) -> Iterator[Listener]:
    """From the tables in /proc, which do not say who takes IPv6 alone."""
    state = f"{_PROTOCOLS[protocol][1]:02X}"
    for table in (protocol, f"{protocol}6"):
        try:
            with open(f"/proc/thread-self/net/{table}", encoding="ascii") as lines:
                rows = [line.split(None, 4) for line in lines][1:]
        except FileNotFoundError:  # the kernel has no IPv6
            continue
        for row in rows:
            if row[3] == state:
                address, _unused, port = row[1].partition(":")
                # Words of 32 bits, in the machine's own byte order.
                words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
                raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
                yield Listener(protocol, _address(raw, False), int(port, 16))


def _address(raw: bytes, only_six: bool) -> str:
    if len(raw) == 4:
        return socket.inet_ntop(socket.AF_INET, raw)
    if not any(raw):
        return "::" if only_six else ""
    if raw.startswith(bytes(10) + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, raw[12:])
    return socket.inet_ntop(socket.AF_INET6, raw)
