"""ADD, DEL, CHECK, GC, STATUS and VERSION: what containerd and kubelet ask for.

Each verb reads from top to bottom. It runs the same in a process of its own and in the daemon.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from _socket import socket
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from ipaddress import ip_address, ip_interface, ip_network
from typing import Any, NamedTuple, Optional, TypeVar

from . import buried, chain, config, result, unrecorded
from .call import Call, cni_args
from .datapath import blocked, firewall, guard, link, netns, nft
from .datapath.netlink import Netlink
from .errors import (
    ADDRESS_TAKEN,
    BAD_ENVIRONMENT,
    CHECK_FAILED,
    INTERNAL,
    INVALID_CONFIG,
    LIMITED,
    NOT_AVAILABLE,
    STORE,
    TRY_AGAIN,
    UNSUPPORTED_FIELD,
    CniError,
    shortened,
)
from .exec import ensure_plugins_allowed
from .ipam.allocate import Ipam
from .ipam.config import ROUTE_KEYS, ensure_may_ask
from .ipam.config import TYPE as OUR_IPAM
from .model import Address, Dns, Lease, LeasedAddress, NetworkConfig, Owner, PodRef, Route
from .record import dataclass, field, replace
from .shared.modes import LINKS
from .shim import HAND_OVER_SECONDS, MAGIC
from .store import PRESENT, Attachment, Store, Tombstone, holder_of, last_known

ASKED_AGAIN = 64  # another IPAM, whose address a pod has that it does not know of
TRIES = 3  # for what a link that is still to be deleted may stand in the way of

LONGEST_TRACE = 16384  # characters; an exception may quote all of its input

ROUTE_NUMBERS = ROUTE_KEYS[2:]

T = TypeVar("T")


@dataclass
class Node:
    """The handles that verbs use: the store, and netlink in the node's own namespace."""

    store: Store
    ipam: Ipam
    kernel: Netlink
    bury: Optional[Callable[[], None]] = None  # given where somebody deletes links after the answer
    phases: dict[str, float] = field(default_factory=dict)
    attachment: Optional[Attachment] = None  # what ADD made or found, and what DEL took away

    def phase(self, name: str) -> AbstractContextManager[None]:
        return _timed(self.phases, name)


@contextmanager
def opened(data_dir: str) -> Iterator[Node]:
    """Handles for one call in a process of its own. The daemon has an opener of its own, warm."""
    with Store.in_directory(data_dir) as store, Netlink() as kernel:
        yield Node(store, Ipam(store), kernel)


@contextmanager
def opened_until_exit(data_dir: str) -> Iterator[Node]:
    """The same for a process that ends with the call. Closing the store would copy SQLite's log
    into the database and wait for the disk; the kernel closes it. But only closing it makes the log
    short again, so that is done when it has grown long."""
    store = Store.in_directory(data_dir)
    _left_open.append(store)
    try:
        with Netlink() as kernel:
            yield Node(store, Ipam(store), kernel)
    finally:
        if store.log_size() > LONGEST_LOG:
            store.close()


_left_open: list[Store] = []
LONGEST_LOG = 1 << 20  # bytes of SQLite's log

Opener = Callable[[str], AbstractContextManager[Node]]


class Outcome(NamedTuple):
    """How a call went: for the runtime the first two, for whoever watches the rest."""

    code: int  # 0, or the CNI error's
    output: bytes
    network: Optional[NetworkConfig] = None  # None if the configuration was not understood
    pod: PodRef = PodRef()
    phases: Mapping[str, float] = {}  # seconds each, in order; an error came from the last
    attachment: Optional[Attachment] = None  # what ADD made or found, and what DEL took away
    unrecorded: str = ""  # why a DEL that has succeeded is not in the store

    @property
    def exit_code(self) -> int:
        return 1 if self.code else 0


