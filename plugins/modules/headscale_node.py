#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: headscale_node
short_description: Rename, tag, expire or remove nodes of a Headscale server
version_added: 0.1.0
author:
  - The HeadCNI authors (@headcni)
description:
  - Changes one node of a Headscale server. It cannot create nodes; a node appears when it joins.
  - With O(node_keys) it removes any number of nodes, and reads the list of nodes only once.
options:
  id:
    description: The node's id in Headscale.
    type: str
  node_key:
    description: The node's key, C(nodekey:) and 64 digits, as in C(tailscale status --json).
    type: str
  name:
    description:
      - The node's name in Headscale, or its host name.
      - If several nodes have this name, the module fails and lists their ids.
    type: str
  node_keys:
    description:
      - The keys of nodes to remove. Only with O(state=absent).
      - A key that Headscale does not know is ignored.
    type: list
    elements: str
  problems:
    description:
      - What to do if a node of O(node_keys) cannot be removed. The others are always removed.
      - V(fail) fails. V(report) only returns the reason in RV(problems). If the server does not
        return its nodes, the module fails in both cases.
    type: str
    choices: [fail, report]
    default: fail
  state:
    description: V(absent) removes the node. To return, it must join again.
    type: str
    choices: [present, absent]
    default: present
  new_name:
    description: The new name of the node, a DNS label.
    type: str
  tags:
    description:
      - The complete list of tags for the node.
      - With Headscale 0.28 and newer, each tag must be in the policy's C(tagOwners), and the last
        tag of a node cannot be removed.
    type: list
    elements: str
  expiry:
    description:
      - V(now) expires the node's key, unless it has already expired. Then the node must log in
        again.
      - V(never) means that the key never expires. This needs Headscale 0.29 or newer.
    type: str
    choices: [now, never]
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
extends_documentation_fragment:
  - headcni.mesh.headscale
seealso:
  - module: headcni.mesh.headscale_routes
  - module: headcni.mesh.headscale_policy
"""

EXAMPLES = r"""
- name: Remove the old identity of a reinstalled machine
  headcni.mesh.headscale_node:
    url: https://headscale.example.org
    api_key: "{{ headcni_headscale_api_key }}"
    id: "12"
    state: absent
  delegate_to: localhost

- name: Remove several nodes, and read the list of nodes once
  headcni.mesh.headscale_node:
    node_keys:
      - nodekey:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
      - nodekey:fedcba9876543210fedcba9876543210fedcba9876543210fedcba9876543210
    state: absent
  delegate_to: localhost
  run_once: true

- name: Rename a node and set its tags
  headcni.mesh.headscale_node:
    name: node1
    new_name: rack-7-1
    tags: [tag:k8s]

- name: Make the node log in again
  headcni.mesh.headscale_node:
    name: rack-7-1
    expiry: now
"""

RETURN = r"""
problems:
  description: The nodes of O(node_keys) that could not be removed, by key, each with the reason.
  returned: with O(node_keys)
  type: dict
node:
  description: The node as it is now or would be. Empty if it is absent, or with O(node_keys).
  returned: success
  type: dict
  contains:
    id:
      description: The node's id.
      type: str
    node_key:
      description: The node's key.
      type: str
    name:
      description: The node's name, a DNS label.
      type: str
    hostname:
      description: The machine's own host name.
      type: str
    user:
      description: The user who owns the node.
      type: str
    tags:
      description: The node's tags.
      type: list
      elements: str
    expiry:
      description: When the node's key expires. Empty if it does not.
      type: str
    approved_routes:
      description: The routes that are approved.
      type: list
      elements: str
