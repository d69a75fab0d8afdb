#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: headscale_info
short_description: Read a Headscale server's version, users, nodes and routes
version_added: 0.1.0
author:
  - The HeadCNI authors (@headcni)
description:
  - Reads what a Headscale server knows, and changes nothing. No keys are in the answer.
  - Fails if the server cannot be reached or does not accept the API key, and so is a check of both.
options:
  gather:
    description:
      - What to ask for. V(nodes) brings the nodes and, made from the same answer, their routes.
    type: list
    elements: str
    choices: [version, users, nodes]
    default: [version, users, nodes]
  user:
    description: Only nodes of this user.
    type: str
  tag:
    description: Only nodes with this tag.
    type: str
  name:
    description: Only nodes of this name or host name.
    type: str
  node_key:
    description: Only the node with this key.
    type: str
  online:
    description: Only nodes that are, or are not, online.
    type: bool
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
extends_documentation_fragment:
  - headcni.mesh.headscale
"""

EXAMPLES = r"""
- name: See that Headscale can be reached and takes the key
  headcni.mesh.headscale_info:
    url: https://headscale.example.org
    api_key: "{{ headcni_headscale_api_key }}"
    gather: [version, users]
  delegate_to: localhost
  run_once: true

- name: List the nodes that are offline
  headcni.mesh.headscale_info:
    gather: [nodes]
    online: false
  register: offline
"""

RETURN = r"""
version:
  description: The server's version, or that of its API if it does not tell.
  returned: V(version) is in O(gather)
  type: str
  sample: 0.29.2
clock_skew:
  description: By how many seconds the server's clock is ahead of ours, to the second.
  returned: success
  type: int
users:
  description: The users.
  returned: V(users) is in O(gather)
  type: list
  elements: dict
  sample: [{"id": "1", "name": "headcni"}]
nodes:
  description: The nodes.
  returned: V(nodes) is in O(gather)
  type: list
  elements: dict
  contains:
    id:
      description: Its number.
      type: str
    node_key:
      description: Its key.
      type: str
    name:
      description: Its name, a DNS label.
      type: str
    hostname:
      description: What the machine calls itself.
      type: str
    user:
      description: The user it belongs to.
      type: str
    tags:
      description: Its tags.
      type: list
      elements: str
    addresses:
      description: Its addresses in the tailnet.
      type: list
      elements: str
    online:
      description: Whether it is connected to Headscale.
      type: bool
    last_seen:
      description: When it last was.
      type: str
    expiry:
      description: When it expires. Empty if never.
      type: str
    available_routes:
      description: The routes that it advertises.
      type: list
      elements: str
    approved_routes:
      description: The routes that are approved.
      type: list
      elements: str
    served_routes:
      description: The routes that others send to it.
      type: list
      elements: str
routes:
  description: Each route that a node advertises or is approved for.
  returned: V(nodes) is in O(gather)
  type: list
  elements: dict
  sample:
    - {route: 10.244.1.0/24, node: node1, id: "3", advertised: true, approved: true, served: true}
"""

from datetime import datetime, timezone
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils.headscale import (
    Headscale,
    HeadscaleError,
    connect,
    connection_spec,
    fail,
)
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_objects import Node

PARTS = ["version", "users", "nodes"]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **connection_spec(),
            "gather": {"type": "list", "elements": "str", "choices": PARTS, "default": PARTS},
            "user": {"type": "str"},
            "tag": {"type": "str"},
            "name": {"type": "str"},
            "node_key": {"type": "str", "no_log": False},
            "online": {"type": "bool"},
        },
        supports_check_mode=True,
    )
    try:
        found = _gathered(connect(module), module.params)
    except HeadscaleError as problem:
        fail(module, problem)
    module.exit_json(changed=False, **found)


def _gathered(server: Headscale, given: dict[str, Any]) -> dict[str, Any]:
    gather = given["gather"]
    found: dict[str, Any] = {}
    if "nodes" in gather:
        nodes = [node for node in server.nodes() if _meant(node, given)]
        found["nodes"] = [node.as_dict() for node in nodes]
        found["routes"] = [route for node in nodes for route in _routes(node)]
    if "users" in gather or "nodes" not in gather:
        # Anybody may ask for the version; the key is tried all the same.
        users = server.users()
        if "users" in gather:
            found["users"] = [user.as_dict() for user in users]
    found["clock_skew"] = round((server.now() - datetime.now(timezone.utc)).total_seconds())
    if "version" in gather:
        found["version"] = server.version().text
    return found


def _meant(node: Node, given: dict[str, Any]) -> bool:
    return (
        given["user"] in (None, node.user)
        and given["name"] in (None, node.name, node.hostname)
        and given["node_key"] in (None, node.key)
        and given["online"] in (None, node.online)
        and (given["tag"] is None or given["tag"] in node.tags)
    )


def _routes(node: Node) -> list[dict[str, Any]]:
    return [
        {
            "route": route,
            "node": node.name,
            "id": node.id,
            "advertised": route in node.available,
            "approved": route in node.approved,
            "served": route in node.served,
        }
        for route in sorted({*node.available, *node.approved, *node.served})
    ]


if __name__ == "__main__":
    main()
