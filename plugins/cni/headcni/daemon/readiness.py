"""What /ready asks about."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from typing import Callable

from ..errors import CniError
from ..mesh.routes import Report
from .cni.server import CniServer
from .observe.monitor import Reason


class Conditions(Mapping[str, Reason]):
    """The socket, the store, and what the last pass over the routes found.

    The approval is left out, because Headscale 0.29 tells a node about its own approval up to
    minutes late; it is logged and measured. Claims of foreign devices are left out too, because
    they could make every node not ready. Only a node of the mesh that serves this node's own range
    does.
    """

    def __init__(self, server: CniServer, store: Callable[[], object]) -> None:
        self.fixed: dict[str, Reason] = {
            "cni-socket": lambda: "" if server.is_alive() else "the CNI socket is not served",
            "store": lambda: problem_of(store),
        }
        self.report: Report = Report()

    def _all(self) -> dict[str, Reason]:
        found = dict(self.fixed)
        if not self.report.conditions:
            found["routes"] = lambda: "the routes have not been looked at yet"
        for condition in self.report.conditions:
            if condition.name == "approved":
                continue
            message = "" if condition.ok else condition.message
            found[condition.name] = lambda message=message: message  # type: ignore[misc]
        for alarm in self.report.alarms:
            if not alarm.holds_back:
                continue
            found[f"alarm-{alarm.kind}-{alarm.prefix}"] = lambda alarm=alarm: alarm.message  # type: ignore[misc]
        return found

    def items(self) -> ItemsView[str, Reason]:
        """All conditions of the same moment: a pass may end while they are asked."""
        return self._all().items()

    def __getitem__(self, name: str) -> Reason:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def problem_of(question: Callable[[], object]) -> str:
    """What a call fails with, or an empty text."""
    try:
        question()
    except CniError as problem:
        return str(problem)
    return ""
