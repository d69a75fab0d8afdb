"""The network namespace of daemon mode, in which a tailscaled of HeadCNI's own lives.

    python3 -m headcni.mesh.namespace ensure|check|remove

    host                                          namespace `headcni`
    pods, node ── headcni01 ═════ veth ═════ eth0 ── tailscale0 ── tailnet
    underlay ◀── masquerade; UDP port ──▶ tailscaled

What the route manager needs of it: peers' pod CIDRs go into its own table `via gateways[version]
dev interface`. The rest is done here: the tailnet's own ranges have table 5201, and the rules
around it (mesh_rules.py) keep whatever a tailscaled of the host's accepts, an exit node too, from
taking the namespace's packets. All of the rules have protocol 72 and one of PRIORITIES.

When `ensure` says that it made the namespace, whatever ran in the old one still does: restart
headcni-tailscaled.service.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address, ip_network
from typing import Any, Callable, Optional

from pyroute2 import IPRoute, NetlinkError

from ...datapath import netns, nft
from ...datapath.rtnl import IFF_UP, RT_TABLE_MAIN, RTPROT_HEADCNI
from ...errors import INTERNAL, INVALID_CONFIG, KERNEL, CniError
from ...model import Address, Network
from ...shared.filelock import lock
from . import named as named_netns
from . import plan as mesh_rules
from .plan import ANYWHERE, INSIDE, PRIORITIES, ROUTES_TABLE, TAILSCALED_MASK, Cable, Rule, endpoint
from .settings import MeshConfig

NETNS_DIR = "/run/netns"
RESOLV_DIR = "/etc/netns"  # where `ip netns exec` takes a namespace's resolv.conf from
TABLE = "headcni_mesh"  # of nft, one on the host and one inside

# tailscaled takes link-local addresses for "no network"; these are ordinary private ones.
_LINKS4 = ("192.168.255.252/30", "172.31.255.252/30", "10.255.255.252/30")
_LINK6 = "fd68:6561:6463:6e69::/126"
_TRIES = 64
_RESOLV_CONFS = (
    "/etc/resolv.conf",
    "/run/systemd/resolve/resolv.conf",
    "/etc/resolv.pre-tailscale-backup.conf",
)
_MAGIC_DNS = (ip_address("100.100.100.100"), ip_address("fd7a:115c:a1e0::53"))


class _See:
    """Compares, and if asked to, repairs: CHECK and `ensure` are one walk."""

    def __init__(self, repairing: bool) -> None:
        self.repairing = repairing
        self.found: list[str] = []

    def __call__(self, right: bool, difference: str, repair: Callable[[], object]) -> bool:
        """Whether it is right now."""
        if right:
            return True
        self.found.append(difference)
        if self.repairing:
            repair()
        return self.repairing

    def sysctl(self, path: str, value: str, where: str = "") -> None:
        have = netns.read_sysctl(path)
        self(
            have in (None, value),
            f"{where}sysctl {path.replace('/', '.')}: {have}, expected {value}",
            lambda: netns.write_sysctl(path, value),
        )


class MeshNamespace:
    """The namespace, the cable to it, and what the host and it need to pass packets on."""

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
        """Where routes into the mesh lead, by IP version; the link must be there."""
        with _kernel_errors(), IPRoute() as kernel:
            return self._cable(kernel).inside

    @property
    def exists(self) -> bool:
        return named_netns.is_there(self.path)

    def ensure(self) -> list[str]:
        """Make it right. Says what was not; nothing is touched that was."""
        with self._alone():
            return self._walk(_See(repairing=True))

    def differences(self) -> list[str]:
        """What `ensure` would repair."""
        with _kernel_errors():
            return self._walk(_See(repairing=False))

    def remove(self) -> None:
        """Leave nothing, whatever part of it is there. Forwarding stays on: pods need it."""
        with self._alone():
            if named_netns.is_there(self.path):
                self._refuse_if_in_use()
            with IPRoute() as kernel:
                for rule in _rules_of(kernel):
                    _rule(kernel, "del", rule)
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

    # The walk, from the outside in.

    def _walk(self, see: _See) -> list[str]:
        with IPRoute() as kernel:
            cable = self._cable(kernel)
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
        self._see_file(see, self._resolv_conf, self._resolv())
        endpoints = ",".join(endpoint(one, self.config.port) for one in cable.underlay[:3])
        self._see_file(
            see,
            self._environment,
            f"HEADCNI_PORT={self.config.port}\nTS_DEBUG_PRETENDPOINT={endpoints}\n",
        )
        return see.found

    def _connected(self, see: _See, kernel: Any, cable: Cable, fd: int) -> bool:
        """One pair, one end here and the other there; a pair with an end elsewhere is made anew."""
        ours = _named(kernel, self.interface)
        if ours is not None and _kind(ours) != "veth":
            raise CniError(
                KERNEL,
                f"{self.interface} is a {_kind(ours) or 'link'} that HeadCNI did not make",
                "remove it, or choose another interface name",
            )
        with netns.entered(fd), IPRoute() as inside:
            theirs = _named(inside, INSIDE)
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
        link = _named(kernel, self.interface)
        if link is None or _kind(link) != "veth":
            return
        try:
            kernel.link("del", index=link["index"])
        except NetlinkError as problem:
            if problem.code != errno.ENODEV:  # it went with the namespace of a moment ago
                raise

    def _see_host(self, see: _See, kernel: Any, cable: Cable) -> None:
        self._keep_router_advertisements(see, kernel)
        see.sysctl("net/ipv4/ip_forward", "1")
        see.sysctl("net/ipv6/conf/all/forwarding", "1")
        # Set before the link has an address: nothing of ours is learnt from a neighbour there.
        see.sysctl(f"net/ipv6/conf/{self.interface}/accept_ra", "0")
        see.sysctl(f"net/ipv4/conf/{self.interface}/rp_filter", "2")
        index = _see_link(see, kernel, "", self.interface, cable, cable.host)
        _see_table(see, "", mesh_rules.host_chains(self.config, cable))
        wanted = mesh_rules.host_routes(self.config, cable)
        _see_routes(see, kernel, "", index, wanted, ROUTES_TABLE, exactly=True)
        _see_rules(see, kernel, "", mesh_rules.host_rules(self.config, cable))

    def _keep_router_advertisements(self, see: _See, kernel: Any) -> None:
        """A node that forwards forgets its default router, unless accept_ra is 2."""
        if netns.read_sysctl("net/ipv6/conf/all/forwarding") != "0":
            return
        for route in kernel.get_routes(family=socket.AF_INET6, table=RT_TABLE_MAIN):
            if route["dst_len"] == 0 and route["proto"] == 9:  # RTPROT_RA
                name = _name_of(kernel, route.get("RTA_OIF"))
                if name and netns.read_sysctl(f"net/ipv6/conf/{name}/accept_ra") == "1":
                    see.sysctl(f"net/ipv6/conf/{name}/accept_ra", "2")

    def _see_inside(self, see: _See, kernel: Any, cable: Cable) -> None:
        where = f"in {self.config.namespace}: "
        see.sysctl("net/ipv4/ip_forward", "1", where)
        see.sysctl("net/ipv6/conf/all/forwarding", "1", where)
        # Pods' packets come in by one link and their answers by another rule's table.
        see.sysctl("net/ipv4/conf/all/rp_filter", "2", where)
        see.sysctl(f"net/ipv6/conf/{INSIDE}/accept_ra", "0", where)
        lo = _named(kernel, "lo")
        see(
            bool(lo["flags"] & IFF_UP),
            f"{where}lo is down",
            lambda: kernel.link("set", index=lo["index"], state="up"),
        )
        index = _see_link(see, kernel, where, INSIDE, cable, cable.inside)
        # Before the routes: a packet must not get through before its address is looked after.
        _see_table(see, where, mesh_rules.inside_chains(self.config, cable))
        _see_routes(see, kernel, where, index, mesh_rules.inside_routes(cable), RT_TABLE_MAIN)
        _see_rules(see, kernel, where, mesh_rules.inside_rules(self.config, cable))

    # What is chosen.

    def _cable(self, kernel: Any) -> Cable:
        config = self.config
        ours = _named(kernel, self.interface)
        index = ours["index"] if ours is not None else 0
        have = [ip_network(one, strict=False) for one in _addresses(kernel, index)]
        versions = [4]
        if netns.read_sysctl("net/ipv6/conf/default/disable_ipv6") == "0":
            versions.append(6)
        links = []
        for version in versions:
            given = config.link4 if version == 4 else config.link6
            known = [one for one in have if one.version == version and one.num_addresses == 4]
            links.append(given or (known[0] if known else self._free_link(kernel, version)))
        ways_out = _ways_out(kernel, index)
        mtus = [link.get("IFLA_MTU") for link in ways_out]
        underlay = config.underlay or tuple(_underlay_of(kernel, ways_out, versions))
        return Cable(tuple(links), config.mtu or min(mtus, default=1500), underlay)

    def _free_link(self, kernel: Any, version: int) -> Network:
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        taken = [one for one in _destinations(kernel, family) if one.prefixlen]
        taken += [*self.config.tailnet, *self.config.pod_cidrs]
        taken = [one for one in taken if one.version == version]
        # Where somebody routes all private ranges as a whole, only a narrower route is a clash.
        narrow = [one for one in taken if one.prefixlen > (16 if version == 4 else 48)]
        for routes in (taken, narrow):
            for candidate in _candidates(version):
                if not any(candidate.overlaps(one) for one in routes):
                    return candidate
        raise CniError(
            INVALID_CONFIG,
            f"no private IPv{version} network is free for {self.interface}",
            f"set link{version}",
        )

    def _resolv(self) -> str:
        """tailscaled's own look-ups, the control server's name above all. The host's stub
        resolver is on a loopback address, and its MagicDNS would be the namespace's own."""
        servers = list(self.config.nameservers)
        for path in () if servers else _RESOLV_CONFS:
            servers = [
                one
                for one in _nameservers(path)
                if not one.is_loopback and not one.is_link_local and one not in _MAGIC_DNS
            ]
            if servers:
                break
        return "".join(
            [
                "# Written by headcni.mesh.namespace\n",
                *(f"nameserver {one}\n" for one in servers),
            ]
        )

    def _see_file(self, see: _See, path: str, text: str) -> None:
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
        """The unit and the daemon may come at the same moment."""
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


