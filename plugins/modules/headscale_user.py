#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: headscale_user
short_description: Create, rename or remove a user of a Headscale server
version_added: 0.1.0
author:
  - The HeadCNI authors (@headcni)
description:
  - Makes sure that a Headscale server has a user with the given name, or does not have it.
options:
  name:
    description:
      - The user's name.
      - At least two characters. It starts with a letter, followed by letters, digits, C(-), C(.),
        C(_) and at most one C(@).
    type: str
    required: true
  state:
    description:
      - V(present) creates the user if it does not exist.
      - V(absent) removes it. This is refused while the user owns nodes, unless O(remove_nodes) is
        set.
    type: str
    choices: [present, absent]
    default: present
  renamed_from:
    description:
      - The old name of the user. If a user with this name exists, it is renamed.
    type: str
  remove_nodes:
    description:
      - Whether O(state=absent) also removes the nodes that the user owns.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
extends_documentation_fragment:
  - headcni.mesh.headscale
seealso:
  - module: headcni.mesh.headscale_preauth_key
"""

EXAMPLES = r"""
- name: Create a user for the nodes
  headcni.mesh.headscale_user:
    url: https://headscale.example.org
    api_key: "{{ headcni_headscale_api_key }}"
    name: headcni
  delegate_to: localhost
  run_once: true

- name: Rename the user
  headcni.mesh.headscale_user:
    name: kubernetes
    renamed_from: headcni

- name: Remove the user and its nodes
  headcni.mesh.headscale_user:
    name: kubernetes
    state: absent
    remove_nodes: true
"""

RETURN = r"""
user:
  description: The user. In check mode a new user has no id. Empty if the user is absent.
  returned: success
  type: dict
  sample: {"id": "1", "name": "headcni"}
removed_nodes:
  description: The nodes that were removed with the user.
  returned: O(state=absent)
  type: list
  elements: str
  sample: ["node1 (id 3)"]
"""

from typing import Any, Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils.headscale import (
    OPTION,
    REFUSED,
    Headscale,
    HeadscaleError,
    check_user_name,
    connect,
    connection_spec,
    fail,
)
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_objects import User


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **connection_spec(),
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "renamed_from": {"type": "str"},
            "remove_nodes": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        ensure = _present if module.params["state"] == "present" else _absent
        result = ensure(connect(module), module.params, module.check_mode)
    except HeadscaleError as problem:
        fail(module, problem)
    module.exit_json(**result)


def _present(server: Headscale, given: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    name, old_name = given["name"], given["renamed_from"]
    user = server.user(name)
    old = server.user(old_name) if old_name and old_name != name else None
    if user and old:
        raise HeadscaleError(
            OPTION,
            f"renamed_from: {old_name!r} is there, and so is {name!r}: remove one of them first",
        )
    if user:
        return _result(False, user, user)
    check_user_name("name", name)
    if not check_mode and old:
        server.rename_user(old, name)
        user = server.user(name)
    elif not check_mode:
        user = server.create_user(name)
    return _result(True, old, user or User(old.id if old else "", name))


def _absent(server: Headscale, given: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    user = server.user(given["name"])
    if user is None:
        return {**_result(False, None, None), "removed_nodes": []}
    nodes = [node for node in server.nodes() if node.user_id == user.id]
    those = [node.label for node in nodes]
    if nodes and not given["remove_nodes"]:
        raise HeadscaleError(
            REFUSED,
            f"name: user {user.name!r} owns {len(nodes)} nodes: {', '.join(those)}; remove them "
            "first, or set remove_nodes",
        )
    if not check_mode:
        for node in nodes:
            server.delete_node(node)
        server.delete_user(user)
    return {**_result(True, user, None), "removed_nodes": those}


def _result(changed: bool, before: Optional[User], after: Optional[User]) -> dict[str, Any]:
    return {
        "changed": changed,
        "user": after.as_dict() if after else {},
        "diff": {
            "before": {"name": before.name} if before else {},
            "after": {"name": after.name} if after else {},
        },
    }


if __name__ == "__main__":
    main()
