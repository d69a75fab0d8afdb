#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: headscale_policy
short_description: Let a Headscale server approve routes by itself
version_added: 0.1.0
author:
  - The HeadCNI authors (@headcni)
description:
  - Merges entries of C(autoApprovers.routes), and the C(tagOwners) that they need, into the policy
    of a Headscale server. For fleets that scale themselves; otherwise
    M(headcni.mesh.headscale_routes) approves less.
  - The rest of the policy stays as it is, with its comments and its layout. Should an entry have no
    place in the text, the policy is written anew without comments, and a warning says so.
  - What Headscale has approved it does not take back when the policy changes.
options:
  routes:
    description:
      - Ranges, and for each a list of those whose nodes may serve it or a part of it, such as
        V(tag:k8s).
      - A node with tags matches only by tag. Any such node may then serve any part of the range.
    type: dict
    default: {}
  tag_owners:
    description:
      - Tags, and for each a list of users and groups that may give it to a node. An empty list
        leaves that to pre-auth keys and the API.
      - Tags that O(routes) names, and the policy does not have, are added with an empty list.
    type: dict
    default: {}
  state:
    description:
      - V(absent) takes away the given approvers and owners, and no others.
      - An entry with none left goes, but a tag stays while another part of the policy has it.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    support: full
    details: From Headscale 0.29 on, the server judges what would be written.
  diff_mode:
    support: full
extends_documentation_fragment:
  - headcni.mesh.headscale
notes:
  - The server must keep its policy in the database (C(policy.mode=database)). If it keeps it in a
    file, and something is missing there, the error says what.
seealso:
  - module: headcni.mesh.headscale_routes
"""

EXAMPLES = r"""
- name: Approve pod ranges by themselves
  headcni.mesh.headscale_policy:
    url: https://headscale.example.org
    api_key: "{{ vault_headscale_api_key }}"
    routes:
      10.244.0.0/16: [tag:k8s]
      fd44::/48: [tag:k8s]
    tag_owners:
      tag:k8s: [headcni@]
  delegate_to: localhost
  run_once: true

- name: Do so no longer
  headcni.mesh.headscale_policy:
    routes:
      10.244.0.0/16: [tag:k8s]
    state: absent
"""

RETURN = r"""
policy:
  description: The policy as it is now, or would be.
  returned: success
  type: str
comments_lost:
  description: Whether the policy had to be written anew, without its comments.
  returned: success
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils.headscale import (
    UNSUPPORTED,
    Headscale,
    HeadscaleError,
    connect,
    connection_spec,
    fail,
)
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_policy import (
    Merged,
    merge,
    parse,
    withdraw,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **connection_spec(),
            "routes": {"type": "dict", "default": {}},
            "tag_owners": {"type": "dict", "default": {}},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_one_of=[("routes", "tag_owners")],
        supports_check_mode=True,
    )
    try:
        server = connect(module)
        routes, owners = parse(module.params["routes"], module.params["tag_owners"])
        held = server.policy()
        if module.params["state"] == "absent":
            merged = withdraw(held.text, routes, owners)
        else:
            # Up to 0.26, a policy without rules lets nothing through.
            made_anew = not held.text.strip() and server.version().number < (0, 27)
            merged = merge(held.text, routes, owners, allow_all=made_anew)
        if merged.changed:
            if held.in_file:
                raise _in_file(merged)
            _write(server, merged, module.check_mode)
    except HeadscaleError as problem:
        fail(module, problem)
    if merged.comments_lost:
        module.warn("the policy had to be written anew: its comments are lost")
    module.exit_json(
        changed=merged.changed,
        policy=merged.text,
        comments_lost=merged.comments_lost,
        diff={"before": held.text, "after": merged.text if merged.changed else held.text},
    )


def _write(server: Headscale, merged: Merged, check_mode: bool) -> None:
    try:
        if check_mode:
            server.check_policy(merged.text)
        else:
            server.set_policy(merged.text)
    except HeadscaleError as problem:
        if "update is disabled" in str(problem):
            raise _in_file(merged) from None
        raise


def _in_file(merged: Merged) -> HeadscaleError:
    return HeadscaleError(
        UNSUPPORTED,
        "Headscale keeps its policy in a file (policy.mode: file), which the API cannot change: "
        "set policy.mode to database, or put this into the file that policy.path names and reload "
        f"Headscale:\n{merged.text}",
    )


if __name__ == "__main__":
    main()