# What the kernel has, and making it what it should be. Each acts where its handle was opened.


def _see_link(
    see: _See, kernel: Any, where: str, name: str, cable: Cable, end: Mapping[int, Address]
) -> int:
    link = _named(kernel, name)
    index: int = link["index"]
    see(
        link.get("IFLA_MTU") == cable.mtu,
        f"{where}{name} has MTU {link.get('IFLA_MTU')}, expected {cable.mtu}",
        lambda: kernel.link("set", index=index, mtu=cable.mtu),
    )
    have, want = _addresses(kernel, index), cable.prefixed(end)
    for one in sorted(want - have):
        # Not probed for: nobody else is on the link.
        see(
            False,
            f"{where}{name} has no address {one}",
            partial(kernel.addr, "add", index=index, address=one, flags=0x02),
        )
    for one in sorted(have - want):
        see(
            False,
            f"{where}{name} has the address {one}, which is not of the link",
            partial(kernel.addr, "del", index=index, address=one),
        )
    see(
        bool(link["flags"] & IFF_UP),
        f"{where}{name} is down",
        lambda: kernel.link("set", index=index, state="up"),
    )
    return index


def _see_routes(
    see: _See,
    kernel: Any,
    where: str,
    index: int,
    wanted: Sequence[Mapping[str, Any]],
    table: int,
    exactly: bool = False,
) -> None:
    have = [
        route
        for family in (socket.AF_INET, socket.AF_INET6)
        for route in _routes(kernel, family, table)
    ]

    def replace(route: Mapping[str, Any]) -> None:
        extra = {key: route[key] for key in ("prefsrc",) if key in route}
        if "mtu" in route:
            extra["metrics"] = {"mtu": route["mtu"]}
        kernel.route(
            "replace",
            family=socket.AF_INET6 if ":" in route["dst"] else socket.AF_INET,
            dst=route["dst"],
            gateway=route["gateway"],
            oif=index,
            table=table,
            proto=RTPROT_HEADCNI,
            **extra,
        )

    for route in wanted:
        full = {**route, "oif": index}
        see(
            any(full.items() <= one.items() for one in have),
            f"{where}no route {route['dst']} via {route['gateway']}",
            partial(replace, route),
        )
    known = {route["dst"] for route in wanted}
    for route in have if exactly else ():
        see(
            route["dst"] in known,
            f"{where}a route {route['dst']} too many in table {table}",
            partial(kernel.route, "del", dst=route["dst"], table=table),
        )