def run(
    env: Mapping[str, str],
    stdin: bytes,
    netns_fd: Optional[int] = None,
    open_node: Opener = opened,
) -> Outcome:
    """One call, from what the runtime gave to what belongs on stdout."""
    network, pod, phases, attachment = None, PodRef(), dict[str, float](), None
    not_recorded = ""
    try:
        call = Call.of(env, netns_fd)
        pod = call.pod
        if call.command == "VERSION":
            answer: Optional[Mapping[str, Any]] = {
                "cniVersion": _answer_version(stdin),
                "supportedVersions": list(result.VERSIONS),
            }
        else:
            with _timed(phases, "config"):
                network = config.parse(stdin, env, forgiving=call.command == "DEL")
                _require_verb(call.command, network.cni_version)
            if network.delegates or _other_ipam(network):
                ensure_plugins_allowed()  # before anything of the call is done
            try:
                with open_node(network.data_dir) as node:
                    node.phases = phases
                    if node.store.is_unverified():
                        _recover(node, network, call)
                    answer = VERBS[call.command](node, network, call)
                    attachment = node.attachment
            except CniError as problem:
                if call.command != "DEL" or problem.code != STORE:
                    raise
                attachment = _delete_unrecorded(network, call, problem)
                answer, not_recorded = None, str(problem)
    except Exception as problem:
        return Outcome(*failure(problem, env, stdin), network, pod, phases)
    output = b"" if answer is None else _encode(answer)
    return Outcome(0, output, network, pod, phases, attachment, not_recorded)


def failure(problem: Exception, env: Mapping[str, str], stdin: bytes) -> tuple[int, bytes]:
    """The code, and the error as the runtime gets it. What is no CniError is a bug."""
    if not isinstance(problem, CniError):
        import traceback

        trace = traceback.format_exception(type(problem), problem, problem.__traceback__)
        print(shortened("".join(trace), LONGEST_TRACE), file=sys.stderr)
        problem = CniError(INTERNAL, "a bug in headcni", f"{type(problem).__name__}: {problem}")
    elif env.get("CNI_COMMAND") == "STATUS" and (
        problem.code >= INTERNAL or problem.code == TRY_AGAIN
    ):
        problem = CniError(NOT_AVAILABLE, problem.msg, problem.details)
    return problem.code, _encode(problem.as_dict(_answer_version(stdin)))


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        phases[name] = phases.get(name, 0.0) + time.monotonic() - began


def _recover(node: Node, network: NetworkConfig, call: Call) -> None:
    """The store is new, or was lost. An ADD or GC that does not know what is in use must fail; any
    other verb can do without."""
    from .recover import recover

    try:
        with node.phase("recover"):
            recover(node.store, network)
    except CniError:
        if call.command in ("ADD", "GC"):
            raise


def add(node: Node, network: NetworkConfig, call: Call) -> Mapping[str, Any]:
    _refuse_what_is_not_there(network)
    owner, pod, labels = owner_of(network, call), call.pod, _labels(network, call)
    opens = node.store.opens
    unrecorded.settle(node.store, owner)
    pending, known = node.store.read(
        lambda _unused: (node.store.tombstones(), node.store.attachment(owner))
    )
    if any(one.owner == owner for one in pending):
        _finish_own_burial(node, owner)
    elif pending and node.bury is None:
        _finished(node)  # what another pod has left is not this pod's concern
    sandbox, ranges = _sandbox(call), dict[str, list[str]]()
    addresses: Sequence[LeasedAddress] = ()
    if known is not None:
        if _still_there(node, known, call, sandbox):
            node.attachment = known
            return result.shape(known.result, network.cni_version)
        _undo(node, network, owner, call, known)  # another sandbox by the same name, or half of one

    with ExitStack() as undo:
        if network.delegates:
            with node.phase("delegates"):
                made = chain.add(network, call.env, owner, node.store)
            undo.callback(chain.delete, network, call.env, owner, node.store)
            firewall.ensure(node.store, owner.network, {}, pod, addresses_of(made))
            host = ""
        else:
            fd = undo.enter_context(_pod_namespace(call))
            undo.callback(_give_back, node, network, owner)
            with node.phase("ipam"):
                given = _unhindered(node, pending, lambda: _lease(node, network, owner, call, undo))
            addresses = given.addresses
            with node.phase("link"):
                planned = link.plan(network, owner, given.addresses, given.routes)
            if _has_policies(network):
                with node.phase("policy"):
                    undo.callback(_dismiss, owner, addresses)
                    _admit(node, network, owner, pod, planned)
            with node.phase("link"):
                station = guard.station_of(network, planned, pod)
                cable = _unhindered(
                    node, pending, lambda: _connect(node.kernel, network, planned, fd, station)
                )
            undo.callback(link.disconnect, node.kernel, cable.host)
            with node.phase("firewall"):
                if network.datapath == "bridge" and _leads_from_loopback(network.bridge):
                    open_loopback(node.kernel, network, cable)  # for a neighbour; not to this pod
                ranges = ranges_of(network, given.addresses)
                led_to = [one.address for one in given.addresses]
                firewall.ensure(node.store, owner.network, ranges, pod, led_to)
                ports = firewall.ports_of(network, given.addresses)
                if ports:
                    refuse_host_ports_of_the_node(network, ports)
                    open_loopback(node.kernel, network, cable)
                    undo.callback(firewall.withdraw_leftovers, node.store, led_to)
                undo.callback(firewall.withdraw, node.store, owner)
                firewall.publish(node.store, owner, pod, ports)
            with node.phase("dns"):
                dns = result.dns_of(_dns(network.dns, given.dns))
            made, host = _result(network, cable, call.netns, dns), cable.host
        state = {"netns": sandbox, "ranges": ranges, **labels}
        node.attachment = Attachment(
            owner, pod, call.netns, host, dict(network.raw), made, state, time.time()
        )
        with node.phase("store"):
            _remember(node, node.attachment, addresses, opens)
        undo.pop_all()  # past this line the pod owns them
    return result.shape(made, network.cni_version)


