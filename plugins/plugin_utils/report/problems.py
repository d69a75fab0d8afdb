# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is wrong in the mesh, the worst first, each with its meaning and its fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ansible_collections.headcni.mesh.plugins.module_utils.shared import modes
from ansible_collections.headcni.mesh.plugins.module_utils.shared.node_status import FULL_PERCENT
from ansible_collections.headcni.mesh.plugins.plugin_utils.report import pairs as measured
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.pairs import Pair
from ansible_collections.headcni.mesh.plugins.plugin_utils.report.record import Node, Report

BAD, DOUBTFUL = "bad", "doubtful"
MOST_NAMES = 8
NODE_PAIRS = 3  # so many bad paths of a single node become one problem of that node
NODE, CONTROLLER, HEADSCALE = "node", "controller", "headscale"
SITE = "ansible-playbook -i INVENTORY site.yml"
# Findings that the measured paths and Headscale's own answer tell better.
KNOWN_BY_PATHS = ("relayed", "no-path")
NOT_APPROVED = "not-approved"


@dataclass(frozen=True)
class Problem:
    level: str
    nodes: tuple[str, ...]
    found: str
    means: str = ""
    run: str = ""
    where: str = NODE  # the machine that runs `run`

    @property
    def names(self) -> str:
        return names(self.nodes)


