#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: headscale_preauth_key
short_description: Create, expire or delete a pre-auth key of a Headscale server
version_added: 0.1.0
author:
  - The HeadCNI authors (@headcni)
description:
  - Creates a key with which nodes log in, or makes a key invalid.
  - The result contains the new key. Set C(no_log=true) on the task, or it is printed.
options:
  state:
    description:
      - V(present) creates a new key each time, so it always changes something.
      - V(expired) expires the key that O(id) or O(prefix) selects.
      - V(absent) deletes it. This needs Headscale 0.28 or newer. An ephemeral node whose key is
        deleted is no longer ephemeral.
    type: str
    choices: [present, expired, absent]
    default: present
  user:
    description:
      - The name of the user who will own the nodes.
      - With Headscale 0.28 and newer it is optional if there are O(tags), which then own the nodes.
      - Before 0.28 it is also required to expire a key.
    type: str
  tags:
    description: The tags of nodes that log in with this key, such as C(tag:k8s).
    type: list
    elements: str
    default: []
  reusable:
    description: Whether several nodes may log in with the key.
    type: bool
    default: false
  ephemeral:
    description:
      - Whether nodes that log in with the key are removed after they have been offline for a while.
    type: bool
    default: false
  expiration_minutes:
    description: How many minutes the key is valid, by the server's clock.
    type: int
    default: 60
  id:
    description: The id of the key to expire or delete.
    type: str
  prefix:
    description:
      - The first characters of the key to expire or delete. At least 8, and unique.
    type: str
attributes:
  check_mode:
    support: full
    details: No key is created, so none is returned.
  diff_mode:
    support: full
    details: The diff does not contain the key itself.
extends_documentation_fragment:
  - headcni.mesh.headscale
seealso:
  - module: headcni.mesh.headscale_user
"""

EXAMPLES = r"""
- name: Create a key that is valid for an hour
  headcni.mesh.headscale_preauth_key:
    url: https://headscale.example.org
    api_key: "{{ headcni_headscale_api_key }}"
    user: headcni
    tags: [tag:k8s]
    reusable: true
    expiration_minutes: 60
  register: created
  no_log: true
  delegate_to: localhost
  run_once: true

- name: Expire the key
  headcni.mesh.headscale_preauth_key:
    user: headcni
    id: "{{ created.id }}"
    state: expired
"""

RETURN = r"""
key:
  description: The new key. Empty in check mode.
  returned: O(state=present)
  type: str
  sample: hskey-auth-…
id:
  description: The id of the key. Empty in check mode.
  returned: O(state=present)
  type: str
  sample: "7"
expiration:
  description: When the key expires.
  returned: O(state=present)
  type: str
  sample: "2026-11-16T07:00:00Z"
keys:
  description: The keys that were expired or deleted, without the keys themselves.
  returned: O(state=expired) or O(state=absent)
  type: list
  elements: dict