def _labels(network: NetworkConfig, call: Call) -> dict[str, Any]:
    """For the daemon, if the pod's policies and labels do not come from Kubernetes."""
    if not network.enable_network_policy:
        return {}
    from . import pod_labels

    found = pod_labels.of_call(cni_args(call.env), network.runtime_config)
    return {"labels": found} if found else {}


def _has_policies(network: NetworkConfig) -> bool:
    """Whether network policies concern a pod: those of its network, or of another one, which may
    have the same bridge."""
    return network.enable_network_policy or nft.table_comment(nft.POLICIES) is not None


def _admit(
    node: Node, network: NetworkConfig, owner: Owner, pod: PodRef, planned: link.Cable
) -> None:
    from .policy import admission  # most nodes have no policies

    admission.admit(node.store, node.kernel, network, owner, pod, planned)


def _dismiss(owner: Owner, addresses: Sequence[LeasedAddress]) -> None:
    from .policy import admission

    admission.dismiss(owner, [one.address for one in addresses])


def _connect(
    kernel: Netlink,
    network: NetworkConfig,
    planned: link.Cable,
    fd: int,
    station: Optional[guard.Station],
) -> link.Cable:
    with guard.needed():
        return link.connect(
            kernel, network, planned, fd, lambda index: guard.filters_for(station, index)
        )


def _remember(
    node: Node, attachment: Attachment, leased: Sequence[LeasedAddress], opens: int
) -> None:
    """If the store still has the pod's addresses. This is looked at within the transaction, since
    its start is what notices that the file was replaced."""

    def work(db: sqlite3.Connection) -> None:
        if node.store.opens != opens or not _holds(db, attachment.owner, leased):
            raise CniError(
                TRY_AGAIN,
                "the allocation store was replaced while the pod was set up",
                "the new one does not know the pod's address; the runtime has to try again",
            )
        node.store.remember(attachment)

    node.store.atomically(work)


def _holds(db: sqlite3.Connection, owner: Owner, leased: Sequence[LeasedAddress]) -> bool:
    return all(holder_of(db, one.address) == owner for one in leased)


def delete(node: Node, network: NetworkConfig, call: Call) -> None:
    owner = owner_of(network, call)
    node.attachment = node.store.attachment(owner)
    _undo(node, network, owner, call, node.attachment, node.bury)
    if node.bury is None:
        _finished(node)  # what a daemon that was killed has left is not this pod's concern


