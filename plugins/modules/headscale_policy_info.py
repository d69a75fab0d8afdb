#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: headscale_policy_info
short_description: Read Headscale's policy and judge whether it lets pods reach each other
version_added: 0.1.0
author:
  - The HeadCNI authors (@headcni)
description:
  - Reads the policy of a Headscale server, changes nothing, and judges whether it lets the pods of
    all nodes reach each other by TCP and UDP on all ports. ICMP then passes as well.
  - It names the rule that is missing, ready to be pasted. M(headcni.mesh.headscale_policy) adds it.
  - A rule that is not understood never counts as one that allows. If everything depends on it, the
    status is V(unknown).
options:
  pod_ranges:
    description:
      - The ranges that pods get their addresses from, such as V(10.244.0.0/16).
    type: list
    elements: str
    required: true
  node_pod_ranges:
    description:
      - The ranges that the present nodes have for their pods, if those of all nodes are known. A
        policy that names all of these is enough.
    type: list
    elements: str
    default: []
  nodes:
    description:
      - The tags of the nodes, or the user they belong to if they have no tags.
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
  - Headscale 0.26 to 0.29 are judged by their own rules, newer ones as 0.29. A policy of an older
    one has the status V(unknown).
  - If the server keeps its policy in a file, it returns what the file says, even if it has not been
    reloaded since.
seealso:
  - module: headcni.mesh.headscale_policy
"""

EXAMPLES = r"""
- name: See whether pods will reach each other
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
  description: The policy, as it is written. Empty if there is none, or if it cannot be read.
  returned: success
  type: str
in_file:
  description: Whether the server keeps it in a file, so that only the file's owner can change it.
  returned: success
  type: bool
pods:
  description: How the policy is judged.
  returned: success
  type: dict
  contains:
    status:
      description:
        - V(allowed) if all pods reach all pods, V(missing) if they do not, V(unknown) if that could
          not be judged.
      type: str
    missing:
      description: What no rule allows that was understood, a sentence for each.
      type: list
      elements: str
    unjudged:
      description: What could not be judged, and why.
      type: list
      elements: str
    notes:
      description: What should be known though pods reach each other.
      type: list
      elements: str
    form:
      description: Where the rule belongs, C(acls) or C(grants).
      type: str
    rule:
      description: A rule that allows all of it.
      type: dict
    remedy:
      description: What to add to the policy, in words and ready to be pasted.
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
        # A policy in the database can be read by everybody who has a key.
        return Policy("", in_file=True), Verdict(
            unjudged=(f"the policy cannot be read: {problem}",), rule=rule_for(mesh, "acls")
        )
    return held, judge(held.text, server.version().number, mesh)


if __name__ == "__main__":
    main()
