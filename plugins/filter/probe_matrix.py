# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""A table of what the pods of all nodes reach, with failures and what to do next."""

from __future__ import annotations

DOCUMENTATION = r"""
name: probe_matrix
short_description: Make a table of what pods reach
version_added: 0.1.0
description:
  - Makes a table from the results of M(headcni.mesh.headcni_probe), with a row and a column for
    each node, and the path of each pair. Below it are the checks that were not made, the failures,
    and what to do about them.
  - The tables are at most 80 columns wide. If the nodes' names and results do not fit, the columns
    have numbers, and if necessary only a mark for each pair.
  - With more than 20 nodes there are totals instead of tables.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.hosts
options:
  hostvars:
    description:
      - The variables of all hosts. C(headcni_probe) is the result of starting a node's pod,
        C(headcni_probed) the result of its tests, and C(headcni_probe_problem) the reason if there
        is no pod. C(headcni_measured) is the result of measuring throughput.
  targets:
    description: The targets of each node, as P(headcni.mesh.probe_pairs#filter) chose them.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Show what pods reach
  ansible.builtin.debug:
    msg: >-
      {{ (ansible_play_hosts_all
      | headcni.mesh.probe_matrix(hostvars, headcni_probe_pairs.targets)).lines }}
  run_once: true
"""