def _undo(
    node: Node,
    network: NetworkConfig,
    owner: Owner,
    call: Call,
    known: Optional[Attachment],
    bury: Optional[Callable[[], None]] = None,
) -> None:
    """Take away whatever the owner has. Every step is tried, and is fine with finding nothing; the
    address is given back last, when nothing can use it any more. With `bury` the link is only cut,
    and its deletion and the address are left to whoever that calls."""
    failures: list[CniError] = []
    name, served = link.host_name(owner), _as_added(network, known, call)
    _each(
        failures,
        lambda: chain.delete(network, call.env, owner, node.store),
        lambda: _withdraw(node, owner, known),
    )
    withdrawn = not failures
    if bury is not None and withdrawn and not _other_ipam(served):
        index = link.cut(node.kernel, name)
        if index:
            _forget_limits(node, owner, known)
            node.store.bury(Tombstone(owner, index))
            bury()
            return
    _each(
        failures,
        lambda: link.cut(node.kernel, name),
        lambda: _forget_limits(node, owner, known),
        lambda: link.disconnect(node.kernel, name),
    )
    if withdrawn:  # a host port that still leads to the address would lead to its next pod
        _each(failures, lambda: _release(node, served, owner, call))
    _raise(failures)
    node.store.forget(owner)


def _withdraw(node: Node, owner: Owner, known: Optional[Attachment]) -> None:
    """Take the host ports away. An ADD that did not come to its end may have left some that only
    the kernel knows."""
    firewall.withdraw(node.store, owner)
    lease = node.ipam.lease(owner) if known is None else None
    if lease is not None:
        firewall.withdraw_leftovers(node.store, {one.address for one in lease.addresses})


def _delete_unrecorded(
    network: NetworkConfig, call: Call, problem: CniError
) -> Optional[Attachment]:
    """DEL while the store cannot be used: all but the record of it. What the pod had is taken from
    what can still be read of the store, from the runtime's word and from the kernel."""
    owner, failures = owner_of(network, call), list[CniError]()
    known = last_known(network.data_dir, owner)
    served = _as_added(network, known.attachment, call)
    addresses = {*known.addresses, *addresses_of(network.prev_result or {})}
    name = link.host_name(owner)
    with Netlink() as kernel:
        with suppress(CniError):
            addresses.update(_addresses_behind(kernel, name))
        _each(
            failures,
            lambda: chain.delete(network, call.env, owner, known),
            lambda: _withdraw_unrecorded(addresses),
            lambda: link.disconnect(kernel, name),
        )
    if _other_ipam(served):
        _each(failures, lambda: chain.ipam_del(served, call.env))
    _raise(failures)
    unrecorded.note(network.data_dir, owner, problem)
    return known.attachment


def _withdraw_unrecorded(addresses: Container[Address]) -> None:
    with suppress(CniError):  # the address stays allocated, so a port that stays leads nowhere
        firewall.withdraw_from_kernel(addresses)


def _addresses_behind(kernel: Netlink, name: str) -> Iterator[Address]:
    """Not what the pod says itself: it might name its neighbour's, and with it the host ports."""
    from .datapath import seen  # only where the store cannot tell

    links = [one for one in seen.pod_links(kernel) if one.name == name]
    yield from seen.given(links, kernel).get(name, ())


def addresses_of(made: Mapping[str, Any]) -> list[Address]:
    """Those of a result, as far as they can be read."""
    found = []
    for ip in made.get("ips") or ():
        with suppress(ValueError, KeyError, TypeError):
            found.append(ip_interface(ip["address"]).ip)
    return found


def _give_back(node: Node, network: NetworkConfig, owner: Owner) -> None:
    """The address of an ADD that has failed."""
    try:
        node.ipam.release(owner)
    except CniError as problem:
        if problem.code == STORE:
            unrecorded.note(network.data_dir, owner, problem)
        raise


def _raise(failures: Sequence[CniError]) -> None:
    if failures:
        first = failures[0]
        raise CniError(first.code, first.msg, "; ".join([first.details, *map(str, failures[1:])]))


def _forget_limits(node: Node, owner: Owner, known: Optional[Attachment]) -> None:
    """Once the pod cannot send any more."""
    addresses = addresses_of(known.result) if known is not None else []
    if addresses:
        firewall.forget_limits(node.store, addresses)
    if nft.table_comment(nft.POLICIES) is not None:
        from .policy import admission

        admission.dismiss(owner, addresses)


def _each(failures: list[CniError], *steps: Callable[[], object]) -> None:
    for step in steps:
        try:
            step()
        except CniError as problem:
            failures.append(problem)


