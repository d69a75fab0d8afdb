#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: headscale_routes
short_description: Approve the subnet routes of nodes in a Headscale server
version_added: 0.1.0
author:
  - The HeadCNI authors (@headcni)
description:
  - Approves exactly the given routes of exactly the given nodes. Other routes and other nodes stay
    as they are.
  - Reads the list of nodes once, for any number of nodes, and writes only what is missing.
  - Refuses a range that overlaps another node's. Headscale would treat the two as a
    high-availability pair, and one of them would get no traffic.
  - Nothing is written if any of the nodes is refused, unless O(problems=report).
options:
  nodes:
    description: The nodes and their routes.
    type: list
    elements: dict
    required: true
    suboptions:
      node_key:
        description:
          - The node's key, C(nodekey:) and 64 digits, as C(Self.PublicKey) of
            C(tailscale status --json).
          - It is unique even if several nodes have the same name. Give this, O(nodes[].id) or
            O(nodes[].name).
        type: str
      id:
        description: The node's id in Headscale.
        type: str
      name:
        description:
          - The node's name in Headscale, or its host name. The module fails if several nodes have
            it.
        type: str
      label:
        description: The node's name in results and messages. By default its key, id or name.
        type: str
      routes:
        description: The routes in CIDR notation, with no host bits set.
        type: list
        elements: str
        required: true
      same_machine_as:
        description:
          - Other identities of the same machine, by node key, id or name. They may have the same
            routes.
          - Use this while a machine moves from one tailscaled to another (make before break).
            Identities that no longer exist are ignored.
        type: list
        elements: str
        default: []
  state:
    description: V(absent) withdraws the approval of the given routes, and of no others.
    type: str
    choices: [present, absent]
    default: present
  purge:
    description:
      - Whether O(state=present) withdraws the approval of all other routes of the given nodes.
    type: bool
    default: false
  wait_served:
    description:
      - How many seconds to wait until each route is served, that is, advertised by its node,
        approved, and announced to other nodes. V(0) does not wait.
      - Headscale before 0.26 approves only advertised routes. With such a server this also waits
        for the advertisement.
    type: int
    default: 0
  problems:
    description:
      - What to do if there is a problem with some of the nodes, such as a node that Headscale does
        not know, a range that another node has, or a failed write.
      - V(fail) fails, and writes nothing if it finds a problem before the first write.
      - V(report) handles the other nodes, does not change those with a problem, and returns the
        reasons in RV(problems). If the server does not answer, the module fails in both cases.
    type: str
    choices: [fail, report]
    default: fail
attributes:
  check_mode:
    support: full
    details:
      - A node that does not exist yet is not an error but counts as a change, because it may be
        about to join.
  diff_mode:
    support: full
extends_documentation_fragment:
  - headcni.mesh.headscale
seealso:
  - module: headcni.mesh.headscale_policy
  - module: headcni.mesh.headscale_node
"""

EXAMPLES = r"""
- name: Approve the pod ranges of all nodes
  headcni.mesh.headscale_routes:
    url: https://headscale.example.org
    api_key: "{{ headcni_headscale_api_key }}"
    nodes:
      - name: node1
        routes: [10.244.1.0/24, "fd44:0:0:1::/64"]
      - node_key: nodekey:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
        routes: [10.244.2.0/24]
    wait_served: 30
  delegate_to: localhost
  run_once: true

- name: Let a second tailscaled of node1 take over its range
  headcni.mesh.headscale_routes:
    nodes:
      - name: node1-daemon
        routes: [10.244.1.0/24]
        same_machine_as: [node1]

- name: Withdraw the range from the first
  headcni.mesh.headscale_routes:
    nodes:
      - name: node1
        routes: [10.244.1.0/24]
    state: absent
"""

RETURN = r"""
problems:
  description:
    - The nodes with a problem, by label, each with the reason. Empty if there is none.
    - With O(wait_served), also nodes whose routes were approved but are not served.
  returned: unless the options are wrong or Headscale does not answer
  type: dict
  sample:
    node3: Headscale does not know node3; see that it has joined this very server