def names(nodes: Sequence[str]) -> str:
    more = len(nodes) - MOST_NAMES
    shown = ", ".join(nodes[:MOST_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


def problems(report: Report, pairs: Sequence[Pair]) -> list[Problem]:
    found = [problem for node in report.nodes for problem in _of_node(node, report)]
    found += _duplicates(report.nodes)
    found += _of_paths(report, pairs)
    found += _of_versions(report.nodes)
    found += _of_report(report)
    merged = _merged(found)
    return sorted(merged, key=lambda problem: (BAD, DOUBTFUL).index(problem.level))


def _merged(found: Iterable[Problem]) -> list[Problem]:
    """The same problem of many nodes once, with all of them."""
    known: dict[Problem, dict[str, None]] = {}
    for problem in found:
        known.setdefault(replace(problem, nodes=()), {}).update(dict.fromkeys(problem.nodes))
    return [replace(problem, nodes=tuple(nodes)) for problem, nodes in known.items()]


def _of_node(node: Node, report: Report) -> Iterator[Problem]:
    here = (node.name,)
    if node.problem:
        yield Problem(
            BAD,
            here,
            f"no answer: {node.problem}",
            "nothing is known of this node. Headscale says that it is "
            f"{'online' if node.headscale_online else 'offline'}"
            if node.headscale_online is not None
            else "nothing is known of this node",
            "ansible -i INVENTORY NODE -m ansible.builtin.ping",
            CONTROLLER,
        )
    measures = {path.source for path in report.paths}
    by_headscale = bool(node.approvals)
    told = ""
    for finding in node.findings:
        told += finding.found + "\n"
        if finding.id in KNOWN_BY_PATHS and node.name in measures:
            continue
        if finding.id == NOT_APPROVED and by_headscale:
            continue
        level = BAD if finding.sure else DOUBTFUL
        yield Problem(level, here, finding.found, finding.means, finding.run, finding.where)
    for condition in node.conditions:
        if not condition.ok and condition.reason not in told:
            yield Problem(
                BAD,
                here,
                f"not ready: {condition.name}: {condition.reason}",
                "the daemon does not call the node ready",
                "headcnictl diagnose",
            )
    for approval in node.approvals:
        if not approval.ok:
            yield Problem(
                BAD,
                here,
                f"Headscale: {approval.cidr} is {approval.in_words}",
                "pods of other nodes do not reach the pods of this node",
                SITE,
                CONTROLLER,
            )
    for route in node.wrong_routes:
        if route.dst not in told:
            yield Problem(
                BAD if route.state == "missing" else DOUBTFUL,
                here,
                f"the route to {route.dst} of {route.node or 'an unknown node'} is {route.state}",
                "the kernel's routes are not as they should be; the daemon repairs them every 30 s",
                "systemctl restart headcni-daemon",
            )
    for pool in node.pools:
        if pool.leaked:
            yield Problem(
                DOUBTFUL,
                here,
                "addresses are leaked; the table of pools says how many",
                "their pods are gone, and nobody has released the addresses yet",
                "systemctl restart headcni-daemon",
            )
        if pool.percent >= FULL_PERCENT and "no free address" not in told:
            yield Problem(
                DOUBTFUL,
                here,
                f"at least {FULL_PERCENT}% of a pool are in use; the table of pools says how much",
                "when no address is free, no new pod can start; the command shows who has them",
                "headcnictl ipam --list",
            )
    for warning in node.warnings:
        # diagnose has the same about a key that expires, with the command.
        if not ("key for the tailnet" in warning and "key of this node" in told):
            yield Problem(DOUBTFUL, here, warning)
    for part in () if node.problem else node.unanswered:  # that problem explains them all
        yield Problem(
            DOUBTFUL, here, f"not known: {part}", "the report lacks this part of the node"
        )


def _duplicates(nodes: Sequence[Node]) -> Iterator[Problem]:
    owners: dict[str, list[str]] = {}
    for node in nodes:
        for cidr in node.pod_cidrs:
            owners.setdefault(cidr, []).append(node.name)
    for cidr, those in owners.items():
        if len(those) > 1:
            yield Problem(
                BAD,
                tuple(those),
                f"{cidr} is the pod CIDR of {len(those)} nodes",
                "only the pods of one of them can be reached; give each node a range of its own",
                "ansible-playbook -i INVENTORY playbooks/change_pod_cidr.yml",
                CONTROLLER,
            )


def _of_paths(report: Report, pairs: Sequence[Pair]) -> Iterator[Problem]:
    silent = {node.name for node in report.nodes if node.problem}
    socket = {
        node.name: "" if node.mode != "daemon" else f" --socket={modes.SOCKETS['daemon']}"
        for node in report.nodes
    }
    total = Counter(name for pair in pairs for name in (pair.a, pair.b))
    broken = [
        pair for pair in pairs if pair.kind == measured.NONE and not {pair.a, pair.b} & silent
    ]
    for nodes, many, pair in _causes(broken, total):
        yield Problem(
            BAD,
            nodes,
            f"{many} not answered" if many else f"no path between {pair.a} and {pair.b}",
            "their pods do not reach each other",
            f"tailscale{socket[nodes[0]]} status",
        )
    relayed = [pair for pair in pairs if pair.kind == measured.RELAYED]
    for nodes, many, pair in _causes(relayed, total):
        single = f"the path between {pair.a} and {pair.b} is {pair.in_words}"
        yield Problem(
            DOUBTFUL,
            nodes,
            f"{many} relayed" if many else single,
            "a relayed path is slower than a direct one: let UDP through between the nodes, at "
            "tailscaled's port (41641, in daemon mode 41642); docs/verify.md#paths",
            f"tailscale{socket[nodes[0]]} netcheck",
        )
    lossy = [pair for pair in pairs if pair.loss and pair.kind != measured.NONE]
    for nodes, many, pair in _causes(lossy, total):
        single = f"{pair.loss}% of the pings between {pair.a} and {pair.b} were lost"
        yield Problem(
            DOUBTFUL,
            nodes,
            f"{many} lossy" if many else single,
            "connections of pods are slow or break; run the report again to see if it lasts",
        )


def _causes(
    pairs: Sequence[Pair], total: Counter[str]
) -> Iterator[tuple[tuple[str, ...], str, Pair]]:
    """The nodes that a problem of paths is about, the beginning of a sentence if it is about many
    paths of a single node, and the first of the pairs."""
    for node, those in _by_node(pairs):
        first = those[0]
        yield (node,) if node else (first.a, first.b), _how_many(node, those, total), first


def _how_many(node: str, those: Sequence[Pair], total: Counter[str]) -> str:
    if not node:
        return ""
    others = [pair.b if pair.a == node else pair.a for pair in those]
    return f"{len(those)} of the {total[node]} measured paths of {node} ({names(others)}) are"


def _by_node(pairs: Sequence[Pair]) -> Iterator[tuple[str, list[Pair]]]:
    """The node with the most of these pairs first: it is probably the cause. Pairs that are left
    over come alone, without a node."""
    left = list(pairs)
    while left:
        node, count = Counter(name for pair in left for name in (pair.a, pair.b)).most_common(1)[0]
        if count < NODE_PAIRS:
            break
        yield node, [pair for pair in left if node in (pair.a, pair.b)]
        left = [pair for pair in left if node not in (pair.a, pair.b)]
    for pair in left:
        yield "", [pair]


def _of_versions(nodes: Sequence[Node]) -> Iterator[Problem]:
    answered = [node for node in nodes if not node.problem]
    for what, attribute, playbook in (
        ("HeadCNI", "version", "upgrade.yml"),
        ("tailscaled", "tailscaled", "upgrade.yml"),
    ):
        found = Counter(getattr(node, attribute) for node in answered if getattr(node, attribute))
        if len(found) < 2:
            continue
        usual = found.most_common(1)[0][0]
        others = tuple(n.name for n in answered if getattr(n, attribute) not in ("", usual))
        shown = ", ".join(f"{version} ({count})" for version, count in found.most_common(5))
        yield Problem(
            DOUBTFUL,
            others,
            f"nodes run {len(found)} versions of {what}: {shown}",
            "the nodes named here do not run the most frequent version",
            f"ansible-playbook -i INVENTORY playbooks/{playbook}",
            CONTROLLER,
        )


def _of_report(report: Report) -> Iterator[Problem]:
    if report.headscale_problem:
        yield Problem(
            DOUBTFUL,
            (),
            f"approvals are not known: {report.headscale_problem}",
            "the report cannot say whether Headscale has approved the pod CIDRs",
        )
    if report.strangers:
        yield Problem(
            DOUBTFUL,
            (),
            f"nodes of the tailnet that are not in the inventory: {names(report.strangers)}",
            "they answered tailscaled's ping, but the report knows nothing else of them",
        )
