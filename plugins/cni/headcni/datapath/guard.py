"""Anti-spoofing: a pod's frames carry the pod's own MAC and addresses, or they are dropped.

The host's end of each pod's veth has one tc filter with a BPF program (guard_program.py), which
also keeps the pod from 127.0.0.0/8 of the node. It sees every frame before anything else on the
node does, even link-local frames that a bridge passes around its netfilter hooks. It goes with
the link, and `nft flush ruleset` does not touch it (docs/decisions/0011).

Tests: tests/cni/test_spoofing.py, tests/unit/cni/test_guard.py.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_interface

from ..errors import KERNEL_LACKS, CniError
from ..model import Address, NetworkConfig, Owner, PodRef
from ..record import TYPE_CHECKING, NamedTuple
from ..store import Attachment, Store
from . import netns, rtnl
from .guard_program import Identity, identity_in, loopback_program, program
from .link import Cable, host_name, pod_link_names
from .netlink import KernelError, Netlink, Request

if TYPE_CHECKING:
    from typing import Optional

_LACKS = (errno.ENOENT, errno.EOPNOTSUPP)


class Station(NamedTuple):
    """A pod's interface, as its neighbours may see it."""

    host: str  # the host's end of its veth
    mac: str
    addresses: tuple[Address, ...]

    @property
    def identity(self) -> Identity:
        own4 = [address for address in self.addresses if isinstance(address, IPv4Address)]
        own6 = [address for address in self.addresses if isinstance(address, IPv6Address)]
        return Identity(_packed(self.mac), tuple(own4), (*own6, link_local(self.mac)))


def applies(anti_spoofing: bool, exempt: Sequence[str], pod: PodRef) -> bool:
    """Whether a network checks this pod. Only the network can exempt pods, by namespace/name: what
    a pod says of itself does not count."""
    if not anti_spoofing:
        return False
    if not exempt or not pod.name:
        return True
    from fnmatch import fnmatchcase  # few networks exempt anybody

    return not any(fnmatchcase(str(pod), pattern) for pattern in exempt)


def station_of(network: NetworkConfig, cable: Cable, pod: PodRef) -> Optional[Station]:
    """None for a pod that is not checked, such as one whose addresses we do not give."""
    if not cable.addresses or not applies(network.anti_spoofing, network.anti_spoofing_exempt, pod):
        return None
    return Station(cable.host, cable.pod_mac, tuple(leased.address for leased in cable.addresses))


def station_of_attachment(attachment: Attachment) -> Optional[Station]:
    """The same, as ADD left it; None also for what another plugin has made."""
    conf, result = attachment.config, attachment.result
    exempt = conf.get("anti_spoofing_exempt") or ()
    checked = applies(conf.get("anti_spoofing") is not False, exempt, attachment.pod)
    if not attachment.host_ifname or not checked:
        return None
    macs = [one.get("mac") for one in result.get("interfaces", ()) if one.get("sandbox")]
    addresses = tuple(ip_interface(ip["address"]).ip for ip in result.get("ips", ()))
    if not macs or not macs[0] or not addresses:
        return None
    return Station(attachment.host_ifname, macs[0], addresses)


def link_local(mac: str) -> IPv6Address:
    """The address that the kernel gives an interface with this MAC."""
    octets = _packed(mac)
    tail = bytes([octets[0] ^ 2]) + octets[1:3] + b"\xff\xfe" + octets[3:]
    return IPv6Address(b"\xfe\x80" + bytes(6) + tail)


def _packed(mac: str) -> bytes:
    return bytes.fromhex(mac.replace(":", ""))


def filters_for(station: Optional[Station], index: int) -> list[Request]:
    """What checks the pod behind a link from now on; nothing for a pod that is not checked."""
    if station is None:
        return []
    return [rtnl.ingress(index), rtnl.check_frames(index, program(station.identity))]


@contextmanager
def needed() -> Iterator[None]:
    """Names the remedy if the kernel does not know these filters."""
    try:
        yield
    except KernelError as problem:
        if problem.request.type not in rtnl.OF_FILTERS or problem.errno not in _LACKS:
            raise
        raise CniError(
            KERNEL_LACKS,
            "anti_spoofing is true, but this kernel cannot check what pods send",
            f"{problem}; modprobe sch_ingress cls_bpf, or set anti_spoofing to false",
        ) from None


@lru_cache(maxsize=1)
def try_out() -> None:
    """CniError if this kernel cannot check what pods send. This uses the loopback device of a
    network namespace of its own, so that nothing stays. Success is remembered."""

    def write() -> None:
        with Netlink() as kernel, needed():
            index = kernel.index("lo")
            kernel.do([rtnl.ingress(index), rtnl.check_frames(index, loopback_program())])

    netns.apart(write)


def check_frames(kernel: Netlink, station: Station) -> None:
    """Have a link that exists check its pod: the filter is added, or replaced at once."""
    with needed():
        kernel.do(filters_for(station, kernel.index(station.host)))


def keep_off_loopback(kernel: Netlink, host: str) -> None:
    """Have a pod's link drop what is from or for 127.0.0.0/8, whether the pod is checked or not."""
    index = kernel.index(host)
    if index and not _program_on(kernel, index):
        kernel.do([rtnl.ingress(index), rtnl.check_frames(index, loopback_program())])


def is_kept_off_loopback(kernel: Netlink, host: str) -> bool:
    return bool(_program_on(kernel, kernel.index(host)))


def _program_on(kernel: Netlink, index: int) -> bytes:
    """Of our filter on a link. A link without an ingress qdisc has no filters: the kernel lists
    none, or refuses to."""
    try:
        return rtnl.program_among(kernel.dump(rtnl.filters(index)))
    except KernelError:
        return b""


def stations(kernel: Netlink) -> dict[str, Station]:
    """The pods that are checked now, by the host's end; without their link-local addresses."""
    found = {}
    for name in pod_link_names():
        identity = identity_in(_program_on(kernel, kernel.index(name)))
        if identity is not None:
            addresses: tuple[Address, ...] = (*identity.own4, *identity.own6[:-1])
            found[name] = Station(name, identity.mac.hex(":"), addresses)
    return found


def difference(kernel: Netlink, station: Station) -> str:
    """What is wrong with the check of a pod that is to be checked; nothing if its link is gone."""
    index = kernel.index(station.host)
    if not index:
        return ""
    found = _program_on(kernel, index)
    if not found:
        return f"anti-spoofing: no filter of tc checks what comes in on {station.host}"
    if found != program(station.identity):
        return f"anti-spoofing: the filter of tc on {station.host} is not the one of this pod"
    return ""


def repair(store: Store, kernel: Netlink, deleted: Collection[Owner] = ()) -> list[str]:
    """Check every pod that the store knows and that is to be checked; says which were not. The
    store may still have pods that were deleted."""
    gone = set(map(host_name, deleted))
    said = []
    for attachment in store.attachments():
        try:
            station = station_of_attachment(attachment)
        except (ValueError, TypeError, AttributeError, KeyError):
            continue  # a damaged row; CHECK names it
        if station is not None and station.host not in gone and difference(kernel, station):
            check_frames(kernel, station)
            said.append(f"{station.host}: was not checked")
    return said
