#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Run a command of headcnictl on a node, for the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_ask
short_description: Run a command of headcnictl on a node
version_added: 0.3.0
description:
  - Runs a command of C(headcnictl) that changes nothing, and returns what it printed.
  - An answer that says no is not a failure of the task; RV(code) has the exit code.
author:
  - The HeadCNI authors (@headcni)
options:
  words:
    description: The command with its arguments, such as C([routes, --json]).
    type: list
    elements: str
    required: true
  timeout:
    description: After how many seconds to end the command.
    type: int
    default: 120
extends_documentation_fragment:
  - headcni.mesh.node
  - headcni.mesh.node.read_only
seealso:
  - module: headcni.mesh.headcni_status
"""

EXAMPLES = r"""
- name: Ask for the routes
  headcni.mesh.headcni_ask:
    words: [routes, --json]
  register: routes
"""

RETURN = r"""
code:
  description: The exit code. 3 also if the command did not run.
  type: int
  returned: success
output:
  description: What the command printed.
  type: str
  returned: success
said:
  description: What it printed on stderr.
  type: str
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import headcnictl, node

# Others change something, or do not end by themselves.
VERBS = (
    *("status", "pods", "routes", "policy", "ipam", "trace", "diagnose", "ping", "metrics"),
    *("events", "logs", "config", "pod-cidr", "explain", "version"),
)
ENDLESS = ("--follow", "-f")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "words": {"type": "list", "elements": "str", "required": True},
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    words = module.params["words"]
    if not words or words[0] not in VERBS:
        given = words[0] if words else "nothing"
        module.fail_json(msg=f"words: {given}, expected one of {', '.join(VERBS)} first")
    if endless := [word for word in words if word in ENDLESS]:
        module.fail_json(msg=f"words: {endless[0]} does not end: run it on the node")
    code, output, said = headcnictl.printed(words, module.params["timeout"])
    module.exit_json(changed=False, code=code, output=output, said=said)


if __name__ == "__main__":
    main()
