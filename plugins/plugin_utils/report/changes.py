# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What has changed since an earlier report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ansible_collections.headcni.mesh.plugins.plugin_utils.report.pairs import pairs
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.record import Node, Report

MOST = 100
POOL_POINTS = 10  # percentage points by which a pool must change to be mentioned
WORSE, BETTER, NEUTRAL = "worse", "better", "neutral"


@dataclass(frozen=True)
class Change:
    direction: str
    about: str
    said: str


def changes(old: Report, new: Report) -> list[Change]:
    """Worse first."""
    found = [*_of_nodes(old, new), *_of_pairs(old, new)]
    if old.headscale and new.headscale and old.headscale != new.headscale:
        found.append(Change(NEUTRAL, "Headscale", f"version {old.headscale} → {new.headscale}"))
    return sorted(found, key=lambda change: (WORSE, BETTER, NEUTRAL).index(change.direction))


def _of_nodes(old: Report, new: Report) -> Iterator[Change]:
    before = {node.name: node for node in old.nodes}
    after = {node.name: node for node in new.nodes}
    for name in sorted(after.keys() - before.keys()):
        yield Change(NEUTRAL, name, "new in the inventory")
    for name in sorted(before.keys() - after.keys()):
        yield Change(NEUTRAL, name, "no longer in the inventory")
    for name, node in after.items():
        if name in before:
            yield from _of_node(before[name], node)


def _of_node(old: Node, new: Node) -> Iterator[Change]:
    name = new.name
    if bool(old.problem) != bool(new.problem):
        yield Change(
            *(
                (WORSE, name, "no longer answers")
                if new.problem
                else (BETTER, name, "answers again")
            )
        )
    if old.problem or new.problem:
        return
    if old.ready != new.ready:
        yield Change(
            *(
                (BETTER, name, "is ready again")
                if new.ready
                else (WORSE, name, "is no longer ready")
            )
        )
    facts: tuple[tuple[str, Callable[[Node], str]], ...] = (
        ("mode", lambda node: node.mode),
        ("version of HeadCNI", lambda node: node.version),
        ("version of tailscaled", lambda node: node.tailscaled),
        ("kernel", lambda node: node.kernel),
        ("site", lambda node: node.site),
        ("pod CIDRs", lambda node: ", ".join(node.pod_cidrs)),
    )
    for what, fact in facts:
        if fact(old) != fact(new):
            yield Change(NEUTRAL, name, f"{what}: {fact(old) or 'none'} → {fact(new) or 'none'}")
    yield from _of_findings(old, new)
    were = {approval.cidr: approval for approval in old.approvals}
    for approval in new.approvals:
        was = were.get(approval.cidr)
        if was is not None and was.in_words != approval.in_words:
            way = BETTER if approval.ok else WORSE
            yield Change(way, name, f"{approval.cidr}: {was.in_words} → {approval.in_words}")
    filled = {(pool.network, pool.subnet): pool.percent for pool in old.pools}
    for pool in new.pools:
        was_filled = filled.get((pool.network, pool.subnet), pool.percent)
        if abs(pool.percent - was_filled) >= POOL_POINTS:
            yield Change(
                NEUTRAL, name, f"pool {pool.subnet}: {was_filled}% → {pool.percent}% in use"
            )


def _of_findings(old: Node, new: Node) -> Iterator[Change]:
    """By their id: the text may hold a time or a number that always differs."""
    were, are = ({finding.id: finding for finding in node.findings} for node in (old, new))
    for id_ in sorted(are.keys() - were.keys()):
        yield Change(WORSE, new.name, f"new finding: {are[id_].found}")
    for id_ in sorted(were.keys() - are.keys()):
        yield Change(BETTER, new.name, f"no longer found: {were[id_].found}")


def _of_pairs(old: Report, new: Report) -> Iterator[Change]:
    before = {(pair.a, pair.b): pair for pair in pairs(old)}
    order = ("direct", "relayed", "none")
    for pair in pairs(new):
        was = before.get((pair.a, pair.b)) or before.get((pair.b, pair.a))
        if was is not None and was.kind != pair.kind:
            way = WORSE if order.index(pair.kind) > order.index(was.kind) else BETTER
            said = f"path: {was.in_words} → {pair.in_words}"
            yield Change(way, f"{pair.a} ↔ {pair.b}", said)
