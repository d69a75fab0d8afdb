# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Everything that the page shows, as data: the template only writes it down."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from ansible_collections.headcni.mesh.plugins.module_utils.shared.node_status import (
    FULL_PERCENT,
    span,
)
from ansible_collections.headcni.mesh.plugins.plugin_utils.report import (
    changes,
    drawing,
    heat,
    problems,
)
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.pairs import (
    DIRECT,
    KINDS,
    NONE,
    RELAYED,
    Pair,
    pairs,
)
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.record import Node, Report

MOST_PROBLEMS = 150
MOST_PAIRS = 200  # in the table of paths, the worst first
MOST_POOLS = 100  # the fullest
LARGE = 1 << 20


@dataclass(frozen=True)
class Tile:
    level: str
    number: str
    said: str


@dataclass(frozen=True)
class NodeRow:
    name: str
    state: str
    said: str
    site: str
    mode: str
    pods: str
    cidrs: tuple[tuple[str, str, bool], ...]  # CIDR, approval in words, whether it is fine
    paths: str
    key: str
    firewalls: str
    drift: str


@dataclass(frozen=True)
class PoolRow:
    node: str
    subnet: str
    network: str
    percent: int
    said: str
    leaked: int


@dataclass(frozen=True)
class VersionRow:
    what: str
    version: str
    count: int
    nodes: str


@dataclass(frozen=True)
class View:
    title: str
    made_at: str
    summary: str
    tiles: tuple[Tile, ...]
    problems: tuple[problems.Problem, ...]
    more_problems: int
    drawing: drawing.Drawing
    few_sites: bool
    pairs: tuple[Pair, ...]
    more_pairs: int
    heat: heat.Heat
    heat_ends: tuple[int, ...]
    nodes: tuple[NodeRow, ...]
    ids: Mapping[str, str]  # of the rows of nodes
    pools: tuple[PoolRow, ...]
    more_pools: int
    versions: tuple[VersionRow, ...]
    compared_with: str
    not_compared: str
    changes: tuple[changes.Change, ...]
    more_changes: int


def view(report: Report, title: str, earlier: Optional[Report], not_compared: str = "") -> View:
    """`not_compared` says why there is no earlier report."""
    joined = pairs(report)
    found = problems.problems(report, joined)
    states = _states(report.nodes, found)
    sorted_pairs = sorted(joined, key=_pair_rank)
    rows = [_node_row(node, states[node.name], joined, report) for node in report.nodes]
    order = (drawing.BAD, drawing.DOUBTFUL, drawing.GOOD)
    pools = sorted((_pools(report.nodes)), key=lambda pool: (-pool.percent, pool.node))
    changed = changes.changes(earlier, report) if earlier is not None else []
    return View(
        title=title,
        made_at=_written(report.made_at),
        summary=_summary(report, joined),
        tiles=tuple(_tiles(report, joined, found)),
        problems=tuple(found[:MOST_PROBLEMS]),
        more_problems=max(0, len(found) - MOST_PROBLEMS),
        drawing=drawing.drawing(report.nodes, joined, states),
        few_sites=len(drawing.by_site(report.nodes)) <= drawing.MOST_SITES,
        pairs=tuple(sorted_pairs[:MOST_PAIRS]),
        more_pairs=max(0, len(joined) - MOST_PAIRS),
        heat=heat.heat(report.nodes, report.paths),
        heat_ends=heat.STEPS_MS,
        nodes=tuple(sorted(rows, key=lambda row: order.index(row.state))),
        ids={node.name: f"node-{number}" for number, node in enumerate(report.nodes)},
        pools=tuple(pools[:MOST_POOLS]),
        more_pools=max(0, len(pools) - MOST_POOLS),
        versions=tuple(_versions(report)),
        compared_with=_written(earlier.made_at) if earlier is not None else "",
        not_compared=not_compared,
        changes=tuple(changed[: changes.MOST]),
        more_changes=max(0, len(changed) - changes.MOST),
    )


def _written(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(when, 1e11)))


def _states(nodes: Sequence[Node], found: Sequence[problems.Problem]) -> dict[str, str]:
    """Bad are the nodes that do not answer, are not ready or have a finding that is certain."""
    worst = {node.name: drawing.GOOD for node in nodes}
    for problem in reversed(found):  # the bad ones come last, and decide
        for name in problem.nodes:
            worst[name] = drawing.BAD if problem.level == problems.BAD else drawing.DOUBTFUL
    for node in nodes:
        if node.problem or not node.ready:
            worst[node.name] = drawing.BAD
    return worst


def _pair_rank(pair: Pair) -> tuple[int, int, float]:
    return (-KINDS.index(pair.kind), -pair.loss, -(pair.latency_ms or 0.0))


