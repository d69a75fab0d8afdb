"""Network policies in the daemon: the enforcer, what feeds it, and what is shown of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Callable, Dict, List, NamedTuple, Protocol, Tuple

from ...datapath.seen import addresses
from ...errors import CniError
from ...log import Log
from ...model import Address
from ...policy.enforcer import DENY, Denied, Enforcer, PodState
from ...policy.objects import Key
from .explained import Here, explained
from .feed import Feed

MOST_SHOWN = 50  # policies of a pod
MOST_DENIED = 500  # policies with denied packets, in an answer
MOST_LABELS = 200  # policies with denied packets, in the metrics

log = Log("policies")


class Settings(NamedTuple):
    """What the operator has chosen."""

    unknown: str  # deny or allow: pods whose labels are not known yet
    log_per_second: int  # denied packets of a chain that the kernel logs; 0: none


class Source(Protocol):
    """Where policies come from."""

    name: str

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def is_alive(self) -> bool: ...
    def problems(self) -> Tuple[str, ...]: ...
    def pods_changed(self) -> None: ...


class Policies:
    """From start() to stop(), once. When it stops, the rules stay in force."""

    def __init__(
        self,
        enforcer: Enforcer,
        feed: Feed,
        source: Source,
        settings: Callable[[], Settings],
        without: Callable[[], int],
        node_name: str,
    ) -> None:
        """`without` counts the pod interfaces whose network does not have policies."""
        self.enforcer, self.feed, self.source = enforcer, feed, source
        self._settings, self._without = settings, without
        self._node_name = node_name
        self._refused = "they have not been started yet"

    def start(self) -> None:
        """A node whose kernel refuses the table keeps its daemon, which is then not ready: its
        routes are needed all the same, and ADD fails by itself."""
        try:
            self.enforcer.start()
        except (CniError, OSError) as problem:
            self._refused = str(problem)
            log.error("network policies cannot be enforced", problem=problem)
            return
        self._refused = ""
        self.feed.start()
        self.source.start()

    def stop(self) -> None:
        if not self._refused:
            self.source.stop()
            self.feed.stop()
            self.enforcer.stop()

    def is_alive(self) -> bool:
        """What was never started is reported by held_back(); a restart alone would not help it."""
        if self._refused:
            return True
        parts = (self.enforcer, self.feed, self.source)
        return all(part.is_alive() for part in parts)

    def configure(self) -> None:
        """Apply settings that have changed."""
        try:
            self.enforcer.configure(*self._settings())
        except (CniError, OSError) as problem:
            log.error("the rules for network policies stay as they were", problem=problem)

    def held_back(self) -> str:
        """For /ready: why the kernel may not have the current rules."""
        if self._refused:
            return f"network policies are not enforced: {self._refused}"
        problem = self.enforcer.report().problem
        return f"the rules for network policies are not up to date: {problem}" if problem else ""

    def not_known(self) -> str:
        """For /ready: why the policies are not known yet. Once they are, a source that is away is
        only a warning, because what is in force stays."""
        if self.feed.is_complete():
            return ""
        why = "; ".join(self.source.problems()) or "they are being listed"
        return f"the network policies of this node are not known yet: {why}"

    def warnings(self) -> List[str]:
        """What is wrong, but leaves the rules in force."""
        away = self.source.problems() if self.feed.is_complete() else ()
        return [
            *(f"network policies stay as they were: {problem}" for problem in away),
            *(f"not enforced as written: {mistake}" for mistake in self.feed.mistakes()),
            *self._too_large(),
            *self._unprotected(),
        ]

    def too_large(self) -> List[Key]:
        """The policies that allow nothing on this node because they are too large."""
        pods = self.enforcer.report().pods
        return sorted({key for pod in pods for _direction, key in pod.too_large})

    def _too_large(self) -> List[str]:
        return [
            f"NetworkPolicy {name} is too large: it isolates its pods, and what only it allows is "
            "denied; divide it, or select fewer pods and ports"
            for name in _named(self.too_large())
        ]

    def _unprotected(self) -> List[str]:
        count = self._without()
        if not count:
            return []
        return [
            f"{count} pod interfaces have no network policies: their network did not have "
            "enable_network_policy when they were added; restart these pods"
        ]

    def status(self) -> Dict[str, Any]:
        """For `headcnictl status`."""
        report = self.enforcer.report()
        return {
            "source": self.source.name,
            "since": self.feed.since,
            "unknown": self._settings().unknown,
            "policies": report.policies,
            "pods": len(report.pods),
            "unknown_pods": sum(not pod.known for pod in report.pods),
        }

    def answer(self, words: Sequence[str]) -> Dict[str, Any]:
        """For `headcnictl policy`, by the words of its question."""
        if not words:
            return self.shown()
        if words[0] != "explain":
            return {"error": f"{words[0]!r} is not explain"}
        world = self.enforcer.world()
        if not world.complete:
            return {"error": self.not_known()}
        try:
            answer = explained(world, self._here(bool(world.policies)), words[1:])
        except CniError as problem:
            return {"error": str(problem)}
        if doubt := self.held_back():
            answer["notes"].append(doubt)
            answer["lines"].insert(-1, f"NOTE: {doubt}")
        return answer

    def _here(self, any_policy: bool) -> Here:
        pods = self.enforcer.report().pods
        unknown = [pod for pod in pods if not pod.known]
        closes = any_policy and self._settings().unknown == DENY
        own: List[Address] = []
        with suppress(CniError, OSError):
            own = [address for listed in addresses().values() for address, _length in listed]
        return Here(
            self._node_name,
            {pod.pod for pod in pods},
            _left_out(pods),
            frozenset(own),
            {address: pod.pod for pod in unknown if closes for address in pod.addresses},
        )

    def shown(self) -> Dict[str, Any]:
        """For `headcnictl policy`."""
        report = self.enforcer.report()
        problems = [*filter(None, (self.held_back(), self.not_known())), *self.warnings()]
        denied, problem = self._denied()
        pods = [
            {
                "namespace": pod.pod[0],
                "pod": pod.pod[1],
                "container_id": pod.owner.container_id,
                "interface": pod.owner.ifname,
                "addresses": [str(address) for address in pod.addresses],
                "known": pod.known,
                "ingress": _named(pod.ingress),
                "egress": _named(pod.egress),
            }
            for pod in report.pods
        ]
        return {
            **self.status(),
            "problems": [*problems, *filter(None, [problem])],
            "pods": pods,
            "denied": [_as_dict(entry) for entry in denied[:MOST_DENIED]],
            "more_denied": max(0, len(denied) - MOST_DENIED),
        }

    def denied_packets(self) -> Mapping[Tuple[str, ...], float]:
        """For the metrics: by namespace, policy and direction. Policies beyond a number that a
        node has only by mistake or malice share one series."""
        found: Dict[Tuple[str, ...], float] = {}
        for place, entry in enumerate(_most_first(self.enforcer.denied())):
            labels = (*entry.policy, entry.direction)
            if place >= MOST_LABELS:
                labels = ("", "others", entry.direction)
            found[labels] = found.get(labels, 0.0) + entry.packets
        return found

    def _denied(self) -> Tuple[List[Denied], str]:
        try:
            return _most_first(self.enforcer.denied()), ""
        except (CniError, OSError) as problem:
            return [], f"denied packets cannot be counted: {problem}"


def _most_first(denied: Sequence[Denied]) -> List[Denied]:
    return sorted(denied, key=lambda entry: (-entry.packets, entry.policy, entry.direction))


def _left_out(pods: Iterable[PodState]) -> Dict[Tuple[Key, str], List[Key]]:
    found: Dict[Tuple[Key, str], List[Key]] = {}
    for pod in pods:
        for direction, key in pod.too_large:
            found.setdefault((pod.pod, direction), []).append(key)
    return found


def _named(policies: Sequence[Key]) -> List[str]:
    """The names, and how many more there are."""
    names = ["/".join(policy) for policy in policies[:MOST_SHOWN]]
    more = len(policies) - len(names)
    return [*names, f"and {more} more"] if more else names


def _as_dict(entry: Denied) -> Dict[str, Any]:
    namespace, name = entry.policy
    return {
        "namespace": namespace,
        "policy": name,
        "direction": entry.direction,
        "packets": entry.packets,
    }