RETURN = r"""
_value:
  description:
    - C(lines), the lines of the table, and C(failed), the number of failures.
    - C(cases), each check with C(from), C(to) (empty for a check of a single node), C(check), C(ok)
      and C(detail); C(pairs), the measurements of each pair; and C(junit), the same checks as the
      text of a JUnit file.
  type: dict
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.headcni.mesh.plugins.module_utils.pair_choice import ALL_UP_TO
from ansible_collections.headcni.mesh.plugins.module_utils.shared import junit
from ansible_collections.headcni.mesh.plugins.plugin_utils.table import table

COLUMNS = 80
PAIR_CHECKS = ("v4", "v6", "mtu4", "mtu6", "port", "route", "dns", "loss", "throughput")
NODE_CHECKS = ("runtime", "outside", "service", "cluster_dns")
MOST_LINES = 100  # of failures
NAMES_SHOWN = 3  # of the nodes that a line concerns
LEAST_NAME = 8  # characters of a node's name in a matrix
DIRECT_MARK = "."
RELAYED_MARK = "r"
LATENCIES = "in ms; r relayed, X failed, ? not tested"
MARKS = ". ok, r ok and relayed, X failed, ? not tested"
NO_PING = "no ping was tried"
NEXT = {
    "v4": "headcnictl diagnose on both nodes; Headscale's policy must let pods reach pods "
    "(docs/headscale-policy.md), and so must the nodes' firewalls (docs/firewalls.md)",
    "mtu4": "the path does not carry packets of the pods' size: make headcni_node_mtu smaller "
    "(1280 fits every tailnet), run site.yml, and restart the pods",
    "port": "on the other node: nft list table inet headcni shows its host ports, and "
    "docs/firewalls.md what else can be in their way; headcni_verify_host_port chooses another",
    "route": "run site.yml, which approves each node's pod CIDR; headscale nodes list-routes shows "
    "what is approved",
    "dns": "tailscale status on the node shows the names that there are; "
    "headcni_node_magic_dns_nameservers must be reachable from pods",
    "loss": "tailscale netcheck on both nodes; a link that is full, a processor that is busy and "
    "a relay drop packets",
    "throughput": "Headscale's policy and network policies must let pods connect to port 8474 of "
    "other pods",
    "outside": "headcnictl diagnose on the node; headcni_node_ip_masq must be on, and "
    "docs/firewalls.md says what can be in the way; headcni_verify_outside chooses what is tried",
    "service": "kubectl get endpointslices -l kubernetes.io/service-name=kubernetes shows who is "
    "behind it; kube-proxy, or k3s, must run on the node",
    "cluster_dns": "kubectl -n kube-system get pods -l k8s-app=kube-dns -o wide shows who should "
    "answer; headcni_verify_cluster_dns names other servers",
    "nothing": "run verify.yml again; -vvv shows what the node said",
}
SAME = {"v6": "v4", "mtu6": "mtu4"}
RELAYED = (
    "a relayed path is slower: let UDP through between the nodes, at the port of tailscaled (41641 "
    "by default, headcni_node_tailscaled_port in daemon mode); docs/verify.md#paths"
)


def of_hosts(
    hosts: Sequence[str], hostvars: Mapping[str, Any], targets: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    found = {}
    for host in hosts:
        known = hostvars.get(host, {})
        made, probed = known.get("headcni_probe") or {}, known.get("headcni_probed") or {}
        problem = known.get("headcni_probe_problem") or "it cannot be reached"
        about = {"targets": targets.get(host) or (), "runtime": made.get("runtime")}
        if probed.get("reached") is None:
            found[host] = {**about, "problem": problem}
        else:
            beyond = probed.get("beyond") or {}
            sent = (known.get("headcni_measured") or {}).get("throughput") or {}
            results = {
                other: {**checks, **({"throughput": sent[other]} if other in sent else {})}
                for other, checks in probed["reached"].items()
            }
            found[host] = {**about, "results": results, "beyond": beyond}
    return matrix(found)


def matrix(found: Mapping[str, Any]) -> dict[str, Any]:
    names = list(found)
    place = {name: number for number, name in enumerate(names)}
    paths = [pair for pair in _pairs(found) if pair[2].get("path")]
    paths.sort(key=lambda pair: (place[pair[0]], place[pair[1]]))
    kinds = Counter(checks["path"]["kind"] for _unused, _unused, checks in paths)
    red = list(_red(found))
    few = len(names) <= ALL_UP_TO
    lines = [*_tables(found), *_pair_table(paths, names)] if few else []
    lines += ["", f"checked from each pod: {', '.join(_asked(found)) or 'nothing'}"]
    tested = sum(1 for _pair in _pairs(found))
    possible = len(names) * (len(names) - 1)
    if not few:
        lines.append(_totals(tested, possible))
        shown = ", ".join(f"{number:,} {kind}" for kind, number in sorted(kinds.items()))
        lines += [f"paths: {shown}"] if shown else []
    lines += [RELAYED] if kinds["relayed"] else []
    lines += [f"not checked: {text}" for text in _skipped(found)]
    if red:
        lines += [text for _unused, text in red[:MOST_LINES]]
        lines += [f"{len(red) - MOST_LINES:,} more failures"] if len(red) > MOST_LINES else []
        lines += _what_next(red)
    elif tested and tested == possible:
        lines.append("every pod reaches every other")
    elif tested:
        lines.append("every pod that was asked has answered")
    cases = list(_cases(found))
    return {
        "lines": lines,
        "failed": len(red),
        "cases": cases,
        "pairs": [_measured(*pair) for pair in _pairs(found)],
        "junit": junit.document("headcni", list(map(_junit_case, cases))),
    }


def _totals(tested: int, possible: int) -> str:
    if tested == possible:
        return f"all {possible:,} pairs were tested"
    return (
        f"{tested:,} of {possible:,} pairs were tested, each in both directions "
        "(-e headcni_verify_all=true tests all)"
    )


def _tables(found: Mapping[str, Any]) -> list[str]:
    lines = _matrix(found)
    beyond = [
        check
        for check in NODE_CHECKS[1:]
        if any(check in (node.get("beyond") or {}) for node in found.values())
    ]
    if beyond or any(node.get("runtime") for node in found.values()):
        head = ["node", "pod made by", *beyond]
        rows = [
            [name, _maker(node), *(_state(node, c) for c in beyond)] for name, node in found.items()
        ]
        lines += ["", *table([head, *rows])]
    return lines


def _matrix(found: Mapping[str, Any]) -> list[str]:
    """The first of these that is narrow enough: all, only the latencies, or only marks."""
    names = list(found)
    rows = [["from \\ to", *names]]
    rows += [[name, *(_cell(found, name, other) for other in names)] for name in names]
    if _fits(lines := table(rows)):
        return lines
    for cell, legend in ((_latency, LATENCIES), (_mark, MARKS)):
        cells = [[cell(found, name, other) for other in names] for name in names]
        head = [str(number) for number in range(1, len(names) + 1)]
        widths = [max(map(len, column)) for column in zip(head, *cells)]
        space = COLUMNS - len(head[-1]) - 1 - sum(size + 1 for size in widths)
        if space < LEAST_NAME and cell is _latency:
            continue
        labels = [f"{n} {_short(name, space)}" for n, name in zip(head, names)]
        rows = [["to", *head], *([label, *row] for label, row in zip(labels, cells))]
        first = max(map(len, ["to", *labels]))
        lines = [
            " ".join([row[0].ljust(first), *(c.rjust(w) for c, w in zip(row[1:], widths))])
            for row in rows
        ]
        return [*lines, legend]
    return lines


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: max(most, 2) - 1]}…"


def _fits(lines: Sequence[str]) -> bool:
    return max(map(len, lines)) <= COLUMNS


def _latency(found: Mapping[str, Any], name: str, other: str) -> str:
    mark = _mark(found, name, other)
    if mark not in (DIRECT_MARK, RELAYED_MARK):
        return mark
    ms = _ms(found[name]["results"][other])
    shown = mark if ms is None else f"{ms:.1f}" if ms < 10 else f"{ms:.0f}"
    return f"{shown}{RELAYED_MARK}" if mark == RELAYED_MARK and ms is not None else shown


def _mark(found: Mapping[str, Any], name: str, other: str) -> str:
    cell = _cell(found, name, other)
    if cell.startswith("ok"):
        return RELAYED_MARK if cell.endswith("relayed") else DIRECT_MARK
    return {"-": "-", "NONE": "?"}.get(cell, "X")


def _ms(checks: Mapping[str, Any]) -> float | None:
    """Between the pods: the median if there were many pings, else tailscaled's own."""
    known = (checks.get("loss") or {}).get("ms")
    if known is None:
        known = (checks.get("path") or {}).get("ms")
    return None if known is None else float(known)


