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
  - Changes nothing. The result contains no pre-auth keys or API keys.
  - Fails if the server cannot be reached or does not accept the API key, so it checks both.
options:
  gather:
    description:
      - What to read. V(nodes) returns the nodes and their routes.
    type: list
    elements: str
    choices: [version, users, nodes]
    default: [version, users, nodes]
  user:
    description: Return only nodes of this user.
    type: str
  tag:
    description: Return only nodes with this tag.
    type: str
  name:
    description: Return only nodes with this name or host name.
    type: str
  node_key:
    description: Return only the node with this key.
    type: str
  online:
    description: Return only nodes that are online (V(true)) or offline (V(false)).
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
- name: Check that Headscale answers and accepts the key
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
  description: The server's version, or the version of its API if the server does not return one.
  returned: V(version) is in O(gather)
  type: str
  sample: 0.29.2
clock_skew:
  description: How many seconds the server's clock is ahead of the controller's.
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
    addresses:
      description: The node's tailnet addresses.
      type: list
      elements: str
    online:
      description: Whether it is connected to Headscale.
      type: bool
    last_seen:
      description: When the node was last connected.
      type: str
    expiry:
      description: When the node's key expires. Empty if it does not.
      type: str
    available_routes:
      description: The routes that the node advertises.
      type: list
      elements: str
    approved_routes:
      description: The routes that are approved.
      type: list
      elements: str
    served_routes:
      description: The routes for which other nodes send traffic to this node.
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
        nodes = [node for node in server.nodes() if _selected(node, given)]
        found["nodes"] = [node.as_dict() for node in nodes]
        found["routes"] = [route for node in nodes for route in _routes(node)]
    if "users" in gather or "nodes" not in gather:
        # The version needs no key, so read the users to check the key.
        users = server.users()
        if "users" in gather:
            found["users"] = [user.as_dict() for user in users]
    found["clock_skew"] = round((server.now() - datetime.now(timezone.utc)).total_seconds())
    if "version" in gather:
        found["version"] = server.version().text
    return found


def _selected(node: Node, given: dict[str, Any]) -> bool:
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