def _unhindered(node: Node, pending: Sequence[Tombstone], work: Callable[[], T]) -> T:
    """Links that are to be deleted may hold the pod's address, or its interface's name: if so, they
    are not waited for. `pending` may have been deleted since."""
    for _unused in range(TRIES):
        try:
            return work()
        except CniError as problem:
            hindered = isinstance(problem, link.InterfaceTaken)
            if not hindered and problem.code not in (ADDRESS_TAKEN, TRY_AGAIN):
                raise
            if not _finished(node) and not pending:
                raise
            pending = ()
    return work()


def _finished(node: Node) -> int:
    """How many links were deleted; none if one of them cannot be."""
    try:
        return buried.finish(node.store, node.kernel)
    except CniError:
        return 0


def check(node: Node, network: NetworkConfig, call: Call) -> None:
    if network.raw.get("disableCheck") is True:
        return
    owner = owner_of(network, call)
    if network.delegates:
        chain.check(network, call.env, owner, node.store)
        return
    from . import check as compare  # pyroute2 is slow to import, and only CHECK needs it

    found = compare.differences(node, network, owner, call)
    if _other_ipam(network):
        chain.ipam_check(network, call.env)
    if found:
        raise CniError(
            CHECK_FAILED,
            f"the pod's network differs from what was set up, in {len(found)} "
            + ("place" if len(found) == 1 else "places"),
            "; ".join(found),
        )


def gc(node: Node, network: NetworkConfig, call: Call) -> None:
    """Free what no valid attachment uses: the store's, the kernel's, and the delegates'."""
    if network.raw.get("disableGC") is True:
        return
    from .recover import release_unused

    valid = config.valid_attachments(network)
    if valid is None:
        raise CniError(
            INVALID_CONFIG,
            "GC needs the list of valid attachments",
            "cni.dev/valid-attachments is missing: expected a list, possibly empty",
        )
    _finished(node)
    release_unused(node.store)
    name = chain.nested_name(network.name, call.env)
    known = {attachment.owner for attachment in node.store.attachments(name)}
    known.update(node.store.owners_with_plugin_states(name))
    known.update(link.links_of(name).values())
    known.update(firewall.owners(node.store, name))
    failures = []
    for owner in sorted(known):
        if (owner.container_id, owner.ifname) in valid:
            continue
        try:
            known_as = node.store.attachment(owner)
            netns_path = known_as.netns if known_as else ""
            _undo(node, network, owner, call.for_owner(owner, netns_path), known_as)
        except CniError as problem:
            failures.append(f"{owner.container_id} {owner.ifname}: {problem}")
    buried.forget_connections(node.store.atomically(lambda _unused: _collect(node, name, valid)))
    firewall.forget_unused(node.store)
    in_use = {link.host_name(Owner(name, *pair)) for pair in valid}
    for host in link.links_without_owner(name):
        if host not in in_use:
            link.disconnect(node.kernel, host)
    if network.delegates:
        chain.gc(network, call.env, node.store)
    elif _other_ipam(network):
        chain.ipam_gc(network, call.env)
    if failures:
        raise CniError(
            INTERNAL, f"{len(failures)} attachments could not be freed", "; ".join(failures)
        )


def _collect(node: Node, network: str, valid: Iterable[tuple[str, str]]) -> list[Lease]:
    """Free the addresses of ADDs that did not come to their end, and their host ports with them;
    within a transaction, so that nobody gets an address before."""
    dead = node.ipam.collect(network, valid)
    if dead:
        firewall.withdraw_from_kernel({one.address for lease in dead for one in lease.addresses})
    return dead


def status(node: Node, network: NetworkConfig, call: Call) -> None:
    """Silence means that the node can serve pods.

    A full pool is not asked about: kubelet would call the node not ready and evict its pods.
    """
    node.store.prove_writable()
    _refuse_what_is_not_there(network)
    if network.delegates:
        chain.status(network, call.env)
        return
    if _other_ipam(network):
        chain.ipam_status(network, call.env)
    else:
        try:
            _own_dns(network)
        except CniError as unreadable:
            raise CniError(NOT_AVAILABLE, unreadable.msg, unreadable.details) from unreadable
    if network.enable_network_policy and network.datapath != "routed":
        from .policy import admission

        admission.ensure_bridge_filter()
    if network.ip_masq and not firewall.is_current(node.store):
        firewall.try_out()  # no pod has tried yet
    if {"headscale_url", "tailscale_socket"} & set(network.raw):
        _require_mesh(node, network)
    problem = blocked.read()
    if problem:
        raise CniError(LIMITED, "another firewall on this node blocks pods", problem)