def _cell(found: Mapping[str, Any], name: str, other: str) -> str:
    if name == other:
        return "NONE" if found[name].get("problem") else "-"
    checks = (found[name].get("results") or {}).get(other)
    if checks is None:
        return "NONE"
    wrong = [check for check in PAIR_CHECKS if checks.get(check, {}).get("ok") is False]
    if wrong:
        return f"FAIL {' '.join(wrong)}"
    ping = checks.get("v4") or checks.get("v6")
    if not ping or ping["ok"] is not True:
        return "NONE"
    return f"ok {ping['detail']} {(checks.get('path') or {}).get('kind', '')}".strip()


def _maker(node: Mapping[str, Any]) -> str:
    if node.get("problem"):
        return "NONE"
    runtime = node.get("runtime") or {}
    return str(runtime["detail"]) if runtime.get("ok") else "plugins"


def _state(node: Mapping[str, Any], check: str) -> str:
    result = (node.get("beyond") or {}).get(check)
    if result is None:
        return "NONE" if node.get("problem") else "-"
    return {True: "ok", False: "FAIL", None: "not checked"}[result["ok"]]


def _pair_table(
    paths: Sequence[tuple[str, str, Mapping[str, Any]]], names: Sequence[str]
) -> list[str]:
    """If the names make it too wide, they are replaced by their numbers, and what is still too wide
    continues on a line of its own."""
    if not paths:
        return []
    measured = [_measured(*pair) for pair in paths]
    number = {name: str(at) for at, name in enumerate(names, 1)}
    for name_of in (str, number.__getitem__):
        rows = [["pair", "path", "latency", "loss", "MTU", "throughput", "through"]]
        for one in measured:
            shown = (
                _unit(one["latency_ms"], " ms", 1),
                _unit(one["loss_percent"], " %", 0),
                _unit(one["mtu"], "", 0),
                _unit(one["throughput_mbit"], " Mbit/s", 0),
            )
            pair = f"{name_of(one['from'])} -> {name_of(one['to'])}"
            rows.append([pair, one["path"], *shown, one["through"]])
        kept = [at for at, column in enumerate(zip(*rows)) if any(column[1:])]
        rows = [[row[at] for at in kept] for row in rows]
        if _fits(lines := table(rows)):
            return ["", *lines]
    begun = table([row[:-1] for row in rows])
    width = max(map(len, begun))
    lines = [""]
    for line, row in zip(begun, rows):
        fits = width + 2 + len(row[-1]) <= COLUMNS
        lines += [f"{line.ljust(width)}  {row[-1]}"] if fits else [line, f"    through {row[-1]}"]
    return lines


