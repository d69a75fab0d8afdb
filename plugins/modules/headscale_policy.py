#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: headscale_policy
short_description: Merge route approvals and the rule for pods into Headscale's policy
version_added: 0.1.0
author:
  - The HeadCNI authors (@headcni)
description:
  - Merges entries of C(autoApprovers.routes), and the C(tagOwners) that they need, into the policy
    of a Headscale server. This is for clusters that add nodes by themselves. In other cases
    M(headcni.mesh.headscale_routes) is better, because it approves less.
  - Adds the rule that lets pods reach each other, if the policy does not allow it already
    (O(pod_ranges)). M(headcni.mesh.headscale_policy_info) checks a policy without changing it.
  - The rest of the policy stays as it is, with its comments and layout. If an entry cannot be
    inserted into the text, the policy is rewritten without comments, with a warning.
  - Headscale keeps existing approvals when the policy changes.
options:
  routes:
    description:
      - Ranges, each with a list of tags or users, such as V(tag:k8s), whose nodes may serve the
        range or a part of it.
      - A node with tags matches only by tag. Every such node may then serve any part of the range.
    type: dict
    default: {}
  tag_owners:
    description:
      - Tags, each with a list of users and groups that may assign it to a node. With an empty list
        only pre-auth keys and the API assign it.
      - Tags in O(routes) that the policy does not have are added with an empty list.
    type: dict
    default: {}
  pod_ranges:
    description:
      - The ranges from which pods get their addresses, such as V(10.244.0.0/16). The policy must
        let pods in these ranges reach each other over TCP and UDP on all ports.
      - If it does not, the module adds a rule to C(acls), or to C(grants) if the policy has only
        grants, and O(nodes) to C(tagOwners) if the rule needs that.
    type: list
    elements: str
    default: []
  node_pod_ranges:
    description:
      - The pod ranges of the current nodes, if those of all nodes are known. A policy that contains
        all of these is enough.
    type: list
    elements: str
    default: []
  nodes:
    description:
      - The tags of the nodes, or the user who owns them if they have no tags.
    type: list
    elements: str
    default: [tag:headcni]
  state:
    description:
      - V(absent) removes the given approvers and owners, and no others.
      - An entry that becomes empty is removed, but a tag stays while another part of the policy
        uses it.
      - With O(pod_ranges), V(absent) removes the rule that this module writes, and no other.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    support: full
    details: With Headscale 0.29 and newer, the server checks what would be written.
  diff_mode:
    support: full
extends_documentation_fragment:
  - headcni.mesh.headscale
notes:
  - With Headscale 0.29 and newer, the server checks the policy and runs its C(tests) before writing
    it, together with our own tests that pods reach each other. If any fails, the old policy stays.
  - After writing, the module reads the policy again and compares it.
  - The server must keep its policy in the database (C(policy.mode=database)). If it keeps it in a
    file, and the file lacks something, the error says what to add.
seealso:
  - module: headcni.mesh.headscale_policy_info
  - module: headcni.mesh.headscale_routes
"""

EXAMPLES = r"""
- name: Let Headscale approve pod ranges by itself
  headcni.mesh.headscale_policy:
    url: https://headscale.example.org
    api_key: "{{ headcni_headscale_api_key }}"
    routes:
      10.244.0.0/16: [tag:k8s]
      fd44::/48: [tag:k8s]
    tag_owners:
      tag:k8s: [headcni@]
  delegate_to: localhost
  run_once: true

- name: Let pods reach each other
  headcni.mesh.headscale_policy:
    pod_ranges:
      - 10.244.0.0/16
      - fd44::/48
    nodes: [tag:headcni]
  diff: true

- name: Stop approving a range
  headcni.mesh.headscale_policy:
    routes:
      10.244.0.0/16: [tag:k8s]
    state: absent
"""

RETURN = r"""
policy:
  description: The policy as it is now or would be.
  returned: success
  type: str
comments_lost:
  description: Whether the policy had to be rewritten without its comments.
  returned: success
  type: bool
pods:
  description:
    - The result of checking RV(policy), as M(headcni.mesh.headscale_policy_info) returns it.
  returned: O(pod_ranges) is given and O(state=present)
  type: dict
"""

from typing import Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils.headscale import (
    REFUSED,
    UNSUPPORTED,
    Headscale,
    HeadscaleError,
    connect,
    connection_spec,
    fail,
)
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_access import Mesh, judge
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_policy import (
    Merged,
    merge,
    mesh_spec,
    parse,
    parse_mesh,
    with_tests,
    withdraw,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **connection_spec(),
            **mesh_spec(),
            "routes": {"type": "dict", "default": {}},
            "tag_owners": {"type": "dict", "default": {}},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_one_of=[("routes", "tag_owners", "pod_ranges")],
        supports_check_mode=True,
    )
    given = module.params
    found = {}
    try:
        server = connect(module)
        routes, owners = parse(given["routes"], given["tag_owners"])
        mesh = parse_mesh(given) if given["pod_ranges"] else None
        held = server.policy()
        if given["state"] == "absent":
            merged, added = withdraw(held.text, routes, owners, mesh), None
        else:
            merged, added = _merged(server, held.text, routes, owners, mesh)
        if merged.changed:
            if held.in_file:
                raise _in_file(merged)
            _write(server, merged, added, module.check_mode)
        if mesh is not None and given["state"] == "present":
            found["pods"] = judge(merged.text, server.version().number, mesh).as_dict()
    except HeadscaleError as problem:
        fail(module, problem)
    if merged.comments_lost:
        module.warn("the policy had to be written anew: its comments are lost")
    module.exit_json(
        changed=merged.changed,
        policy=merged.text,
        comments_lost=merged.comments_lost,
        diff={"before": held.text, "after": merged.text if merged.changed else held.text},
        **found,
    )


def _merged(
    server: Headscale, text: str, routes: dict, owners: dict, mesh: Optional[Mesh]
) -> tuple[Merged, Optional[Mesh]]:
    """The new policy, and the mesh if a rule for its pods was added."""
    verdict = judge(text, server.version().number, mesh) if mesh is not None else None
    # Up to 0.26, a policy without rules lets nothing through, but no policy at all lets everything.
    made_anew = bool(routes or owners) and not text.strip() and server.version().number < (0, 27)
    merged = merge(text, routes, owners, allow_all=made_anew, pods=verdict)
    return merged, mesh if verdict is not None and verdict.missing else None


def _write(server: Headscale, merged: Merged, added: Optional[Mesh], check_mode: bool) -> None:
    try:
        if added is not None:
            server.check_policy(with_tests(merged.text, added))
        server.check_policy(merged.text)
        if check_mode:
            return
        server.set_policy(merged.text)
    except HeadscaleError as problem:
        if "update is disabled" in str(problem):
            raise _in_file(merged) from None
        raise
    if server.policy().text != merged.text:
        raise HeadscaleError(
            REFUSED,
            "Headscale has another policy than the one just written: somebody else may have "
            "changed it at the same moment; run this again",
        )


def _in_file(merged: Merged) -> HeadscaleError:
    return HeadscaleError(
        UNSUPPORTED,
        "Headscale keeps its policy in a file (policy.mode: file), which the API cannot change: "
        "set policy.mode to database, or put this into the file that policy.path names and reload "
        f"Headscale:\n{merged.text}",
    )


if __name__ == "__main__":
    main()
