# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What this node's kernel supports. This is tested instead of derived from its version.

Links are created in a temporary network namespace, so the node itself is only read. Only the
standard library is used: the node has no pyroute2, and may not have `ip` yet.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network
from typing import Any, NamedTuple, Union

Network = Union[IPv4Network, IPv6Network]

CLONE_NEWNET = 0x40000000
NETLINK_ROUTE, NETLINK_NETFILTER = 0, 12
RTM_NEWLINK, RTM_GETRULE, RTM_NEWQDISC, RTM_NEWTFILTER = 16, 34, 36, 44
_REQUEST, _ACK, _DUMP, _CREATE_NEW = 0x1, 0x4, 0x300, 0x600
_NFT_GETTABLE = (10 << 8) | 1
_ERROR = 2
_IFNAME, _LINKINFO, _KIND = 3, 18, 1


class Route(NamedTuple):
    """A route of the host. Default routes are not included."""

    network: Network
    interface: str
    connected: bool  # no gateway: its hosts are on this link


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def enter(path: str) -> None:
    """Enter a network namespace. For a process that does nothing else afterwards."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc().setns(handle, CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    finally:
        os.close(handle)


def _leave() -> None:
    if _libc().unshare(CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "a network namespace")


def apart(work: Callable[[], Any], netns: str = "") -> Any:
    """What ``work`` returns, as JSON has it, run by a child in a namespace: this one, or a new one
    that ends with the child. An OSError of it is raised here."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            try:
                enter(netns) if netns else _leave()
                said = {"value": work()}
            except OSError as problem:
                said = {"errno": problem.errno, "text": problem.strerror or str(problem)}
            with open(writer, "w") as stream:
                json.dump(said, stream)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    said = json.loads(text) if text else {"errno": errno.ECHILD, "text": "the probe died"}
    if "errno" in said:
        raise OSError(said["errno"] or 0, said["text"])
    return said["value"]


def _attribute(kind: int, data: bytes) -> bytes:
    length = 4 + len(data)
    return struct.pack("=HH", length, kind) + data + b"\0" * (-length % 4)


def _asked(family: int, kind: int, flags: int, body: bytes) -> int:
    """The error number in the kernel's answer to a message. 0 if it succeeded."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family) as kernel:
        kernel.settimeout(5)
        kernel.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body)
        answer = kernel.recv(1 << 16)
        _unused, first, _unused, _unused, _unused = struct.unpack_from("=IHHII", answer)
        if first == _ERROR:
            return -int(struct.unpack_from("=i", answer, 16)[0])
        return 0


def lacks_link(kind: str) -> str:
    """Why links of a kind (veth, bridge) cannot be created. Empty if they can."""
    info = _attribute(_LINKINFO, _attribute(_KIND, kind.encode()))
    body = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + _attribute(_IFNAME, b"probe0\0") + info

    def make() -> int:
        return _asked(NETLINK_ROUTE, RTM_NEWLINK, _REQUEST | _ACK | _CREATE_NEW, body)

    return _trouble(lambda: apart(make))


def lacks_frame_filters() -> str:
    """Why the frames that come in on a link cannot be checked by a BPF program. Empty if they can.
    The link is `lo` of a namespace that exists only for this test."""
    qdisc = struct.pack("=BxxxiIII", 0, 1, 0xFFFF0000, 0xFFFFFFF1, 0) + _attribute(1, b"ingress\0")
    accept_all = struct.pack("=HBBI", 6, 0, 0, 0xFFFFFFFF)
    options = _attribute(4, struct.pack("=H", 1)) + _attribute(5, accept_all)
    options += _attribute(8, struct.pack("=I", 1))  # the program's result is the verdict
    protocol = 16 << 16 | socket.htons(3)
    bpf = struct.pack("=BxxxiIII", 0, 1, 1, 0xFFFF0000, protocol) + _attribute(1, b"bpf\0")

    def make() -> int:
        flags = _REQUEST | _ACK | _CREATE_NEW
        return _asked(NETLINK_ROUTE, RTM_NEWQDISC, flags, qdisc) or _asked(
            NETLINK_ROUTE, RTM_NEWTFILTER, flags, bpf + _attribute(2, options)
        )

    return _trouble(lambda: apart(make))


def lacks_bridge_filter(proc: str = "/proc", program: str = "") -> str:
    """Why packets between pods of a bridge cannot pass nftables. Empty if they can. The test does
    not load the module, because that changes what other bridges do."""
    if os.path.exists(f"{proc}/sys/net/bridge/bridge-nf-call-iptables"):
        return ""
    modprobe = program or shutil.which("modprobe", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if modprobe:
        asked = [modprobe, "--dry-run", "--quiet", "br_netfilter"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(asked, capture_output=True, timeout=10, check=False)
            if done.returncode == 0:
                return ""
    return "the module br_netfilter is neither loaded nor installed"


def lacks_rules() -> str:
    """Why there is no policy routing. Empty if there is."""
    body = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, 0, 0, 0, 0, 0)
    return _trouble(lambda: _asked(NETLINK_ROUTE, RTM_GETRULE, _REQUEST | _DUMP, body))


def lacks_nftables() -> str:
    body = struct.pack("=BBH", 0, 0, 0)
    return _trouble(lambda: _asked(NETLINK_NETFILTER, _NFT_GETTABLE, _REQUEST | _DUMP, body))


def lacks_tun(path: str = "/dev/net/tun") -> str:
    def opened() -> int:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        return 0

    return _trouble(opened)


def _trouble(work: Callable[[], int]) -> str:
    try:
        code = work()
    except OSError as problem:
        return problem.strerror or str(problem)
    return os.strerror(code) if code else ""


def routes(ignore: Callable[[str], bool], proc: str = "/proc/net") -> list[Route]:
    """The routes of the main table; for IPv6 those of all tables, because /proc does not
    separate them."""
    found = [*_routes4(f"{proc}/route"), *_routes6(f"{proc}/ipv6_route")]
    return [route for route in dict.fromkeys(found) if not ignore(route.interface)]


_UP, _REJECT = 0x1, 0x200  # RTF_UP and RTF_REJECT


def _routes4(path: str) -> Iterator[Route]:
    for line in _lines(path)[1:]:
        fields = line.split()
        # Ignore routes that reject packets; the routed datapath has one for its own range.
        if len(fields) < 8 or int(fields[3], 16) & (_UP | _REJECT) != _UP:
            continue
        address, gateway, mask = (int(fields[at], 16).to_bytes(4, "little") for at in (1, 2, 7))
        width = bin(int.from_bytes(mask, "big")).count("1")
        network = IPv4Network((int.from_bytes(address, "big"), width), strict=False)
        if width:
            yield Route(network, fields[0], not any(gateway))


def _routes6(path: str) -> Iterator[Route]:
    for line in _lines(path):
        fields = line.split()
        if len(fields) < 10 or fields[9] == "lo":
            continue
        network = IPv6Network((int(fields[0], 16), int(fields[1], 16)), strict=False)
        if network.prefixlen and not network.is_link_local and not network.is_multicast:
            yield Route(network, fields[9], not int(fields[4], 16))


def _lines(path: str) -> list[str]:
    with suppress(OSError), open(path) as stream:
        return stream.read().splitlines()
    return []


def clashes(
    cidrs: Sequence[Network], among: Sequence[Route], allowed: Sequence[Network]
) -> Iterator[tuple[Network, Route]]:
    """Routes of the host to hosts that pods would hide. A wider route through a gateway is not
    included: the pods' route is narrower and takes precedence."""
    for cidr in cidrs:
        for route in among:
            if route.network in allowed or route.network.version != cidr.version:
                continue
            inside = route.network.prefixlen >= cidr.prefixlen
            if route.network.overlaps(cidr) and (route.connected or inside):
                yield cidr, route