def _require_mesh(node: Node, network: NetworkConfig) -> None:
    """A runtime that is told of a missing interface reports the node as not ready, and its pods
    are evicted. So an interface that was there, and is gone for moments only, is not missing: a
    tailscaled that restarts takes its interface along. When it went is kept in the store, as most
    calls of STATUS are processes of their own."""
    mesh, now = LINKS[network.mode], time.clock_gettime(time.CLOCK_BOOTTIME)
    seen = node.store.mesh_seen(mesh)
    if node.kernel.index(mesh):
        if seen != PRESENT:
            node.store.note_mesh(mesh, PRESENT)
        return
    if seen == PRESENT:
        node.store.note_mesh(mesh, now)
        seen = now
    if seen is None or now - seen >= network.mesh_grace:
        since = f"for {now - seen:.0f} s" if seen is not None else "since the node started"
        raise CniError(
            LIMITED,
            f"{mesh} is not there, so pods cannot reach other nodes",
            f"it is missing {since} (mesh_grace is {network.mesh_grace:g} s), mode is "
            f"{network.mode}; see: systemctl status "
            + ("tailscaled" if network.mode == "host" else "headcni-tailscaled"),
        )


VERBS: dict[str, Callable[[Node, NetworkConfig, Call], Any]] = {
    "ADD": add,
    "DEL": delete,
    "CHECK": check,
    "GC": gc,
    "STATUS": status,
}
_SINCE = {"CHECK": "0.4.0", "GC": "1.1.0", "STATUS": "1.1.0"}


def _require_verb(verb: str, version: str) -> None:
    since = _SINCE.get(verb)
    if since and result.before(version, since):
        raise CniError(
            1, f"{verb} is not part of CNI {version}", f"it came with {since}: raise cniVersion"
        )


def _refuse_what_is_not_there(network: NetworkConfig) -> None:
    """A promise of security that nobody keeps is worse than none."""
    if network.enable_network_policy and network.delegates:
        raise CniError(
            UNSUPPORTED_FIELD,
            "enable_network_policy is true, but delegates make the pods' links, and HeadCNI "
            "enforces network policies only on links of its own",
            "set it to false, or take delegate and plugins out of the configuration",
        )
    if network.prev_result is not None and not network.delegates:
        raise CniError(
            INVALID_CONFIG,
            "headcni makes the pod's interface, so it must be the first plugin of the list",
            "a prevResult was given",
        )


def owner_of(network: NetworkConfig, call: Call) -> Owner:
    return chain.nested(Owner(network.name, call.container_id, call.ifname), call.env)


def _finish_own_burial(node: Node, owner: Owner) -> None:
    """Delete the link of the owner's previous pod; links of others may stay if they must."""
    try:
        buried.finish(node.store, node.kernel)
    except CniError:
        if any(one.owner == owner for one in node.store.tombstones()):
            raise


def _sandbox(call: Call) -> list[int]:
    """The namespace's device and inode: a path may lead to another one tomorrow. Empty if it
    cannot be looked at, which is an error only to whoever needs it."""
    try:
        seen = os.stat(call.netns if call.netns_fd is None else call.netns_fd)
    except OSError:
        return []
    return [seen.st_dev, seen.st_ino]


def _still_there(node: Node, known: Attachment, call: Call, sandbox: list[int]) -> bool:
    """Whether the pod that is asked for has what ADD made: the same namespace, its interfaces in
    it, and the host's end."""
    then = known.state.get("netns")  # not there in attachments of older releases
    if known.netns != call.netns or (then and then != sandbox):
        return False
    if known.host_ifname and not node.kernel.index(known.host_ifname):
        return False
    made = [one["name"] for one in known.result.get("interfaces", ()) if one.get("sandbox")]
    try:
        with netns.opened(call.netns, call.netns_fd) as fd, netns.entered(fd), Netlink() as inside:
            return all(inside.index(name) for name in made)
    except CniError:
        return not made


