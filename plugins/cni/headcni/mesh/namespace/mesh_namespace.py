"""The network namespace of daemon mode, in which HeadCNI's own tailscaled runs.

    python3 -m headcni.mesh.namespace ensure|check|remove

    host                                          namespace `headcni`
    pods, node ── headcni01 ═════ veth ═════ eth0 ── tailscale0 ── tailnet
    underlay ◀── masquerade; UDP port ──▶ tailscaled

Routes to peers' pod CIDRs are kept by mesh/routes.py in its own table, `via gateways[version] dev
interface`. Everything else is done here: the tailnet's own ranges have table 5201, and the rules
around it (plan.py) prevent a tailscaled of the host from taking the namespace's packets, whatever
it accepts, even an exit node. All of the rules have protocol 72 and one of PRIORITIES.

If `ensure` reports that it made the namespace, processes of the old namespace still run there:
restart headcni-tailscaled.service.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pyroute2 import IPRoute, NetlinkError

from ...datapath import netns, nft
from ...datapath.rtnl import IFF_UP, RT_TABLE_MAIN
from ...errors import INTERNAL, KERNEL, CniError
from ...model import Address
from ...shared.filelock import lock
from . import named as named_netns
from . import plan
from .cable import chosen_cable, resolv_conf
from .comparison import (
    TABLE,
    Comparison,
    change_rule,
    kind_of,
    link_named,
    name_of,
    our_rules,
    see_link,
    see_routes,
    see_rules,
    see_table,
)
from .plan import INSIDE, ROUTES_TABLE, Cable, endpoint
from .settings import MeshConfig

NETNS_DIR = "/run/netns"
RESOLV_DIR = "/etc/netns"  # where `ip netns exec` finds a namespace's resolv.conf


class MeshNamespace:
    """The namespace, the cable to it, and what both sides need to forward packets."""

    def __init__(self, config: MeshConfig = MeshConfig()) -> None:  # noqa: B008 – it is frozen
        self.config = config
        self.path = f"{NETNS_DIR}/{config.namespace}"
        self._resolv_conf = f"{RESOLV_DIR}/{config.namespace}/resolv.conf"
        self._environment = f"{config.run_dir}/tailscaled.env"

    @property
    def interface(self) -> str:
        return self.config.interface

    @property
    def gateways(self) -> dict[int, Address]:
        """The next hops of routes into the mesh, by IP version. The link must exist."""
        with _kernel_errors(), IPRoute() as kernel:
            return chosen_cable(self.config, kernel).inside

    @property
    def exists(self) -> bool:
        return named_netns.is_there(self.path)

    def ensure(self) -> list[str]:
        """Repair what differs, and return the differences. What is right is not touched."""
        with self._alone():
            return self._walk(Comparison(repairing=True))

    def differences(self) -> list[str]:
        """What `ensure` would repair."""
        with _kernel_errors():
            return self._walk(Comparison(repairing=False))

    def remove(self) -> None:
        """Remove everything that exists of it. Forwarding stays on, because pods need it."""
        with self._alone():
            if named_netns.is_there(self.path):
                self._refuse_if_in_use()
            with IPRoute() as kernel:
                for rule in our_rules(kernel):
                    change_rule(kernel, "del", rule)
                self._unplug(kernel)
            if nft.table_comment(TABLE, here_only=True) is not None:
                nft.run_here(f"delete table inet {TABLE}")
            named_netns.delete(self.path)
            for path in (self._resolv_conf, self._environment):
                with suppress(FileNotFoundError):
                    os.unlink(path)
            for folder in (os.path.dirname(self._resolv_conf), RESOLV_DIR):
                with suppress(OSError):
                    os.rmdir(folder)
        with suppress(FileNotFoundError):
            os.unlink(self._lock)
        with suppress(OSError):
            os.rmdir(self.config.run_dir)

    def _walk(self, see: Comparison) -> list[str]:
        with IPRoute() as kernel:
            cable = chosen_cable(self.config, kernel)
            if not see(
                named_netns.is_there(self.path),
                f"network namespace {self.config.namespace}: missing",
                lambda: named_netns.create(self.path),
            ):
                return see.found
            with netns.opened(self.path) as fd:
                if not self._connected(see, kernel, cable, fd):
                    return see.found
                self._see_host(see, kernel, cable)
                with netns.entered(fd), IPRoute() as inside:
                    self._see_inside(see, inside, cable)
        self._see_file(see, self._resolv_conf, resolv_conf(self.config))
        endpoints = ",".join(endpoint(address, self.config.port) for address in cable.underlay[:3])
        self._see_file(
            see,
            self._environment,
            f"HEADCNI_PORT={self.config.port}\nTS_DEBUG_PRETENDPOINT={endpoints}\n",
        )
        return see.found

    def _connected(self, see: Comparison, kernel: Any, cable: Cable, fd: int) -> bool:
        """A veth pair with one end here and the other inside. A pair that leads elsewhere is
        replaced."""
        ours = link_named(kernel, self.interface)
        if ours is not None and kind_of(ours) != "veth":
            raise CniError(
                KERNEL,
                f"{self.interface} is a {kind_of(ours) or 'link'} that HeadCNI did not make",
                "remove it, or choose another interface name",
            )
        with netns.entered(fd), IPRoute() as inside:
            theirs = link_named(inside, INSIDE)
        joined = (
            ours is not None
            and theirs is not None
            and (ours.get("IFLA_LINK"), theirs.get("IFLA_LINK")) == (theirs["index"], ours["index"])
        )

        def plug() -> None:
            self._unplug(kernel)
            if theirs is not None:
                with netns.entered(fd), IPRoute() as inside:
                    inside.link("del", index=theirs["index"])
            peer = {"ifname": INSIDE, "net_ns_fd": fd, "mtu": cable.mtu}
            kernel.link("add", ifname=self.interface, kind="veth", mtu=cable.mtu, peer=peer)

        what = "missing" if ours is None else "does not lead into the namespace"
        return see(joined, f"{self.interface}: {what}", plug)

    def _unplug(self, kernel: Any) -> None:
        link = link_named(kernel, self.interface)
        if link is None or kind_of(link) != "veth":
            return
        try:
            kernel.link("del", index=link["index"])
        except NetlinkError as problem:
            if problem.code != errno.ENODEV:  # it disappeared with its namespace a moment ago
                raise

    def _see_host(self, see: Comparison, kernel: Any, cable: Cable) -> None:
        self._keep_router_advertisements(see, kernel)
        see.sysctl("net/ipv4/ip_forward", "1")
        see.sysctl("net/ipv6/conf/all/forwarding", "1")
        # Set before the link has an address, so that nothing is learnt from a neighbour there.
        see.sysctl(f"net/ipv6/conf/{self.interface}/accept_ra", "0")
        see.sysctl(f"net/ipv4/conf/{self.interface}/rp_filter", "2")
        index = see_link(see, kernel, "", self.interface, cable, cable.host)
        see_table(see, "", plan.host_chains(self.config, cable))
        wanted = plan.host_routes(self.config, cable)
        see_routes(see, kernel, "", index, wanted, ROUTES_TABLE, exactly=True)
        see_rules(see, kernel, "", plan.host_rules(self.config, cable))

    def _keep_router_advertisements(self, see: Comparison, kernel: Any) -> None:
        """A node that forwards loses its default router unless accept_ra is 2."""
        if netns.read_sysctl("net/ipv6/conf/all/forwarding") != "0":
            return
        for route in kernel.get_routes(family=socket.AF_INET6, table=RT_TABLE_MAIN):
            if route["dst_len"] == 0 and route["proto"] == 9:  # RTPROT_RA
                name = name_of(kernel, route.get("RTA_OIF"))
                if name and netns.read_sysctl(f"net/ipv6/conf/{name}/accept_ra") == "1":
                    see.sysctl(f"net/ipv6/conf/{name}/accept_ra", "2")

    def _see_inside(self, see: Comparison, kernel: Any, cable: Cable) -> None:
        where = f"in {self.config.namespace}: "
        see.sysctl("net/ipv4/ip_forward", "1", where)
        see.sysctl("net/ipv6/conf/all/forwarding", "1", where)
        # The answers to pods' packets take another way than the packets.
        see.sysctl("net/ipv4/conf/all/rp_filter", "2", where)
        see.sysctl(f"net/ipv6/conf/{INSIDE}/accept_ra", "0", where)
        lo = link_named(kernel, "lo")
        see(
            bool(lo["flags"] & IFF_UP),
            f"{where}lo is down",
            lambda: kernel.link("set", index=lo["index"], state="up"),
        )
        index = see_link(see, kernel, where, INSIDE, cable, cable.inside)
        # Before the routes: no packet may pass before its address is translated.
        see_table(see, where, plan.inside_chains(self.config, cable))
        see_routes(see, kernel, where, index, plan.inside_routes(cable), RT_TABLE_MAIN)
        see_rules(see, kernel, where, plan.inside_rules(self.config, cable))

    def _see_file(self, see: Comparison, path: str, text: str) -> None:
        def write() -> None:
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(f"{path}.new", path)

        try:
            with open(path, encoding="utf-8") as file:
                have = file.read()
        except FileNotFoundError:
            have = ""
        see(have == text, f"{path}: {'differs' if have else 'missing'}", write)

    def _refuse_if_in_use(self) -> None:
        there = os.stat(self.path)
        users = []
        for process in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{process}/ns/net"), there):
                    with open(f"/proc/{process}/comm", encoding="utf-8") as file:
                        users.append(f"{file.read().strip()} ({process})")
        if users:
            raise CniError(
                INTERNAL,
                f"the network namespace {self.config.namespace} is in use by {', '.join(users)}",
                "stop headcni-tailscaled.service first",
            )

    @property
    def _lock(self) -> str:
        return f"{self.config.run_dir}/mesh.lock"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The unit and the daemon may come at the same moment, so only one of them works at a
        time."""
        os.makedirs(self.config.run_dir, mode=0o755, exist_ok=True)
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            lock(fd, self._lock)
            with _kernel_errors():
                yield
        finally:
            os.close(fd)


@contextmanager
def _kernel_errors() -> Iterator[None]:
    try:
        yield
    except NetlinkError as problem:
        raise CniError(KERNEL, "the kernel refused a change", str(problem)) from problem