def _summary(report: Report, joined: Sequence[Pair]) -> str:
    sites = len(drawing.by_site(report.nodes))
    return (
        f"{_count(len(report.nodes), 'node')} at {_count(sites, 'site')}, "
        f"{_count(sum(node.pods for node in report.nodes), 'pod interface')}, "
        f"{_count(len(joined), 'measured pair')}"
    )


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def _tiles(
    report: Report,
    joined: Sequence[Pair],
    found: Sequence[problems.Problem],
) -> list[Tile]:
    ready = sum(node.ready and not node.problem for node in report.nodes)
    level = drawing.GOOD if ready == len(report.nodes) else drawing.BAD
    kinds = Counter(pair.kind for pair in joined)
    bad = sum(problem.level == problems.BAD for problem in found)
    pools = [pool.percent for node in report.nodes for pool in node.pools]
    fullest = max(pools, default=0)
    return [
        Tile(level, f"{ready} of {len(report.nodes)}", "nodes are ready"),
        Tile(drawing.BAD if bad else drawing.GOOD, str(bad), "problems"),
        Tile(
            drawing.DOUBTFUL if len(found) > bad else drawing.GOOD,
            str(len(found) - bad),
            "warnings",
        ),
        Tile(
            drawing.DOUBTFUL if kinds[RELAYED] else drawing.GOOD,
            f"{kinds[RELAYED]} of {len(joined)}",
            "measured paths are relayed",
        ),
        Tile(
            drawing.BAD if kinds[NONE] else drawing.GOOD,
            str(kinds[NONE]),
            "paths without an answer",
        ),
        Tile(
            drawing.DOUBTFUL if fullest >= FULL_PERCENT else drawing.GOOD,
            f"{fullest}%",
            "in the fullest pool",
        ),
    ]


def _node_row(node: Node, state: str, joined: Sequence[Pair], report: Report) -> NodeRow:
    kinds = Counter(pair.kind for pair in joined if node.name in (pair.a, pair.b))
    words = {DIRECT: "direct", RELAYED: "relayed", NONE: "no answer"}
    approvals = {approval.cidr: approval for approval in node.approvals}
    said = "no answer" if node.problem else "ready" if node.ready else "not ready"
    return NodeRow(
        name=node.name,
        state=state,
        said=said + (", see problems" if state != drawing.GOOD and node.ready else ""),
        site=node.site,
        mode=node.mode or "?",
        pods="?" if node.problem else str(node.pods),
        cidrs=tuple(
            (cidr, approvals[cidr].in_words, approvals[cidr].ok)
            if cidr in approvals
            else (cidr, "approval not known", True)
            for cidr in node.pod_cidrs
        ),
        paths=", ".join(f"{kinds[kind]} {words[kind]}" for kind in KINDS if kinds[kind]) or "–",
        key=_key(node, report.made_at),
        firewalls=", ".join(f.name + ("" if f.ok else " (blocks pods)") for f in node.firewalls)
        or ("?" if node.problem else "none"),
        drift=_drift(node),
    )


def _drift(node: Node) -> str:
    if node.problem:
        return "?"
    wrong = len(node.wrong_routes)
    said = [_count(wrong, "wrong route")] if wrong else []
    said += [f"repaired {_count(node.repaired, 'time')}"] if node.repaired else []
    return ", ".join(said) or "none"


def _key(node: Node, now: float) -> str:
    if node.problem:
        return "?"
    if not node.key_expires:
        return "does not expire"
    return f"expires in {span(node.key_expires - now)}" if node.key_expires > now else "expired"


def _pools(nodes: Sequence[Node]) -> list[PoolRow]:
    return [
        PoolRow(
            node.name,
            pool.subnet,
            pool.network,
            pool.percent,
            f"{_large(pool.used)} of {_large(pool.total)}",
            pool.leaked,
        )
        for node in nodes
        for pool in node.pools
    ]


def _large(number: int) -> str:
    return f"{number:,}" if number < LARGE else f"about 2^{number.bit_length() - 1}"


def _versions(report: Report) -> list[VersionRow]:
    rows = [VersionRow("Headscale", report.headscale, 1, "")] if report.headscale else []
    for what, attribute in (
        ("HeadCNI", "version"),
        ("tailscaled", "tailscaled"),
        ("distribution", "distribution"),
        ("kernel", "kernel"),
        ("Python", "python"),
    ):
        found: dict[str, list[str]] = {}
        for node in report.nodes:
            if getattr(node, attribute):
                found.setdefault(getattr(node, attribute), []).append(node.name)
        # The rarest first: those are the ones to look at.
        for version, those in sorted(found.items(), key=lambda item: len(item[1])):
            everybody = len(those) == len(report.nodes)
            shown = "all nodes" if everybody else problems.names(those)
            rows.append(VersionRow(what, version, len(those), shown))
    return rows