"""

from dataclasses import replace
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils.headscale import (
    DENIED,
    NO_ANSWER,
    NOT_FOUND,
    OPTION,
    REFUSED,
    Headscale,
    HeadscaleError,
    check_label,
    check_tags,
    connect,
    connection_spec,
    fail,
    find_node,
)
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_objects import Node
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_policy import tags_of

SELECTORS = ("id", "node_key", "name")
WAYS = (*SELECTORS, "node_keys")
MOST_SHOWN = 10


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **connection_spec(),
            "id": {"type": "str"},
            "node_key": {"type": "str", "no_log": False},
            "name": {"type": "str"},
            "node_keys": {"type": "list", "elements": "str", "no_log": False},
            "problems": {"type": "str", "choices": ["fail", "report"], "default": "fail"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "new_name": {"type": "str"},
            "tags": {"type": "list", "elements": "str"},
            "expiry": {"type": "str", "choices": ["now", "never"]},
        },
        required_one_of=[WAYS],
        mutually_exclusive=[WAYS],
        supports_check_mode=True,
    )
    given, result = module.params, {}
    try:
        server = connect(module)
        if given["node_keys"] is None:
            result = _ensure(server, given, module.check_mode)
        else:
            result = _remove(server, given, module.check_mode)
            if result["problems"] and given["problems"] == "fail":
                raise HeadscaleError(REFUSED, _told(result["problems"], len(given["node_keys"])))
    except HeadscaleError as problem:
        fail(module, problem, **result)
    module.exit_json(**result)


def _ensure(server: Headscale, given: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    if given["new_name"] is not None:
        check_label("new_name", given["new_name"])
    check_tags("tags", given["tags"] or ())
    nodes = server.nodes()
    node = find_node(nodes, **{key: given[key] for key in SELECTORS})
    if node is None and given["new_name"]:
        # An earlier run may already have renamed it.
        node = find_node(nodes, name=given["new_name"]) if given["name"] else None
    if given["state"] == "absent":
        return _absent(server, node, check_mode)
    if node is None:
        key = next(key for key in SELECTORS if given[key])
        raise HeadscaleError(
            NOT_FOUND,
            f"{key}: Headscale has no node {given[key]!r}; see that it has joined this very server",
        )
    wanted = _wanted(server, node, nodes, given)
    if not check_mode:
        _write(server, node, wanted)
    return {
        "changed": wanted != node,
        "node": wanted.as_dict(),
        "diff": {"before": _changeable(node), "after": _changeable(wanted)},
    }


def _wanted(server: Headscale, node: Node, nodes: list[Node], given: dict[str, Any]) -> Node:
    """The node with its changes. Refuses what the server would refuse, so that check mode predicts
    that, too."""
    wanted = node
    new_name = given["new_name"] or node.name
    if new_name != node.name:
        for other in nodes:
            if other.name == new_name:
                raise HeadscaleError(
                    OPTION, f"new_name: {new_name!r} is the name of node {other.label} already"
                )
        wanted = replace(wanted, name=new_name)
    if given["tags"] is not None and set(given["tags"]) != set(node.tags):
        if node.tags_need_owners:
            _check_owners(server, given["tags"])
        wanted = replace(wanted, tags=tuple(sorted(set(given["tags"]))))
    expired = node.expiry is not None and node.expiry <= server.now()
    if given["expiry"] == "now" and not expired:
        wanted = replace(wanted, expiry=server.now())
    if given["expiry"] == "never" and node.expiry is not None:
        server.check_never()
        wanted = replace(wanted, expiry=None)
    return wanted


def _check_owners(server: Headscale, tags: list[str]) -> None:
    if not tags:
        raise HeadscaleError(
            OPTION, "tags: empty, and Headscale takes away no node's last tag: name at least one"
        )
    unknown = sorted(set(tags) - tags_of(server.policy().text))
    if unknown:
        raise HeadscaleError(
            REFUSED,
            f"tags: {', '.join(unknown)} not in the policy's tagOwners: "
            "add it there with headscale_policy tag_owners",
        )


def _write(server: Headscale, node: Node, wanted: Node) -> None:
    if wanted.name != node.name:
        server.rename_node(node, wanted.name)
    if wanted.tags != node.tags:
        server.tag_node(node, wanted.tags)
    if wanted.expiry != node.expiry and wanted.expiry is not None:
        server.expire_node(node)
    elif wanted.expiry != node.expiry:
        server.never_expire_node(node)


def _absent(server: Headscale, node: Node | None, check_mode: bool) -> dict[str, Any]:
    if node is not None and not check_mode:
        server.delete_node(node)
    before = _changeable(node) if node else {}
    return {"changed": bool(node), "node": {}, "diff": {"before": before, "after": {}}}


def _remove(server: Headscale, given: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """Remove the nodes that Headscale knows. A failure of one does not stop the others."""
    if given["state"] != "absent":
        raise HeadscaleError(OPTION, "node_keys: only with state=absent")
    wanted = set(given["node_keys"])
    nodes = [node for node in server.nodes() if node.key in wanted] if wanted else []
    problems: dict[str, str] = {}
    gone = False
    for node in () if check_mode else nodes:
        if gone:
            problems[node.key] = "not tried any more"
            continue
        try:
            server.delete_node(node)
        except HeadscaleError as problem:
            problems[node.key] = str(problem)
            gone = problem.kind in (NO_ANSWER, DENIED)
    removed = {node.name: _changeable(node) for node in nodes if node.key not in problems}
    diff = {"before": removed, "after": {}}
    return {"changed": bool(removed), "node": {}, "problems": problems, "diff": diff}


def _told(problems: dict[str, str], count: int) -> str:
    those = "; ".join(f"{key}: {why}" for key, why in list(problems.items())[:MOST_SHOWN])
    more = f"; and {len(problems) - MOST_SHOWN} more" if len(problems) > MOST_SHOWN else ""
    return f"{len(problems)} of {count} nodes could not be removed: {those}{more}"


def _changeable(node: Node) -> dict[str, Any]:
    shown = node.as_dict()
    return {key: shown[key] for key in ("id", "name", "tags", "expiry")}


if __name__ == "__main__":
    main()
