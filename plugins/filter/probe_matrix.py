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
        is no pod.
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
  description: C(lines), the lines of the table, and C(failed), the number of failures.
  type: dict
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ansible_collections.headcni.mesh.plugins.module_utils.pair_choice import ALL_UP_TO
from ansible_collections.headcni.mesh.plugins.plugin_utils.table import table

PAIR_CHECKS = ("v4", "v6", "mtu4", "mtu6", "port", "route", "dns")
NODE_CHECKS = ("runtime", "outside", "service", "cluster_dns")
MOST_LINES = 100  # of failures
NAMES_SHOWN = 3  # of the nodes that a line concerns
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
            found[host] = {**about, "results": probed["reached"], "beyond": beyond}
    return matrix(found)


def matrix(found: Mapping[str, Any]) -> dict[str, Any]:
    names = list(found)
    place = {name: number for number, name in enumerate(names)}
    paths = [(a, b, checks["path"]) for a, b, checks in _pairs(found) if checks.get("path")]
    paths.sort(key=lambda pair: (place[pair[0]], place[pair[1]]))
    kinds = Counter(path["kind"] for _unused, _unused, path in paths)
    red = list(_red(found))
    few = len(names) <= ALL_UP_TO
    lines = [*_tables(found), *_path_table(paths)] if few else []
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
    return {"lines": lines, "failed": len(red)}


def _totals(tested: int, possible: int) -> str:
    if tested == possible:
        return f"all {possible:,} pairs were tested"
    return (
        f"{tested:,} of {possible:,} pairs were tested, each in both directions "
        "(-e headcni_verify_all=true tests all)"
    )


def _tables(found: Mapping[str, Any]) -> list[str]:
    names = list(found)
    rows = [["from \\ to", *names]]
    rows += [[name, *(_cell(found, name, other) for other in names)] for name in names]
    lines = table(rows)
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


def _path_table(paths: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[str]:
    if not paths:
        return []
    rows = [["pair", "path", "latency", "through"]]
    for name, other, path in paths:
        taken = "" if path["ms"] is None else f"{path['ms']:.1f} ms"
        rows.append([f"{name} -> {other}", path["kind"], taken, path["through"]])
    return ["", *table(rows)]


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
            if not any(checks.get(check, {}).get("ok") is not None for check in ("v4", "v6")):
                yield "nothing", f"{name} -> {other}: no ping was tried"
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
