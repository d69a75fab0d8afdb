# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The drawing of the mesh, as coordinates: nodes on a circle, or many nodes in boxes by site."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ansible_collections.headcni.mesh.plugins.plugin_utils.report.pairs import (
    DIRECT,
    KINDS,
    NONE,
    RELAYED,
    Pair,
    milliseconds,
)
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.record import Node

EACH_UP_TO = 30  # nodes; more are drawn by site
DETAILS_UP_TO = 20  # nodes; with more, mode and pod CIDR are only in the title
MOST_SITES = 12  # drawn; the nodes of the others share a box
OTHER_SITES = "other sites"
MOST_LABELS = 8  # on lines; more would hide each other
NAME_LENGTH = 20
SMALL, STEP = 11, 14  # a node's square in a box, and the distance to the next one
GOOD, DOUBTFUL, BAD = "good", "doubtful", "bad"


@dataclass(frozen=True)
class Spot:
    """A drawn node."""

    name: str
    state: str
    x: float
    y: float
    title: str
    label: str = ""
    detail: str = ""
    label_x: float = 0.0
    label_y: float = 0.0
    anchor: str = "middle"


@dataclass(frozen=True)
class Line:
    a: str
    b: str
    kind: str
    x1: float
    y1: float
    x2: float
    y2: float
    title: str
    label: str
    label_x: float
    label_y: float


@dataclass(frozen=True)
class Site:
    """A part of the circle (`arc` is the path of an SVG), or a box."""

    name: str
    nodes: int
    title: str
    x: float
    y: float
    arc: str = ""
    width: float = 0.0
    height: float = 0.0


@dataclass(frozen=True)
class Drawing:
    by_site: bool
    left: float
    top: float
    width: float
    height: float
    sites: tuple[Site, ...]
    lines: tuple[Line, ...]
    spots: tuple[Spot, ...]
    radius: float


def drawing(nodes: Sequence[Node], pairs: Sequence[Pair], states: Mapping[str, str]) -> Drawing:
    if len(nodes) <= EACH_UP_TO:
        return _circle(nodes, pairs, states)
    return _boxes(nodes, pairs, states)


def titled(node: Node, state: str) -> str:
    word = {GOOD: "ready", DOUBTFUL: "ready, with warnings", BAD: "not ready"}[state]
    said = "no answer" if node.problem else word
    parts = [said, f"{node.mode} mode" if node.mode else "", ", ".join(node.pod_cidrs)]
    return f"{node.name}: {', '.join(filter(None, parts))}"


def shortened(name: str, most: int = NAME_LENGTH) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def by_site(nodes: Iterable[Node]) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for node in nodes:
        found.setdefault(node.site, []).append(node)
    return dict(sorted(found.items()))