def _see_rules(see: _See, kernel: Any, where: str, wanted: Iterable[Rule]) -> None:
    want, have = set(wanted), _rules_of(kernel)
    for rule in sorted(want - set(have)):
        see(False, f"{where}no rule {_shown(rule)}", partial(_rule, kernel, "add", rule))
    for rule in sorted(set(have) - want):
        see(
            False,
            f"{where}a rule too many: {_shown(rule)}",
            partial(_rule, kernel, "del", rule),
        )


def _shown(rule: Rule) -> str:
    words = [f"{rule.priority}:"]
    mark = f"{rule.mark:#x}/{TAILSCALED_MASK:#x}" if rule.mark else ""
    shown = {"from": rule.src or "all", "to": rule.dst, "iif": rule.iif, "fwmark": mark}
    for word, value in shown.items():
        words += [word, value] if value else []
    table = "main" if rule.table == RT_TABLE_MAIN else rule.table
    return " ".join([*words, f"goto {rule.goto}" if rule.goto else f"lookup {table}"])


def _rule(kernel: Any, verb: str, rule: Rule) -> None:
    given: dict[str, Any] = {"priority": rule.priority}
    keys = ("table", "src", "dst", "goto")
    given.update({key: value for key in keys if (value := getattr(rule, key))})
    if rule.iif:
        given["iifname"] = rule.iif
    if rule.mark:
        given.update(fwmark=rule.mark, fwmask=TAILSCALED_MASK)
    if rule.goto:
        given["action"] = "goto"
    family = socket.AF_INET if rule.version == 4 else socket.AF_INET6
    kernel.rule(verb, family=family, protocol=RTPROT_HEADCNI, **given)


