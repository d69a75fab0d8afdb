#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: headscale_policy_info
short_description: Read Headscale's policy and check whether it lets pods reach each other
version_added: 0.1.0
author:
  - The HeadCNI authors (@headcni)
description:
  - Reads the policy of a Headscale server and checks whether it lets the pods of all nodes reach
    each other over TCP and UDP on all ports. Then ICMP passes as well. Changes nothing.
  - Returns the missing rule, ready to paste. M(headcni.mesh.headscale_policy) can add it.
  - A rule that the module does not understand never counts as allowing traffic. If the result
    depends on such a rule, the status is V(unknown).
options:
  pod_ranges:
    description:
      - The ranges from which pods get their addresses, such as V(10.244.0.0/16).
    type: list
    elements: str
    required: true
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
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
extends_documentation_fragment:
  - headcni.mesh.headscale
notes:
  - The module knows the rules of Headscale 0.26 to 0.29, and treats newer versions as 0.29. With an
    older version the status is V(unknown).
  - If the server keeps its policy in a file, it returns the content of the file, even if it has not
    reloaded the file yet.
seealso:
  - module: headcni.mesh.headscale_policy
"""

EXAMPLES = r"""
- name: Check whether pods will reach each other
  headcni.mesh.headscale_policy_info:
    url: https://headscale.example.org
    api_key: "{{ headcni_headscale_api_key }}"
    pod_ranges: [10.244.0.0/16, fd44::/48]
  delegate_to: localhost
  run_once: true
  register: found
  failed_when: found.pods.status == 'missing'
"""

RETURN = r"""
policy:
  description: The text of the policy. Empty if there is none, or if it cannot be read.
  returned: success
  type: str
in_file:
  description: Whether the server keeps it in a file, which the API cannot change.
  returned: success
  type: bool
pods:
  description: The result of the check.
  returned: success
  type: dict
  contains:
    status:
      description:
        - V(allowed) if all pods reach all pods, V(missing) if they do not, V(unknown) if the module
          cannot tell.
      type: str
    missing:
      description: What no rule allows, one sentence each.
      type: list
      elements: str
    unjudged:
      description: What could not be checked, and why.
      type: list
      elements: str
    notes:
      description: What you should know even though pods reach each other.
      type: list
      elements: str
    form:
      description: Where the rule belongs, C(acls) or C(grants).
      type: str
    rule:
      description: A rule that allows everything that pods need.
      type: dict
    remedy:
      description: What to add to the policy, in words and ready to paste.
      type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils.headscale import (
    REFUSED,
    Headscale,
    HeadscaleError,
    connect,
    connection_spec,
    fail,
)
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_access import (
    Mesh,
    Verdict,
    judge,
    rule_for,
)
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_objects import Policy
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_policy import (
    mesh_spec,
    parse_mesh,
)


def main() -> None:
    spec = mesh_spec()
    spec["pod_ranges"] = {"type": "list", "elements": "str", "required": True}
    module = AnsibleModule(argument_spec={**connection_spec(), **spec}, supports_check_mode=True)
    try:
        server = connect(module)
        held, verdict = _judged(server, parse_mesh(module.params))
    except HeadscaleError as problem:
        fail(module, problem)
    module.exit_json(changed=False, policy=held.text, in_file=held.in_file, pods=verdict.as_dict())


def _judged(server: Headscale, mesh: Mesh) -> tuple[Policy, Verdict]:
    try:
        held = server.policy()
    except HeadscaleError as problem:
        if problem.kind != REFUSED:
            raise
        # With a key, a policy in the database can always be read, so this one is in a file.
        return Policy("", in_file=True), Verdict(
            unjudged=(f"the policy cannot be read: {problem}",), rule=rule_for(mesh, "acls")
        )
    return held, judge(held.text, server.version().number, mesh)


if __name__ == "__main__":
    main()