unknown:
  description: The labels of the nodes that Headscale does not know.
  returned: success
  type: list
  elements: str
routes:
  description: The routes of each node before and after. Nodes that were refused are not included.
  returned: success, or when some of the writes failed
  type: list
  elements: dict
  contains:
    label:
      description: The node's label.
      type: str
    id:
      description: The node's id. Empty in check mode if the node does not exist yet.
      type: str
    name:
      description: The node's name in Headscale.
      type: str
    before:
      description: The routes that were approved.
      type: list
      elements: str
    after:
      description: The routes that are approved now or would be.
      type: list
      elements: str
    changed:
      description: Whether the routes have changed.
      type: bool
    error:
      description: Why the approval could not be written. Empty if it was.
      type: str
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils.headscale import (
    DENIED,
    NO_ANSWER,
    NOT_FOUND,
    OPTION,
    REFUSED,
    UNSUPPORTED,
    Headscale,
    HeadscaleError,
    connect,
    connection_spec,
    fail,
)
from ansible_collections.headcni.mesh.plugins.module_utils.route_plan import (
    Approval,
    Plan,
    Problem,
    Wanted,
    by_label,
    parse,
    plan,
    refuse,
    unserved,
)

LONGEST_WAIT = 3600


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **connection_spec(),
            "nodes": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "node_key": {"type": "str", "no_log": False},
                    "id": {"type": "str"},
                    "name": {"type": "str"},
                    "label": {"type": "str"},
                    "routes": {"type": "list", "elements": "str", "required": True},
                    "same_machine_as": {"type": "list", "elements": "str", "default": []},
                },
            },
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "purge": {"type": "bool", "default": False},
            "wait_served": {"type": "int", "default": 0},
            "problems": {"type": "str", "choices": ["fail", "report"], "default": "fail"},
        },
        supports_check_mode=True,
    )
    given, check_mode = module.params, module.check_mode
    fails, seconds = given["problems"] == "fail", given["wait_served"]
    try:
        server = connect(module)
        planned, deadline = _prepared(server, given, check_mode)
    except HeadscaleError as problem:
        fail(module, problem)
    problems, result = list(planned.problems), {}
    try:
        if fails:
            refuse(problems)
        errors = {} if check_mode else _write(server, planned)
        problems += [Problem(label, REFUSED, why) for label, why in errors.items()]
        result = _result(planned, errors)
        if errors and fails:
            raise HeadscaleError(REFUSED, _told(planned, errors))
        if seconds and given["state"] == "present" and not check_mode:
            written = [a for a in planned.approvals if a.wanted.label not in errors]
            left = _wait_served(server, written, deadline)
            problems += [
                replace(late, what=f"not within {seconds} s: {late.what}") for late in left
            ]
            if left and fails:
                those = "; ".join(late.what for late in left)
                raise HeadscaleError(REFUSED, f"wait_served: not within {seconds} s: {those}")
    except HeadscaleError as problem:
        fail(module, problem, problems=by_label(problems), **result)
    for node in planned.coming:
        module.warn(
            f"{node.label} is not at Headscale yet: its routes would be approved once it is"
        )
    unknown = [problem.label for problem in problems if problem.kind == NOT_FOUND]
    module.exit_json(problems=by_label(problems), unknown=unknown, **result)


def _prepared(server: Headscale, given: dict[str, Any], check_mode: bool) -> tuple[Plan, float]:
    """The plan, and the deadline for its routes to be served."""
    wanted, mistakes = parse(given["nodes"])
    _check(given)
    fails = given["problems"] == "fail"
    if fails:
        refuse(mistakes)
    deadline = time.monotonic() + given["wait_served"]
    while True:
        planned = _planned(server, wanted, given, check_mode)
        late = [] if check_mode else _unadvertised(planned)
        if not late or (fails and planned.problems) or time.monotonic() >= deadline:
            break
        time.sleep(1)
    problems = [*mistakes, *planned.problems]
    if late:
        problems += _told_unadvertised(server, late)
        deadline = time.monotonic() + given["wait_served"]  # the others still get the full time
    approvals = tuple(approval for approval in planned.approvals if approval not in late)
    return replace(planned, approvals=approvals, problems=tuple(problems)), deadline