def _circle(nodes: Sequence[Node], pairs: Sequence[Pair], states: Mapping[str, str]) -> Drawing:
    sites = by_site(nodes)
    ordered = [node for those in sites.values() for node in those]
    count = max(len(ordered), 1)
    circle = 150 + 5 * count
    radius = 16.0 if count <= 16 else 11.0
    angle = {node.name: math.tau * at / count - math.pi / 2 for at, node in enumerate(ordered)}
    where = {name: (circle * math.cos(a), circle * math.sin(a)) for name, a in angle.items()}
    # With many nodes, only the labels at the very top and bottom have room on both sides.
    upright = 0.3 if count <= 12 else 0.05
    spots = []
    for node in ordered:
        x, y = where[node.name]
        across, down = math.cos(angle[node.name]), math.sin(angle[node.name])
        spots.append(
            Spot(
                node.name,
                states[node.name],
                _rounded(x),
                _rounded(y),
                titled(node, states[node.name]),
                shortened(node.name),
                _detail(node) if count <= DETAILS_UP_TO else "",
                _rounded(x + across * (radius + 12)),
                _rounded(y + down * (radius + 16) + (0 if abs(across) > 0.3 else 6 * down) - 3),
                "middle" if abs(across) < upright else ("start" if across > 0 else "end"),
            )
        )
    # Not in the middle, where many lines cross.
    part = 0.5 if count <= 4 else 0.36
    shown = _labelled(pairs, all_of_them=count <= 4)
    lines = [
        _line(
            pair.a, pair.b, pair.kind, where, f"{pair.a} ↔ {pair.b}: {pair.in_words}", label, part
        )
        for pair, label in zip(pairs, shown)
    ]
    beyond = min(math.pi / count * 0.7, (radius + 2) / circle)
    arcs, at = [], 0
    for name, those in sites.items() if len(sites) > 1 else ():
        begin = math.tau * at / count - math.pi / 2 - beyond
        end = math.tau * (at + len(those) - 1) / count - math.pi / 2 + beyond
        middle = (begin + end) / 2
        inner = circle - radius - 26
        arcs.append(
            Site(
                shortened(name),
                len(those),
                f"site {name}: {len(those)} nodes",
                _rounded(inner * math.cos(middle)),
                _rounded(inner * math.sin(middle)),
                _arc(circle, begin, end),
            )
        )
        at += len(those)
    width = 2 * circle + 400
    top = min((spot.y for spot in spots), default=0.0) - radius - 60
    height = max((spot.y for spot in spots), default=0.0) + radius + 60 - top
    return Drawing(
        *(False, -width / 2, _rounded(top), width, _rounded(height)),
        *(tuple(arcs), tuple(sorted(lines, key=_rank)), tuple(spots), radius),
    )


def _detail(node: Node) -> str:
    return shortened(" · ".join(filter(None, (node.mode, *node.pod_cidrs[:1]))), 28)


def _rank(line: Line) -> int:
    """The worst lines are drawn last, above the others."""
    return KINDS.index(line.kind)


def _arc(circle: float, begin: float, end: float) -> str:
    start = f"{circle * math.cos(begin):.1f} {circle * math.sin(begin):.1f}"
    stop = f"{circle * math.cos(end):.1f} {circle * math.sin(end):.1f}"
    return f"M {start} A {circle:.1f} {circle:.1f} 0 {int(end - begin > math.pi)} 1 {stop}"


def _labelled(pairs: Sequence[Pair], all_of_them: bool) -> list[str]:
    """The text on each line. In a larger drawing only lines that are not direct get one, if they
    are few."""
    few = sum(pair.kind != DIRECT for pair in pairs) <= MOST_LABELS
    shown = []
    for pair in pairs:
        wanted = all_of_them or (pair.kind != DIRECT and few)
        text = "no path" if pair.kind == NONE else milliseconds(pair.latency_ms)
        shown.append((f"relayed {text}" if pair.kind == RELAYED else text) if wanted else "")
    return shown


def _line(
    a: str,
    b: str,
    kind: str,
    where: Mapping[str, tuple[float, float]],
    title: str,
    label: str,
    part: float,
) -> Line:
    """`part` says where on the line the label is."""
    (x1, y1), (x2, y2) = where[a], where[b]
    return Line(
        a,
        b,
        kind,
        _rounded(x1),
        _rounded(y1),
        _rounded(x2),
        _rounded(y2),
        title,
        label,
        _rounded(x1 + (x2 - x1) * part),
        _rounded(y1 + (y2 - y1) * part),
    )


def _rounded(number: float) -> float:
    return round(number, 1)