def is_bridge(name: str, sys_net: str = "/sys/class/net") -> bool | None:
    """None if the interface does not exist."""
    path = os.path.join(sys_net, name)
    return os.path.isdir(os.path.join(path, "bridge")) if os.path.exists(path) else None


def interfaces(sys_net: str = "/sys/class/net") -> list[str]:
    with suppress(OSError):
        return sorted(os.listdir(sys_net))
    return []


class Holder(NamedTuple):
    """The program that holds a port, as far as it is known."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"{self.command} (process {self.pid})" if self.pid else "another program"


def port_holder(address: str, port: int, protocol: str = "tcp") -> Holder | None:
    """The program that holds this port on this address. None if it is free."""
    six = ":" in address
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET, kind) as probe:
        if protocol == "tcp":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if six:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((address, port))
            if protocol == "tcp":
                probe.listen(1)
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE:
                raise
            return _holder(port, protocol)
    return None


def _holder(port: int, protocol: str) -> Holder:
    inodes = set()
    for name in (protocol, f"{protocol}6"):
        for line in _lines(f"/proc/net/{name}")[1:]:
            fields = line.split()
            listening = protocol == "udp" or fields[3] == "0A"
            if int(fields[1].rpartition(":")[2], 16) == port and listening:
                inodes.add(f"socket:[{fields[9]}]")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            for handle in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{handle}") in inodes:
                    with open(f"/proc/{pid}/cmdline", "rb") as stream:
                        words = stream.read().decode("utf-8", "replace").split("\0")
                    return Holder(int(pid), _program(words))
    return Holder(0, "")


def _program(words: Sequence[str]) -> str:
    """For an interpreter and its script, the script."""
    first = os.path.basename(words[0]) if words else ""
    if first.startswith("python"):
        script = next((word for word in words[1:] if word and not word.startswith("-")), "")
        return os.path.basename(script) or first
    return first


def legacy_filter() -> bool:
    """Whether iptables-legacy has a filter table. Reading this does not load its module."""
    for name in ("ip_tables_names", "ip6_tables_names"):
        try:
            with open(f"/proc/net/{name}", encoding="ascii") as file:
                if "filter" in file.read().split():
                    return True
        except OSError:
            continue
    return False