def _rules_of(kernel: Any) -> list[Rule]:
    found = []
    for version, family in ((4, socket.AF_INET), (6, socket.AF_INET6)):
        for one in kernel.get_rules(family=family):
            if one.get("FRA_PROTOCOL") != RTPROT_HEADCNI:
                continue
            if one.get("FRA_PRIORITY") not in PRIORITIES:
                continue
            ends = {
                key: f"{one.get(attribute)}/{one[f'{key}_len']}" if one.get(attribute) else ""
                for key, attribute in (("src", "FRA_SRC"), ("dst", "FRA_DST"))
            }
            found.append(
                Rule(
                    version,
                    one.get("FRA_PRIORITY"),
                    one.get("FRA_TABLE") or 0,
                    one.get("FRA_IIFNAME") or "",
                    mark=one.get("FRA_FWMARK") or 0,
                    goto=one.get("FRA_GOTO") or 0,
                    **ends,
                )
            )
    return found


def _see_table(see: _See, where: str, chains: Mapping[str, Sequence[str]]) -> None:
    """Replaced whole, in one transaction, if its digest or its rules are not right. Each rule has a
    comment, by which another one in its place is noticed."""
    body, expected = "", []
    for name, (hook, *rules) in chains.items():
        lines = [f'{rule} comment "rule {at}"' for at, rule in enumerate(rules, 1)]
        expected += [(name, f"rule {at}") for at in range(1, len(rules) + 1)]
        body += "\n".join([f"chain {name} {{", hook, *lines, "}", ""])
    comment = f"headcni {hashlib.sha256(body.encode()).hexdigest()[:24]}"
    have = nft.table_comment(TABLE, here_only=True)
    if have is None:
        what = "missing"
    elif have != comment:
        what = "not what this release and configuration would write"
    else:
        have_rules = nft.contents_here(TABLE).rules
        missing = sum(rule not in have_rules for rule in expected)
        changed = f"lacks {missing} of its rules" if missing else "its rules were changed"
        what = "" if have_rules == tuple(expected) else changed
    see(
        not what,
        f"{where}nft table inet {TABLE}: {what}",
        lambda: nft.run_here(
            f"table inet {TABLE}\ndelete table inet {TABLE}\n"
            f'table inet {TABLE} {{ comment "{comment}"\n{body}}}\n'
        ),
    )


