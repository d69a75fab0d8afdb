"""What the daemon uses to enforce network policies: it holds the world, compiles it, and changes
the nft table by no more than what differs.

All methods may be called by any thread. A CniError means that the kernel still has the rules from
before the call; the next `repair` tries again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional, Tuple

from ..model import Address, Owner, PodRef
from ..store import Store
from .objects import Key, Namespace, Pod, Policy, World

DENY, ALLOW = "deny", "allow"  # for a pod whose policies are not known yet


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
    ) -> None:
        """`unknown` (DENY or ALLOW) decides about pods whose labels are not known yet, as soon as
        any policy is known. `log_per_second` limits how many denied packets of one chain the kernel
        logs; 0: none."""

    def start(self) -> None:
        """Serve ADD and DEL of this process from now on, and take over the table that is there. Its
        rules stay in force until the first complete world."""

    def stop(self) -> None:
        """ADD and DEL of other processes keep the table closed for pods that they do not know."""

    def configure(self, unknown: str, log_per_second: int) -> None:
        """Change the settings while it runs."""

    def set_world(self, world: World) -> None:
        """Everything anew, after a list: compiled and compared with what is in force. The enforcer
        keeps the world and changes it by the methods below, so hand over dictionaries that nobody
        else changes. An incomplete world only counts as `no complete list yet`: it does not replace
        a complete one."""

    def pod_changed(self, key: Key, pod: Optional[Pod]) -> None:
        """A pod of any node was added or changed; None: it was deleted."""

    def namespace_changed(self, name: str, namespace: Optional[Namespace]) -> None:
        """The same for a namespace."""

    def policy_changed(self, key: Key, policy: Optional[Policy]) -> None:
        """The same for a policy."""

    def repair(self) -> Sequence[str]:
        """Compare the table with what it should be, and put it right; in words what was wrong. To
        be called when nft rules have changed, and at intervals."""
        raise NotImplementedError

    def world(self) -> World:
        """A copy at this moment, for explanations."""
        raise NotImplementedError

    def report(self) -> Report:
        raise NotImplementedError

    def denied(self) -> Sequence[Denied]:
        """Asks the kernel for the counters."""
        raise NotImplementedError

    def admit(self, owner: Owner, pod: PodRef, addresses: Sequence[Address], link: str) -> None:
        """For ADD: have the rules for these addresses in force before the pod's link is up."""

    def dismiss(self, owner: Owner) -> None:
        """For DEL: forget the addresses."""