def _unit(value: float | None, unit: str, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def _measured(name: str, other: str, checks: Mapping[str, Any]) -> dict[str, Any]:
    path = checks.get("path") or {}
    full = any((checks.get(check) or {}).get("ok") for check in ("mtu4", "mtu6"))
    return {
        "from": name,
        "to": other,
        "path": path.get("kind", ""),
        "through": path.get("through", ""),
        "latency_ms": _ms(checks),
        "loss_percent": (checks.get("loss") or {}).get("percent"),
        "mtu": checks.get("mtu") if full else None,
        "throughput_mbit": (checks.get("throughput") or {}).get("mbit"),
    }


def _cases(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Each check of each node and pair. A node without a pod has one that failed."""
    for name, node in found.items():
        problem = node.get("problem")
        if problem or node.get("results") is not None:
            yield _case(name, "", "pod", {"ok": not problem, "detail": problem or ""})
        for check, result in _node_checks(node).items():
            yield _case(name, "", check, result)
        for other in node.get("targets") or () if node.get("results") is not None else ():
            checks = node["results"].get(other) or {}
            if _has_no_ping(checks):
                yield _case(name, other, "ping", {"ok": False, "detail": NO_PING})
    for name, other, checks in _pairs(found):
        for check in PAIR_CHECKS:
            if check in checks:
                yield _case(name, other, check, checks[check])


def _case(name: str, other: str, check: str, result: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "from": name,
        "to": other,
        "check": check,
        "ok": result["ok"],
        "detail": result["detail"],
    }


def _junit_case(case: Mapping[str, Any]) -> junit.Case:
    subject = f"{case['from']} -> {case['to']}" if case["to"] else case["from"]
    return junit.Case(subject, case["check"], case["ok"], case["detail"])


def _has_no_ping(checks: Mapping[str, Any]) -> bool:
    return not any(checks.get(check, {}).get("ok") is not None for check in ("v4", "v6"))


def _pairs(found: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for name, node in found.items():
        for other, checks in (node.get("results") or {}).items():
            yield name, other, checks


def _node_checks(node: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    results = {"runtime": node.get("runtime"), **(node.get("beyond") or {})}
    return {check: results[check] for check in NODE_CHECKS if results.get(check)}


def _red(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The name of each check that failed, with a line that describes the failure."""
    for name, node in found.items():
        if node.get("problem"):
            yield "", f"{name}: {node['problem']}"
    for name, node in found.items():
        for check, result in _node_checks(node).items():
            if result["ok"] is False:
                yield check, f"{name}: {check}: {result['detail']}"
    for name, node in found.items():
        results = node.get("results")
        for other in node.get("targets") or () if results is not None else ():
            checks = results.get(other) or {}
            if _has_no_ping(checks):
                yield "nothing", f"{name} -> {other}: {NO_PING}"
    for name, other, checks in _pairs(found):
        for check in PAIR_CHECKS:
            if checks.get(check, {}).get("ok") is False:
                yield check, f"{name} -> {other}: {check}: {checks[check]['detail']}"


def _what_next(red: Sequence[tuple[str, str]]) -> list[str]:
    kinds = dict.fromkeys(SAME.get(check, check) for check, _unused in red)
    return [f"next, for {check}: {NEXT[check]}" for check in kinds if check in NEXT]


def _asked(found: Mapping[str, Any]) -> list[str]:
    seen = {
        check
        for _unused, _unused, checks in _pairs(found)
        for check in PAIR_CHECKS
        if checks.get(check, {}).get("ok") is not None
    }
    for node in found.values():
        seen |= {c for c, result in _node_checks(node).items() if result["ok"] is not None}
    return [check for check in (*PAIR_CHECKS, *NODE_CHECKS) if check in seen]


def _skipped(found: Mapping[str, Any]) -> list[str]:
    """Each reason once, with the nodes that it concerns."""
    about: dict[str, dict[str, None]] = {}
    for name, other, checks in _pairs(found):
        del other
        for check in PAIR_CHECKS:
            if check in checks and checks[check]["ok"] is None:
                about.setdefault(f"{check}: {checks[check]['detail']}", {})[name] = None
    for name, node in found.items():
        for check, result in _node_checks(node).items():
            if result["ok"] is None:
                about.setdefault(f"{check}: {result['detail']}", {})[name] = None
    return [f"{text} ({_nodes(list(names), len(found))})" for text, names in about.items()]


def _nodes(names: Sequence[str], total: int) -> str:
    if len(names) == total > 1:
        return f"all {total:,} nodes"
    more = len(names) - NAMES_SHOWN
    if more <= 1:
        return ", ".join(names)
    return f"{', '.join(names[:NAMES_SHOWN])} and {more:,} more"


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"probe_matrix": of_hosts}