"""

from typing import Any, Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils.headscale import (
    NOT_FOUND,
    OPTION,
    REFUSED,
    Headscale,
    HeadscaleError,
    check_tags,
    connect,
    connection_spec,
    fail,
    in_minutes,
)
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_objects import PreAuthKey, User

LONGEST_MINUTES = 366 * 24 * 60
SHORTEST_PREFIX = 8


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **connection_spec(),
            "state": {
                "type": "str",
                "choices": ["present", "expired", "absent"],
                "default": "present",
            },
            "user": {"type": "str"},
            "tags": {"type": "list", "elements": "str", "default": []},
            "reusable": {"type": "bool", "default": False},
            "ephemeral": {"type": "bool", "default": False},
            "expiration_minutes": {"type": "int", "default": 60},
            "id": {"type": "str"},
            "prefix": {"type": "str", "no_log": False},
        },
        required_if=[
            ("state", "expired", ("id", "prefix"), True),
            ("state", "absent", ("id", "prefix"), True),
        ],
        mutually_exclusive=[("id", "prefix")],
        supports_check_mode=True,
    )
    try:
        server = connect(module)
        if module.params["state"] == "present":
            result = _mint(module, server)
        else:
            result = _end(server, module.params, module.check_mode)
    except HeadscaleError as problem:
        fail(module, problem)
    module.exit_json(**result)


def _mint(module: AnsibleModule, server: Headscale) -> dict[str, Any]:
    given = module.params
    check_tags("tags", given["tags"])
    minutes = given["expiration_minutes"]
    if not 1 <= minutes <= LONGEST_MINUTES:
        raise HeadscaleError(
            OPTION, f"expiration_minutes: {minutes}, expected a number from 1 to {LONGEST_MINUTES}"
        )
    user = _owner(module, server)
    if user is None and not given["user"]:
        if not given["tags"]:
            raise HeadscaleError(
                OPTION, "user: missing, expected a user or tags: who owns the nodes?"
            )
        if server.version().number < (0, 28):
            raise HeadscaleError(
                OPTION,
                f"user: missing, and Headscale {server.version().text} makes no key without one",
            )
    expiration = in_minutes(server.now(), minutes)
    made = PreAuthKey(
        "", "", given["user"] or "", tuple(given["tags"]), given["reusable"], given["ephemeral"],
        expiration=expiration,
    )  # fmt: skip
    if not module.check_mode:
        made = server.create_key(
            user, given["tags"], given["reusable"], given["ephemeral"], expiration
        )
        if not made.key:
            raise HeadscaleError(REFUSED, "Headscale has created a key and did not return it")
    shown = made.as_dict()
    return {"changed": True, "key": made.key, **shown, "diff": {"before": {}, "after": shown}}


def _owner(module: AnsibleModule, server: Headscale) -> Optional[User]:
    name = module.params["user"]
    if not name:
        return None
    user = server.user(name)
    if user is None and module.check_mode:
        module.warn(f"Headscale has no user {name!r} yet; for a key, it must have")
    elif user is None:
        raise HeadscaleError(
            NOT_FOUND, f"user: Headscale has no user {name!r}: make it with headscale_user"
        )
    return user


def _end(server: Headscale, given: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    prefix = given["prefix"] or ""
    if prefix and len(prefix) < SHORTEST_PREFIX:
        raise HeadscaleError(
            OPTION, f"prefix: {prefix!r}, expected at least {SHORTEST_PREFIX} characters"
        )
    user = server.user(given["user"]) if given["user"] else None
    if given["user"] and user is None:
        return {"changed": False, "keys": [], "diff": {"before": [], "after": []}}
    if prefix:
        found = [key for key in server.keys(user) if _begins(key.key, prefix)]
    else:
        found = [key for key in server.keys(user) if key.id == given["id"]]
    if len(found) > 1:
        ids = ", ".join(key.id for key in found)
        raise HeadscaleError(REFUSED, f"prefix: several keys begin so (ids {ids}): give one id")
    expired = given["state"] == "expired"
    todo = [
        key
        for key in found
        if not expired or key.expiration is None or key.expiration > server.now()
    ]
    for key in todo if not check_mode else ():
        if expired:
            server.expire_key(key, user)
        else:
            server.delete_key(key)
    ended = [{"id": key.id, "state": given["state"]} for key in todo] if expired else []
    return {
        "changed": bool(todo),
        "keys": [key.as_dict() for key in todo],
        "diff": {"before": [{"id": key.id, "state": "present"} for key in todo], "after": ended},
    }


def _begins(key: str, prefix: str) -> bool:
    """With 0.28 and newer, lists show `hskey-auth-` and twelve characters of a key, then stars."""
    shown = key.rstrip("*").rstrip("-") if key.endswith("*") else key
    return key.startswith(prefix) or (key != shown and prefix.startswith(shown))


if __name__ == "__main__":
    main()