@contextmanager
def _pod_namespace(call: Call) -> Iterator[int]:
    with netns.opened(call.netns, call.netns_fd) as fd:
        if netns.is_our_own(fd):
            raise CniError(
                BAD_ENVIRONMENT,
                f"CNI_NETNS={call.netns} is the node's own network namespace",
                "a pod on the host's network needs no CNI",
            )
        yield fd


class _Given(NamedTuple):
    """What an IPAM gives to a pod."""

    addresses: Sequence[LeasedAddress] = ()
    routes: Sequence[Route] = ()
    dns: Dns = Dns()


def _lease(node: Node, network: NetworkConfig, owner: Owner, call: Call, undo: ExitStack) -> _Given:
    """From our own IPAM in this process, or from another one as a plugin of its own."""
    if not network.ipam.type:
        return _Given()
    if network.ipam.type == OUR_IPAM:
        ensure_may_ask(network.ipam, call.pod.namespace)
        dns = _own_dns(network)
        ranges = network.ipam.range_sets
        if network.ipam.raw.get("importHostLocal"):
            from .ipam.hostlocal import import_on_request  # few networks ask for it

            import_on_request(node.store, owner.network, network.ipam.raw, ranges)
        in_use = link.address_in_use(node.kernel)
        lease = node.ipam.allocate(owner, network.ipam, str(call.pod), in_use)
        return _Given(lease.addresses, network.ipam.routes, dns)
    refused: list[LeasedAddress] = []
    for _unused in range(ASKED_AGAIN):
        given = chain.ipam_add(network, call.env)
        with ExitStack() as give_back:
            give_back.callback(chain.ipam_del, network, call.env)
            leased = [_leased(ip) for ip in given["ips"]]
            # Known to ours, too: a node that changes over to it has pods which the other one
            # served. And one that has changed over to the other has pods which ours has served.
            if node.ipam.note(owner, str(call.pod), leased):
                undo.push(give_back.pop_all())
                return _Given(leased, routes_of(given), _dns_of(given))
        if leased == refused:
            break
        refused = leased
    raise CniError(
        ADDRESS_TAKEN,
        f"{network.ipam.type} gave {', '.join(str(one.address) for one in refused)}, "
        "which another pod of this node has",
        f"that pod has it from before ipam.type was {network.ipam.type}; drain the node, "
        "or exclude the address there",
    )


def _own_dns(network: NetworkConfig) -> Dns:
    path = network.ipam.raw.get("resolvConf")
    if not path:
        return Dns()
    from .ipam.resolvconf import read_resolv_conf

    return read_resolv_conf(path)


def _dns(configured: Dns, given: Dns) -> Dns:
    """The configuration's word over the IPAM's, each for what it names."""
    return Dns(
        configured.nameservers or given.nameservers,
        configured.domain or given.domain,
        configured.search or given.search,
        configured.options or given.options,
    )


def _dns_of(given: Mapping[str, Any]) -> Dns:
    dns = given.get("dns", {})
    lists = (tuple(dns.get(key, ())) for key in ("nameservers", "search", "options"))
    nameservers, search, options = lists
    return Dns(nameservers, dns.get("domain", ""), search, options)


def routes_of(given: Mapping[str, Any]) -> tuple[Route, ...]:
    """A result's routes."""
    return tuple(
        Route(
            ip_network(route["dst"], strict=False),
            ip_address(route["gw"]) if "gw" in route else None,
            **{key: route.get(key) for key in ROUTE_NUMBERS},
        )
        for route in given.get("routes", ())
    )


def ranges_of(network: NetworkConfig, leased: Sequence[LeasedAddress]) -> dict[str, list[str]]:
    """What the pod needs of the firewall. Another IPAM may keep its ranges to itself, but the
    addresses that it gives tell their networks."""
    if not leased:
        return {}
    if not network.pod_cidrs:
        networks = dict.fromkeys(ip_network(one.interface, strict=False) for one in leased)
        network = replace(network, pod_cidrs=tuple(networks))
    return firewall.ranges_of(network)


def _leased(ip: Mapping[str, Any]) -> LeasedAddress:
    interface = ip_interface(ip["address"])
    gateway = ip_address(ip["gateway"]) if ip.get("gateway") else None
    return LeasedAddress(interface.ip, interface.network.prefixlen, gateway)


