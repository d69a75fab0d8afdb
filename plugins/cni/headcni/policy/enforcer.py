"""What the daemon uses to enforce network policies: it holds the world, compiles it, and changes
the nft table by no more than what differs.

All methods may be called by any thread. A CniError means that the kernel still has the rules from
before the call; the next `repair` tries again.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Dict, FrozenSet, NamedTuple, Optional, Tuple

from ..datapath import rtnl
from ..datapath.netlink import NETLINK_NETFILTER, SOL_NETLINK, KernelError, Netlink
from ..errors import TRY_AGAIN, CniError
from ..log import Log
from ..model import Address, Owner, PodRef
from ..periodic import Periodic, Source, WakeUp
from ..store import Store
from . import admission, bindings
from .bindings import Binding
from .compiler import Compiler
from .desired import Change, Desired
from .kernel import PolicyTable, is_foreign
from .layout import UNKNOWN
from .objects import EGRESS, INGRESS, Key, Namespace, Pod, Policy, World

DENY, ALLOW = "deny", "allow"  # for a pod whose policies are not known yet
NOBODY: Key = ("", UNKNOWN)  # in place of a policy, for packets of pods that are not known
ADD_SECONDS = 300.0  # an ADD is over by then, and in the store or undone
PAUSE_SECONDS = 0.2  # at least, between two repairs because of changes by others
STOP_SECONDS = 5.0
_NETLINK_ADD_MEMBERSHIP, _NFNLGRP_NFTABLES = 1, 7
_SO_RCVBUFFORCE = 33
_NOTICES = 4 << 20  # bytes of the kernel's notices that wait for us

log = Log("policy")


class Denied(NamedTuple):
    """Packets that a policy has denied. One that several policies denied counts for each."""

    policy: Key
    direction: str  # Ingress or Egress
    packets: int


class PodState(NamedTuple):
    """A pod of this node, as the rules treat it."""

    owner: Owner
    pod: Key
    addresses: Tuple[Address, ...]
    known: bool  # false: its labels are not known yet, so the setting for unknown pods decides
    ingress: Tuple[Key, ...]  # the policies that isolate it; none if the direction is open
    egress: Tuple[Key, ...]
    too_large: Tuple[Tuple[str, Key], ...] = ()  # of these, by direction, what allows nothing


class Report(NamedTuple):
    """For metrics and `headcnictl policy`. Cheap: the kernel is not asked."""

    complete: bool  # the world was listed completely at least once
    pods: Tuple[PodState, ...]
    policies: int  # of the cluster
    peers: int  # addresses of the cluster's pods in the table
    profiles: int  # chains: one for each different combination of policies on this node
    elements: int  # in all sets and maps
    compiles: int  # complete ones since the start
    compile_seconds: float  # of the last complete one, with the kernel's part
    changes: int  # incremental ones since the start
    change_seconds: float  # of the last incremental one, with the kernel's part
    errors: int  # changes that the kernel or the store refused
    repairs: int  # times that the table was not what it should be
    problem: str  # why the kernel does not have the current rules; empty if it has


class Enforcer:
    """From start() to stop(). When it stops, the rules stay in force."""

    def __init__(
        self,
        store: Callable[[], Store],
        unknown: str = DENY,
        log_per_second: int = 0,
        interval: float = 30.0,
        node: str = "",
    ) -> None:
        """`unknown` (DENY or ALLOW) decides about pods whose labels are not known yet, as soon as
        any policy is known. `log_per_second` limits how many denied packets of one chain the kernel
        logs; 0: none. Every `interval` seconds, and when others change its table, it repairs.
        `node` is what Kubernetes calls this node."""
        self._store, self._unknown, self._log_per_second = store, unknown, log_per_second
        self._node = node
        self._lock = threading.RLock()
        self._table: Optional[PolicyTable] = None
        self._compiler: Optional[Compiler] = None  # none until there is a complete world
        self._bindings: Dict[Owner, Binding] = {}
        self._admitted: Dict[Owner, float] = {}  # when; they may not be in the store yet
        self._recorded: Optional[bool] = None  # whether the store says that pods are closed
        self._in_force = False  # whether the kernel has the compiler's table
        self._denied: Counter[Tuple[Key, str]] = Counter()  # by counters that are gone
        self._read: Dict[str, int] = {}  # what counters of the table said last
        self._whose: Dict[str, Tuple[Tuple[Key, ...], str]] = {}  # policies and direction of each
        self._expected: set[str] = set()  # links that other processes were to add pods to
        self._awaited: set[Owner] = set()  # pods that other processes are adding
        self._numbers = Report(False, (), 0, 0, 0, 0, 0, 0.0, 0, 0.0, 0, 0, "")
        self._repaired_at = 0.0
        self._loop = Periodic("policies", self._pass, interval, delay=self._delay)

    def start(self) -> None:
        """Serve ADD and DEL of this process from now on, and take over the table that is there. Its
        rules stay in force until the first complete world."""
        with self._lock:
            self._table = PolicyTable()
            self._table.adopt()
            admission.serve(self)
        notices = _notices()
        source = Source(notices, lambda: self._is_news(notices))
        self._loop.start([source], at_end=notices.close)

    def stop(self) -> None:
        """ADD and DEL of other processes keep the table closed for pods that they do not know."""
        admission.serve(None)
        self._loop.stop(STOP_SECONDS)
        with self._lock:
            if self._table is not None:
                self._table.close()
                self._table = None

    def is_alive(self) -> bool:
        return self._loop.is_alive()

    def every(self, seconds: float) -> None:
        """Change the interval between regular repairs."""
        self._loop.every(seconds)

    def configure(self, unknown: str, log_per_second: int) -> None:
        """Change the settings while it runs."""
        with self._lock:
            anew = log_per_second != self._log_per_second
            self._unknown, self._log_per_second = unknown, log_per_second
            if self._compiler is None:
                return
            if anew:
                self.set_world(self._compiler.world)
            else:
                with self._changing() as compiler:
                    compiler.deny_unknown(unknown == DENY)

    def set_world(self, world: World) -> None:
        """Everything anew, after a list: compiled and compared with what is in force. The enforcer
        keeps the world and changes it by the methods below, so hand over dictionaries that nobody
        else changes. An incomplete world only counts as `no complete list yet`: it does not replace
        a complete one."""
        if not world.complete:
            return
        with self._lock:
            began = time.monotonic()
            self._reconcile()
            compiler = Compiler(self._unknown == DENY, self._log_per_second, self._node)
            compiler.load(world, self._bindings.values())
            before, self._compiler = self._compiler, compiler
            for name in self._links_to_keep():
                compiler.expect(name)
            for owner in self._awaited:
                compiler.awaits(owner)
            if before is not None and self._in_force:
                compiler.desired.follow(before.desired)
            try:
                self._write()
            finally:
                took = time.monotonic() - began
                self._count(compiles=self._numbers.compiles + 1, compile_seconds=took)

    def pod_changed(self, key: Key, pod: Optional[Pod]) -> None:
        """A pod of any node was added or changed; None: it was deleted."""
        with self._lock:
            if self._compiler is not None:
                with self._changing() as compiler:
                    compiler.pod_changed(key, pod)

    def namespace_changed(self, name: str, namespace: Optional[Namespace]) -> None:
        """The same for a namespace."""
        with self._lock:
            if self._compiler is not None:
                with self._changing() as compiler:
                    compiler.namespace_changed(name, namespace)

    def policy_changed(self, key: Key, policy: Optional[Policy]) -> None:
        """The same for a policy."""
        with self._lock:
            if self._compiler is not None:
                with self._changing() as compiler:
                    compiler.policy_changed(key, policy)

    def repair(self) -> Sequence[str]:
        """Compare the table with what it should be, and put it right; in words what was wrong. It
        is called by the enforcer's own thread; others may call it, too."""
        with self._lock:
            self._reconcile()
            self._recorded = None  # the store may be a new one
            if self._table is None:
                return ()
            self._filter_bridges()
            compiler = self._compiler
            if compiler is None:
                return self._repair_closed()
            found: list[str] = []
            compiler.sweep()
            if self._is_needed() and self._in_force:
                for name in self._links_to_keep():
                    compiler.expect(name)
                self._write()
                found = self._table.differences(compiler.desired)
                if found:
                    self._in_force = False
                    self._count(repairs=self._numbers.repairs + 1)
            self._write()
            return found

    def world(self) -> World:
        """A copy at this moment, for explanations."""
        with self._lock:
            if self._compiler is None:
                return World.of(complete=False)
            world = self._compiler.world
            return World(dict(world.pods), dict(world.namespaces), dict(world.policies), True)

    def report(self) -> Report:
        with self._lock:
            compiler = self._compiler
            if compiler is None:
                states = [
                    PodState(one.owner, one.key, one.addresses, False, (), ()) for one in self
                ]
                return self._numbers._replace(pods=tuple(states))
            return self._numbers._replace(
                complete=True,
                pods=tuple(
                    PodState(
                        one.owner,
                        one.key,
                        one.addresses,
                        compiler.is_known(one),
                        compiler.isolating(one.owner, INGRESS),
                        compiler.isolating(one.owner, EGRESS),
                        tuple(
                            (way, key)
                            for way in (INGRESS, EGRESS)
                            for key in compiler.left_out(one.owner, way)
                        ),
                    )
                    for one in self
                ),
                policies=len(compiler.world.policies),
                peers=compiler.peers,
                profiles=len(compiler.profiles),
                elements=compiler.desired.size,
            )

    def __iter__(self) -> Iterator[Binding]:
        """The interfaces of pods that have policies."""
        return iter([one for one in self._bindings.values() if not one.exempt])

    def denied(self) -> Sequence[Denied]:
        """Asks the kernel for the counters."""
        with self._lock:
            if self._in_force:
                with suppress(CniError, OSError):
                    self._keep_counts()
            return [
                Denied(policy, direction, packets)
                for (policy, direction), packets in sorted(self._denied.items())
            ]

    # ADD and DEL

    def admit(self, binding: Binding) -> None:
        """For ADD: have the rules for these addresses in force before the pod's link is up."""
        with self._lock:
            own = frozenset(binding.addresses)
            for other in [one for one in self._bindings.values() if _share(one, binding, own)]:
                self._bindings.pop(other.owner)
            self._bindings[binding.owner] = binding
            self._admitted[binding.owner] = time.monotonic()
            if self._compiler is not None:
                with self._changing() as compiler:
                    compiler.bind(binding)
            elif not self._close(binding):
                raise self._taken_by_another()

    def expect(self, link: str, owner: Owner) -> None:
        """Another process is about to run an ADD of a pod behind this link, until `settle`."""
        with self._lock:
            self._expected.add(link)
            self._awaited.add(owner)
            if self._compiler is not None:
                with self._changing() as compiler:
                    compiler.expect(link)
                    compiler.awaits(owner)
            else:
                self._close(Binding(owner, PodRef(), (), (), link))

    def settle(self, owner: Owner) -> None:
        """Take in what other processes have added and deleted, as the store has it. The one for
        this owner has ended."""
        with self._lock:
            self._awaited.discard(owner)
            if self._compiler is None:
                self._reconcile()
                return
            with self._changing() as compiler:
                self._reconcile()
                compiler.arrived(owner)

    def dismiss(self, owner: Owner) -> None:
        """For DEL: forget the addresses. What the kernel refuses, the next pass repairs, or the ADD
        of the next pod with the address."""
        with self._lock:
            self._admitted.pop(owner, None)
            binding = self._bindings.pop(owner, None)
            if binding is None or self._table is None:
                return
            with suppress(CniError):
                if self._compiler is not None:
                    with self._changing() as compiler:
                        compiler.unbind(owner)
                else:
                    addresses = (*binding.addresses, *binding.more)
                    admission.forget_by(self._table.netlink, addresses)

    # The work

    @contextmanager
    def _changing(self) -> Iterator[Compiler]:
        """The compiler, to change it; then the kernel gets what differs."""
        compiler = self._compiler
        if compiler is None:
            raise RuntimeError("there is no complete world yet")
        began = time.monotonic()
        yield compiler
        changed = self._write()
        if changed:
            took = time.monotonic() - began
            self._count(changes=self._numbers.changes + 1, change_seconds=took)

    def _write(self) -> bool:
        """Whether the kernel got anything."""
        compiler, table = self._compiler, self._table
        if compiler is None or table is None:
            return False
        try:
            if compiler.denies_unknown != self._recorded:
                admission.record_closed(self._store(), compiler.denies_unknown)
                self._recorded = compiler.denies_unknown
            if not self._is_needed():
                self._in_force = False
                return table.delete()
            change = self._written(table, compiler.desired)
        except (CniError, OSError) as problem:
            self._in_force = False
            self._count(errors=self._numbers.errors + 1, problem=str(problem))
            raise
        if self._numbers.problem:
            self._count(problem="")
        return bool(change.requests)

    def _written(self, table: PolicyTable, desired: Desired) -> Change:
        if not self._in_force or desired.drops_counters:
            self._keep_counts()
        if self._in_force:
            try:
                return table.apply(desired)
            except KernelError as problem:
                log.warn("the policy table is not as it was; writing all of it", problem=problem)
        self._in_force = False
        change = table.replace(desired)
        self._in_force, self._read = True, {}
        return change

    def _keep_counts(self) -> None:
        """Add what the counters say now; those of profiles that are dropped go with them."""
        compiler, table = self._compiler, self._table
        if compiler is None or table is None:
            return
        now = {one.name: (one.policies, one.direction) for one in compiler.profiles}
        whose = {**self._whose, **now}
        for name, packets in table.denied().items():
            more = packets - self._read.get(name, 0)
            self._read[name] = packets
            policies, direction = whose.get(name, ((), ""))
            for policy in [NOBODY] if name == UNKNOWN else policies:
                self._denied[policy, direction] += max(more, 0)
        self._whose = now

    def _is_needed(self) -> bool:
        """Whether any pod here has a network with policies. If not, no table stands in the way."""
        return any(not one.exempt for one in self._bindings.values()) or bool(self._expected)

    def _close(self, binding: Binding) -> bool:
        """By the table that a daemon or an ADD before us has left."""
        if self._table is None:
            return False
        return admission.close_by(self._table.netlink, binding, self._store(), self._table.port)

    def _taken_by_another(self) -> CniError:
        return CniError(
            TRY_AGAIN,
            "another process has the network policies' rules",
            "a daemon that is about to end; the runtime has to try again",
        )

    def _links_to_keep(self) -> Iterable[str]:
        """What ADDs of other processes have closed, while it is there."""
        if self._table is None or self._table.seen() is None:
            return self._expected
        with Netlink() as kernel:
            there = [name for name in self._table.links() if kernel.index(name)]
        return {*self._expected, *there}

    def _reconcile(self) -> None:
        """Know the pods that the store has: other processes may have added and deleted some."""
        try:
            attachments = self._store().attachments()
        except CniError as problem:
            log.warn("the store cannot be read; the pods stay as they were", problem=problem)
            return
        found: Dict[Owner, Binding] = {}
        for attachment in attachments:
            with suppress(ValueError, KeyError, TypeError, AttributeError):  # CHECK names it
                binding = bindings.of_attachment(attachment)
                if binding is not None:
                    found[binding.owner] = binding
        oldest = time.monotonic() - ADD_SECONDS
        self._admitted = {
            owner: when
            for owner, when in self._admitted.items()
            if owner not in found and when > oldest
        }
        gone = [one for one in self._bindings if one not in found and one not in self._admitted]
        for owner in gone:
            del self._bindings[owner]
            if self._compiler is not None:
                self._compiler.unbind(owner)
        for owner, binding in found.items():
            added = [self._bindings[one] for one in self._admitted if one in self._bindings]
            own = frozenset(binding.addresses)
            if owner in self._bindings or any(_share(one, binding, own) for one in added):
                continue
            self._bindings[owner] = binding
            if self._compiler is not None:
                self._compiler.bind(binding)

    def _filter_bridges(self) -> None:
        names = {one.link for one in self._bindings.values() if one.is_bridged and not one.exempt}
        if not names:
            return
        admission.ensure_bridge_filter()
        with Netlink() as kernel:
            for name in sorted(names):
                if kernel.index(name) and not rtnl.is_bridge_filtered(kernel, name):
                    kernel.do([rtnl.filter_bridged(name)])

    def _repair_closed(self) -> list[str]:
        """Before the first complete world: the rules of the last run stay. If there are none, what
        is not known is closed or open, as the last run has left word."""
        if self._table is None:
            return []
        self._table.adopt()
        if not self._is_needed() or self._table.seen() is not None:
            return []
        links = {one.link for one in self} | self._expected
        admission.create(self._table.netlink, self._store(), links)
        self._table.adopt()
        return ["there was no policy table"]

    def _pass(self) -> None:
        self._repaired_at = time.monotonic()
        try:
            for line in self.repair():
                log.warn("repaired", was=line)
        except (CniError, OSError) as problem:
            log.error("network policies are not in force as they should be", problem=problem)

    def _delay(self, wake_up: WakeUp) -> float:
        pause = self._repaired_at + PAUSE_SECONDS - time.monotonic()
        return min(wake_up.left, max(0.0, pause))

    def _is_news(self, notices: socket.socket) -> bool:
        """Whether somebody else has changed our table."""
        port, found = self._table.port if self._table is not None else 0, False
        while True:
            try:
                found = is_foreign(notices.recv(1 << 16), port) or found
            except BlockingIOError:
                return found
            except OSError as problem:
                if problem.errno != errno.ENOBUFS:
                    raise
                found = True  # more was said than we could keep

    def _count(self, **changed: object) -> None:
        self._numbers = self._numbers._replace(**changed)  # type: ignore[arg-type]


def _share(one: Binding, other: Binding, addresses: FrozenSet[Address]) -> bool:
    """`addresses` are the other's."""
    return not addresses.isdisjoint(one.addresses) and one.owner != other.owner


def _notices() -> socket.socket:
    """What the kernel says of changes to nftables."""
    listener = socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER
    )
    listener.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _NOTICES)
    listener.bind((0, 0))
    listener.setsockopt(SOL_NETLINK, _NETLINK_ADD_MEMBERSHIP, _NFNLGRP_NFTABLES)
    listener.setblocking(False)
    return listener