def _named(kernel: Any, name: str) -> Any:
    return next((one for one in kernel.get_links() if one.get("IFLA_IFNAME") == name), None)


def _name_of(kernel: Any, index: Optional[int]) -> str:
    links = kernel.get_links(index) if index else ()
    return next((one.get("IFLA_IFNAME") for one in links), "")


def _kind(link: Any) -> Optional[str]:
    info = link.get("IFLA_LINKINFO")
    kind: Optional[str] = info.get("IFLA_INFO_KIND") if info else None
    return kind


def _addresses(kernel: Any, index: int) -> set[str]:
    """Of global scope, with their prefix lengths."""
    if not index:
        return set()
    return {
        f"{one.get('IFA_LOCAL') or one.get('IFA_ADDRESS')}/{one['prefixlen']}"
        for one in kernel.get_addr(index=index)
        if one["scope"] == 0
    }


def _routes(kernel: Any, family: int, table: int) -> Iterator[dict[str, Any]]:
    for one in kernel.get_routes(family=family, table=table):
        metrics = one.get("RTA_METRICS")
        yield {
            "dst": f"{one.get('RTA_DST') or ANYWHERE[family]}/{one['dst_len']}",
            "gateway": one.get("RTA_GATEWAY"),
            "oif": one.get("RTA_OIF"),
            "prefsrc": one.get("RTA_PREFSRC"),
            "mtu": metrics.get("RTAX_MTU") if metrics else None,
        }


def _destinations(kernel: Any, family: int) -> Iterator[Network]:
    """Of every route of every table, the local one's addresses among them."""
    for one in kernel.get_routes(family=family):
        if one.get("RTA_DST"):
            yield ip_network(f"{one.get('RTA_DST')}/{one['dst_len']}")


def _candidates(version: int) -> Iterator[Network]:
    for step in range(_TRIES):
        for first in _LINKS4 if version == 4 else (_LINK6,):
            base = ip_network(first)
            offset = -4 * step if version == 4 else 4 * step
            yield ip_network((int(base.network_address) + offset, base.prefixlen))


def _ways_out(kernel: Any, but: int) -> list[Any]:
    """The links that the host's default routes use."""
    found = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in kernel.get_routes(family=family, table=RT_TABLE_MAIN):
            index = one.get("RTA_OIF")
            if one["dst_len"] == 0 and index and index != but and index not in found:
                found[index] = next(iter(kernel.get_links(index)), None)
    return [link for link in found.values() if link is not None]


def _underlay_of(kernel: Any, links: Sequence[Any], versions: Sequence[int]) -> Iterator[Address]:
    """One address of each family: tailscaled sees only the veth's, and what STUN tells it; nodes
    behind one NAT would not find each other."""
    for version in versions:
        for link in links:
            addresses = sorted(_addresses(kernel, link["index"]))
            mine = [ip_address(one.partition("/")[0]) for one in addresses]
            for address in (one for one in mine if one.version == version):
                yield address
                break
            else:
                continue
            break


def _nameservers(path: str) -> list[Address]:
    found = []
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if len(words) > 1 and words[0] == "nameserver":
                with suppress(ValueError):
                    found.append(ip_address(words[1].partition("%")[0]))
    return found