def _check(given: dict[str, Any]) -> None:
    if given["purge"] and given["state"] == "absent":
        raise HeadscaleError(
            OPTION, "purge: true, and state is absent: it takes back the given routes alone"
        )
    if not 0 <= given["wait_served"] <= LONGEST_WAIT:
        raise HeadscaleError(
            OPTION,
            f"wait_served: {given['wait_served']}, expected seconds from 0 to {LONGEST_WAIT}",
        )


def _planned(
    server: Headscale, wanted: list[Wanted], given: dict[str, Any], check_mode: bool
) -> Plan:
    return plan(
        server.nodes() if wanted else [],
        wanted,
        absent=given["state"] == "absent",
        purge=given["purge"],
        may_miss=check_mode,
    )


def _unadvertised(planned: Plan) -> list[Approval]:
    """Approvals that must wait: up to 0.25 a route must be advertised before it is approved."""
    return [approval for approval in planned.approvals if approval.unknown]


def _told_unadvertised(server: Headscale, late: Sequence[Approval]) -> list[Problem]:
    version = server.version().text
    return [
        Problem(
            approval.wanted.label,
            UNSUPPORTED,
            f"Headscale {version} approves only what a node has advertised, and this one has not: "
            f"{approval.wanted.label} {', '.join(approval.unknown)}",
            "wait with wait_served, or upgrade Headscale to 0.26",
        )
        for approval in late
    ]


def _write(server: Headscale, planned: Plan) -> dict[str, str]:
    """Write each approval separately, so that a failure of one does not stop the others. Returns
    the labels of those that failed, and the reasons."""
    errors: dict[str, str] = {}
    gone: Optional[HeadscaleError] = None
    for approval in planned.approvals:
        if not approval.changed:
            continue
        if gone is not None:
            errors[approval.wanted.label] = "not tried any more"
            continue
        try:
            server.approve(approval.node, approval.after)
        except HeadscaleError as problem:
            errors[approval.wanted.label] = str(problem)
            if problem.kind in (NO_ANSWER, DENIED):
                gone = problem
    return errors


def _told(planned: Plan, errors: dict[str, str]) -> str:
    done = sum(a.changed and a.wanted.label not in errors for a in planned.approvals)
    return f"nodes: {len(errors)} could not be written, {done} were: " + "; ".join(
        f"{label}: {why}" for label, why in errors.items()
    )


def _wait_served(
    server: Headscale, approvals: Sequence[Approval], deadline: float
) -> list[Problem]:
    """What is not served at the deadline. Only the list of nodes shows that, not a single node."""
    while True:
        left = unserved(server.nodes(), approvals)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(1)


def _result(planned: Plan, errors: dict[str, str]) -> dict[str, Any]:
    done = [a for a in planned.approvals if a.changed and a.wanted.label not in errors]
    before = {a.wanted.label: list(a.before) for a in done}
    after = {a.wanted.label: list(a.after) for a in done}
    return {
        "changed": bool(done or planned.coming),
        "routes": [
            *(_shown(a, errors.get(a.wanted.label, "")) for a in planned.approvals),
            *(_shown_coming(node) for node in planned.coming),
        ],
        "diff": {
            "before": {**before, **{node.label: [] for node in planned.coming}},
            "after": {**after, **{node.label: list(node.routes) for node in planned.coming}},
        },
    }


def _shown(approval: Approval, error: str) -> dict[str, Any]:
    return {
        "label": approval.wanted.label,
        "id": approval.node.id,
        "name": approval.node.name,
        "before": list(approval.before),
        "after": list(approval.before if error else approval.after),
        "changed": approval.changed and not error,
        "error": error,
    }


def _shown_coming(node: Wanted) -> dict[str, Any]:
    after = list(node.routes)
    named = {"label": node.label, "id": "", "name": ""}
    return {**named, "before": [], "after": after, "changed": True, "error": ""}


if __name__ == "__main__":
    main()