def _as_added(network: NetworkConfig, known: Optional[Attachment], call: Call) -> NetworkConfig:
    """With the IPAM that gave the pod its address, where the node has changed over to another."""
    then = known.config.get("ipam") if known is not None else None
    if known is None or not isinstance(then, dict) or "type" not in then:
        return network
    if then["type"] == network.ipam.type:
        return network
    try:
        return config.parse(json.dumps(known.config).encode(), call.env, forgiving=True)
    except CniError:
        return network


def _release(node: Node, network: NetworkConfig, owner: Owner, call: Call) -> None:
    lease = node.ipam.lease(owner)
    if lease is not None:
        buried.forget_connections([lease])
        node.ipam.release(owner)
    if _other_ipam(network):
        chain.ipam_del(network, call.env)


def _other_ipam(network: NetworkConfig) -> bool:
    return network.ipam.type not in (OUR_IPAM, "") and not network.delegates


def refuse_host_ports_of_the_node(network: NetworkConfig, ports: Sequence[firewall.Port]) -> None:
    from .datapath import host_ports  # most pods have none

    host_ports.refuse_those_of_the_node(network, ports)


def _leads_from_loopback(bridge: str) -> bool:
    return netns.read_sysctl(f"net/ipv4/conf/{bridge}/route_localnet") == "1"


def open_loopback(kernel: Netlink, network: NetworkConfig, cable: link.Cable) -> None:
    """Let 127.0.0.1:hostPort on the node lead to the pod, and nothing else of 127.0.0.0/8."""
    from .datapath import loopback_ports  # most pods have no host ports

    through = cable.host if network.datapath == "routed" else network.bridge
    loopback_ports.open_on(kernel, through, cable.host)


def _result(
    network: NetworkConfig, cable: link.Cable, sandbox: str, dns: dict[str, Any]
) -> dict[str, Any]:
    interfaces: list[dict[str, Any]] = []
    if network.datapath != "routed":
        interfaces.append({"name": network.bridge})
    if network.bandwidth.egress_rate:
        interfaces.append({"name": link.limiter_of(cable.host)})
    interfaces.append({"name": cable.host, "mac": cable.host_mac, "mtu": network.mtu})
    interfaces.append(
        {"name": cable.pod, "mac": cable.pod_mac, "mtu": network.mtu, "sandbox": sandbox}
    )
    ips = result.ips_of(cable.addresses, len(interfaces) - 1)
    made: dict[str, Any] = {"cniVersion": "1.1.0", "interfaces": interfaces, "ips": ips}
    made["routes"] = [_route(route) for route in cable.routes]
    made["dns"] = dns
    return made


def _route(route: Route) -> dict[str, Any]:
    shown: dict[str, Any] = {"dst": str(route.dst)}
    if route.gateway is not None:
        shown["gw"] = str(route.gateway)
    for key in ROUTE_NUMBERS:
        if getattr(route, key) is not None:
            shown[key] = getattr(route, key)
    return shown


def _answer_version(stdin: bytes) -> str:
    """The version that was asked for, if we speak it; what is wrong with it is said elsewhere."""
    try:
        version = json.loads(stdin).get("cniVersion")
    except (ValueError, AttributeError, RecursionError):
        version = None
    return version if version in result.VERSIONS else result.VERSIONS[-1]


def _encode(answer: Mapping[str, Any]) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode() + b"\n"


def main(stdin: bytes, daemon: Optional[socket] = None) -> int:
    """The process that containerd started, when there is no daemon to ask, or it wants us to run
    the call (`daemon` is the connection to it). Its exit code."""
    outcome = run(os.environ, stdin, open_node=opened_until_exit)
    sys.stdout.buffer.write(outcome.output)
    sys.stdout.flush()
    if daemon is not None:
        _report(daemon, outcome)
    return outcome.exit_code


def _report(daemon: socket, outcome: Outcome) -> None:
    """For the daemon's metrics and events; it may be gone, and then nobody wants to know."""
    output = outcome.output.decode() if outcome.code else ""
    said = {"code": outcome.code, "phases": outcome.phases, "output": output}
    body = json.dumps(said).encode()
    with suppress(OSError):
        daemon.settimeout(HAND_OVER_SECONDS)
        daemon.sendall(MAGIC + len(body).to_bytes(4, "big") + body)
