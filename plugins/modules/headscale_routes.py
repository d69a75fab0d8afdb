#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: headscale_routes
short_description: Approve the subnet routes of all nodes at a Headscale server
version_added: 0.1.0
author:
  - The HeadCNI authors (@headcni)
description:
  - Approves exactly the given routes of exactly the given nodes. Other routes of theirs, and other
    nodes, stay as they are.
  - Asks the server for its nodes once, however many there are, and writes only where something is
    missing.
  - A range that overlaps another node's is refused, before anything is written. Headscale would
    take the two for a pair, and one of them would get no traffic.
options:
  nodes:
    description: The nodes and their routes.
    type: list
    elements: dict
    required: true
    suboptions:
      node_key:
        description:
          - The node's key, C(nodekey:) and 64 digits, as C(tailscale status --json) has it in
            C(Self.PublicKey).
          - Proof against other nodes of the same name. One of this, O(nodes[].id) and
            O(nodes[].name) is needed.
        type: str
      id:
        description: The node's number at Headscale.
        type: str
      name:
        description:
          - The node's name at Headscale, or its host name. An error if several nodes have it.
        type: str
      label:
        description: What results and messages call the node. By default what it was named by.
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
          - For the time in which a machine changes from one tailscaled to another, make before
            break. Those that are no more are passed over.
        type: list
        elements: str
        default: []
  state:
    description: V(absent) takes the approval of the given routes back, and of no others.
    type: str
    choices: [present, absent]
    default: present
  purge:
    description:
      - Whether O(state=present) takes back the approval of every other route of the given nodes.
    type: bool
    default: false
  wait_served:
    description:
      - How many seconds to wait until each of the routes is served, that is, advertised by its
        node, approved, and the one that Headscale sends to others. V(0) does not wait.
      - Before 0.26, Headscale approves only what a node has advertised; there this also waits for
        that.
    type: int
    default: 0
attributes:
  check_mode:
    support: full
    details:
      - A node that is not there yet is no error then, but counts as a change, as it may be about to
        join.
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
    api_key: "{{ vault_headscale_api_key }}"
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

- name: Then take it from the first
  headcni.mesh.headscale_routes:
    nodes:
      - name: node1
        routes: [10.244.1.0/24]
    state: absent
"""

RETURN = r"""
routes:
  description: What each node had and has.
  returned: success, or when some of the writes failed
  type: list
  elements: dict
  contains:
    label:
      description: What the task calls it.
      type: str
    id:
      description: Its number. Empty in check mode for one that is not there yet.
      type: str
    name:
      description: Its name at Headscale.
      type: str
    before:
      description: The routes that were approved.
      type: list
      elements: str
    after:
      description: The routes that are approved now, or would be.
      type: list
      elements: str
    changed:
      description: Whether that differs.
      type: bool
    error:
      description: Why it could not be written. Empty if it was.
      type: str
"""

import time
from typing import Any, Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils.headscale import (
    DENIED,
    NO_ANSWER,
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
    Wanted,
    parse,
    plan,
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
        },
        supports_check_mode=True,
    )
    given, check_mode = module.params, module.check_mode
    try:
        server = connect(module)
        wanted = parse(given["nodes"])
        _check(given)
        deadline = time.monotonic() + given["wait_served"]
        planned = _planned(server, wanted, given, check_mode)
        if not check_mode:
            while _unadvertised(server, planned, deadline):
                time.sleep(1)
                planned = _planned(server, wanted, given, check_mode)
    except HeadscaleError as problem:
        fail(module, problem)
    errors = {} if check_mode else _write(server, planned)
    result = _result(planned, errors)
    try:
        if errors:
            raise HeadscaleError(REFUSED, _told(planned, errors))
        if given["wait_served"] and given["state"] == "present" and not check_mode:
            _wait_served(server, planned, given["wait_served"], deadline)
    except HeadscaleError as problem:
        fail(module, problem, **result)
    for one in planned.coming:
        module.warn(f"{one.label} is not at Headscale yet: its routes would be approved once it is")
    module.exit_json(**result)


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


def _unadvertised(server: Headscale, planned: Plan, deadline: float) -> bool:
    """Up to 0.25 a route must be advertised before it is approved: whether to wait for that."""
    unknown = [f"{a.wanted.label} {route}" for a in planned.approvals for route in a.unknown]
    if unknown and time.monotonic() >= deadline:
        raise HeadscaleError(
            UNSUPPORTED,
            f"nodes: Headscale {server.version().text} approves only what a node has advertised, "
            f"and these have not: {', '.join(unknown)}; wait with wait_served, or upgrade "
            "Headscale to 0.26",
        )
    return bool(unknown)


def _write(server: Headscale, planned: Plan) -> dict[str, str]:
    """Each by itself: what fails for one does not keep the others waiting. The labels of those
    that failed, and why."""
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


def _wait_served(server: Headscale, planned: Plan, seconds: int, deadline: float) -> None:
    """The list alone tells what is served, not the call for one node."""
    while True:
        left = unserved(server.nodes(), planned.approvals)
        if not left:
            return
        if time.monotonic() >= deadline:
            raise HeadscaleError(
                REFUSED, f"wait_served: not within {seconds} s: " + "; ".join(left)
            )
        time.sleep(1)


def _result(planned: Plan, errors: dict[str, str]) -> dict[str, Any]:
    done = [a for a in planned.approvals if a.changed and a.wanted.label not in errors]
    before = {a.wanted.label: list(a.before) for a in done}
    after = {a.wanted.label: list(a.after) for a in done}
    return {
        "changed": bool(done or planned.coming),
        "routes": [
            *(_shown(a, errors.get(a.wanted.label, "")) for a in planned.approvals),
            *(_shown_coming(one) for one in planned.coming),
        ],
        "diff": {
            "before": {**before, **{one.label: [] for one in planned.coming}},
            "after": {**after, **{one.label: list(one.routes) for one in planned.coming}},
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


def _shown_coming(one: Wanted) -> dict[str, Any]:
    after = list(one.routes)
    named = {"label": one.label, "id": "", "name": ""}
    return {**named, "before": [], "after": after, "changed": True, "error": ""}


if __name__ == "__main__":
    main()
