# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The heat map of latency and loss: a cell for each direction of each pair of nodes, or of groups
of nodes if there are many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ansible_collections.headcni.mesh.plugins.plugin_utils.report.drawing import by_site, shortened
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.pairs import (
    KINDS,
    NONE,
    RELAYED,
    kind_of,
    loss,
    milliseconds,
)
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.record import Node, Path

EACH_UP_TO = 50  # nodes; more are grouped
MOST_GROUPS = 20
STEPS_MS = (2, 10, 30, 80, 200)  # the upper ends of the colours; slower is the last colour


@dataclass(frozen=True)
class Cell:
    """`heat` is the number of the colour; -1 for a cell without a latency."""

    measured: int
    text: str
    title: str
    heat: int
    kind: str
    loss: int


@dataclass(frozen=True)
class Row:
    name: str
    title: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Heat:
    grouped: bool
    heads: tuple[tuple[str, str], ...]  # the short name and the whole one
    rows: tuple[Row, ...]
    measured: int
    possible: int


def heat(nodes: Sequence[Node], paths: Sequence[Path]) -> Heat:
    groups = _groups(nodes)
    place = {node.name: at for at, (_unused, those) in enumerate(groups) for node in those}
    found: dict[tuple[int, int], list[Path]] = {}
    for path in paths:
        if path.source in place and path.target in place:
            found.setdefault((place[path.source], place[path.target]), []).append(path)
    grouped = len(groups) < len(nodes)
    names = [name for name, _unused in groups]
    rows = []
    for at, name in enumerate(names):
        cells = tuple(
            _cell(name, other, found.get((at, to), []), at == to and not grouped, grouped)
            for to, other in enumerate(names)
        )
        rows.append(Row(shortened(name, 28), name, cells))
    return Heat(
        grouped,
        tuple((shortened(name, 28), name) for name in names),
        tuple(rows),
        sum(map(len, found.values())),
        len(nodes) * (len(nodes) - 1),
    )


def _groups(nodes: Sequence[Node]) -> list[tuple[str, list[Node]]]:
    """Each node alone, or the nodes of a site in their order, in groups of equal size."""
    sites = by_site(nodes)
    if len(nodes) <= EACH_UP_TO:
        return [(node.name, [node]) for those in sites.values() for node in those]
    if len(sites) > MOST_GROUPS:
        ordered = [node for those in sites.values() for node in those]
        return _split("", ordered, -(-len(ordered) // MOST_GROUPS))
    size = next(
        size
        for size in range(2, len(nodes) + 1)
        if sum(-(-len(those) // size) for those in sites.values()) <= MOST_GROUPS
    )
    return [group for name, those in sites.items() for group in _split(name, those, size)]


def _split(site: str, nodes: Sequence[Node], size: int) -> list[tuple[str, list[Node]]]:
    groups = [list(nodes[at : at + size]) for at in range(0, len(nodes), size)]
    if len(groups) == 1 and site:
        return [(f"{site} ({len(nodes)})", groups[0])]
    return [
        (f"{those[0].name}–{those[-1].name}" if len(those) > 1 else those[0].name, those)
        for those in groups
    ]


def _cell(name: str, other: str, those: Sequence[Path], itself: bool, grouped: bool) -> Cell:
    pair = f"{name} → {other}"
    if not those:
        return Cell(0, "", "" if itself else f"{pair}: not measured", -1, "", 0)
    worst = max(those, key=lambda path: KINDS.index(kind_of(path)))
    kind = kind_of(worst)
    known = [path.latency_ms for path in those if path.latency_ms is not None]
    middle = median(known) if known else None
    lost = loss(those)
    text = (
        f"{middle:.1f}" if middle is not None and middle < 10 else f"{middle:.0f}" if known else "✕"
    )
    said = [milliseconds(middle) if known else "no answer"]
    said += (
        [f"{kind} by {worst.through}" if worst.through and not grouped else kind]
        if kind != NONE
        else []
    )
    said += [f"{lost}% lost"] if lost else []
    said += [f"{len(those)} paths, the worst is {kind}"] if grouped else []
    step = sum(middle > end for end in STEPS_MS) if middle is not None else -1
    mark = "R" if kind == RELAYED else ""
    return Cell(len(those), text + mark, f"{pair}: {', '.join(said)}", step, kind, lost)