def _boxes(nodes: Sequence[Node], pairs: Sequence[Pair], states: Mapping[str, str]) -> Drawing:
    sites = _few(by_site(nodes))
    columns = {
        name: max(6, math.ceil(math.sqrt(1.8 * len(those)))) for name, those in sites.items()
    }
    sizes = {
        name: (
            max(170.0, columns[name] * STEP + 20),
            math.ceil(len(those) / columns[name]) * STEP + 52.0,
        )
        for name, those in sites.items()
    }
    where = _around(sizes)
    home = {node.name: name for name, those in sites.items() for node in those}
    spots, boxes = [], []
    between = _between(pairs, home)
    for name, those in sites.items():
        (x, y), (width, height) = where[name], sizes[name]
        left, top = x - width / 2, y - height / 2
        inside = between.get((name, name), [])
        title = f"site {name}: {len(those)} nodes; paths inside: {_summed(inside)}"
        boxes.append(
            Site(
                *(shortened(name, 24), len(those), title, _rounded(left), _rounded(top)),
                *("", _rounded(width), _rounded(height)),
            )
        )
        for at, node in enumerate(those):
            row, column = divmod(at, columns[name])
            spots.append(
                Spot(
                    *(node.name, states[node.name]),
                    *(_rounded(left + 10 + column * STEP), _rounded(top + 42 + row * STEP)),
                    titled(node, states[node.name]),
                )
            )
    lines = []
    for (a, b), those_pairs in between.items():
        if a != b:
            worst = max((pair.kind for pair in those_pairs), key=KINDS.index)
            said = _summed(those_pairs)
            label = _counted(those_pairs, worst)
            lines.append(_line(a, b, worst, where, f"{a} ↔ {b}: {said}", label, 0.5))
    left = min(box.x for box in boxes) - 30
    top = min(box.y for box in boxes) - 30
    width = max(box.x + box.width for box in boxes) + 30 - left
    height = max(box.y + box.height for box in boxes) + 30 - top
    return Drawing(
        *(True, _rounded(left), _rounded(top), _rounded(width), _rounded(height)),
        *(tuple(boxes), tuple(sorted(lines, key=_rank)), tuple(spots), SMALL),
    )


def _few(sites: dict[str, list[Node]]) -> dict[str, list[Node]]:
    if len(sites) <= MOST_SITES:
        return sites
    largest = sorted(sites, key=lambda name: -len(sites[name]))[: MOST_SITES - 1]
    kept = {name: those for name, those in sites.items() if name in largest}
    rest = [node for name, those in sites.items() if name not in largest for node in those]
    return {**kept, f"{OTHER_SITES} ({len(sites) - len(largest)})": rest}


def _around(sizes: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The centres of boxes on an ellipse that is large enough to keep them apart."""
    names = list(sizes)
    if len(names) == 1:
        return {names[0]: (0.0, 0.0)}
    if len(names) == 2:
        apart = sum(width for width, _unused in sizes.values()) / 4 + 110
        return {names[0]: (-apart, 0.0), names[1]: (apart, 0.0)}
    across, down = 200.0, 130.0
    while True:
        where = {
            name: (
                across * math.cos(math.tau * at / len(names) - math.pi / 2),
                down * math.sin(math.tau * at / len(names) - math.pi / 2),
            )
            for at, name in enumerate(names)
        }
        if not any(_touch(where, sizes, a, b) for i, a in enumerate(names) for b in names[:i]):
            return where
        across, down = across * 1.08, down * 1.08


def _touch(
    where: Mapping[str, tuple[float, float]],
    sizes: Mapping[str, tuple[float, float]],
    a: str,
    b: str,
) -> bool:
    return all(
        abs(where[a][axis] - where[b][axis]) < (sizes[a][axis] + sizes[b][axis]) / 2 + 70
        for axis in (0, 1)
    )


def _between(pairs: Iterable[Pair], home: Mapping[str, str]) -> dict[tuple[str, str], list[Pair]]:
    found: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        first, second = sorted((home[pair.a], home[pair.b]))
        found.setdefault((first, second), []).append(pair)
    return found


def _counted(pairs: Sequence[Pair], worst: str) -> str:
    if worst == DIRECT:
        return ""
    number = sum(pair.kind == worst for pair in pairs)
    return f"{number} of {len(pairs)} {'relayed' if worst == RELAYED else 'without an answer'}"


def _summed(pairs: Sequence[Pair]) -> str:
    if not pairs:
        return "none measured"
    counts = Counter(pair.kind for pair in pairs)
    words = {DIRECT: "direct", RELAYED: "relayed", NONE: "without an answer"}
    said = [f"{counts[kind]} {words[kind]}" for kind in KINDS if counts[kind]]
    known = [pair.latency_ms for pair in pairs if pair.latency_ms is not None]
    return ", ".join(said) + (f" · {milliseconds(median(known))}" if known else "")
