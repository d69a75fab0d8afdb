# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The two directions of each measured path as a single pair."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional

from ansible_collections.headcni.mesh.plugins.module_utils.shared import paths
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.record import Path, Report

DIRECT, RELAYED, NONE = "direct", "relayed", "none"
KINDS = (DIRECT, RELAYED, NONE)  # from the best to the worst


def kind_of(path: Path) -> str:
    if path.kind in paths.RELAYED:
        return RELAYED
    return DIRECT if path.kind == paths.DIRECT else NONE


@dataclass(frozen=True)
class Pair:
    """The worse of both directions. `a` comes before `b` in the inventory."""

    a: str
    b: str
    kind: str
    through: str
    latency_ms: Optional[float]
    loss: int  # percent

    @property
    def in_words(self) -> str:
        if self.kind == NONE:
            return "no answer"
        said = f"relayed through {self.through}" if self.kind == RELAYED else "direct"
        said += f", {milliseconds(self.latency_ms)}" if self.latency_ms is not None else ""
        return said + (f", {self.loss}% lost" if self.loss else "")


def pairs(report: Report) -> list[Pair]:
    place = {node.name: number for number, node in enumerate(report.nodes)}
    found: dict[tuple[str, str], list[Path]] = {}
    for path in report.paths:
        if path.source in place and path.target in place:
            first, second = sorted((path.source, path.target), key=place.__getitem__)
            found.setdefault((first, second), []).append(path)
    return [_pair(a, b, measured) for (a, b), measured in found.items()]


def _pair(a: str, b: str, measured: Iterable[Path]) -> Pair:
    measured = list(measured)
    worst = max(measured, key=lambda path: KINDS.index(kind_of(path)))
    known = [path.latency_ms for path in measured if path.latency_ms is not None]
    return Pair(a, b, kind_of(worst), worst.through, max(known, default=None), loss(measured))


def loss(measured: Iterable[Path]) -> int:
    """The worst direction, in percent; never rounded to none."""
    return max((-(-100 * path.lost // path.sent) for path in measured if path.sent), default=0)


def milliseconds(latency: float | None) -> str:
    if latency is None:
        return "–"
    return f"{latency:.1f} ms" if latency < 10 else f"{latency:.0f} ms"
