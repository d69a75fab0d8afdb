#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a node's daemon says about itself."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_status
short_description: Ask the daemon of a node for its status
version_added: 0.2.0
description:
  - Runs C(headcnictl status) on the node, and changes nothing.
  - A node whose daemon does not answer is not a failure; RV(problem) says why.
author:
  - The HeadCNI authors (@headcni)
extends_documentation_fragment:
  - headcni.mesh.node
  - headcni.mesh.node.read_only
seealso:
  - module: headcni.mesh.headcni_info
"""

EXAMPLES = r"""
- name: Ask the daemon for its status
  headcni.mesh.headcni_status:
  register: node_status
"""

RETURN = r"""
status:
  description: The answer of C(headcnictl status --json). Empty if there is none.
  type: dict
  returned: success
problem:
  description: Why there is no answer. Empty if there is one.
  type: str
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import headcnictl, node

SECONDS = 30


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    node.refuse_other_platforms(module)
    status, problem = headcnictl.ask("status", seconds=SECONDS)
    module.exit_json(changed=False, status=status, problem=problem)


if __name__ == "__main__":
    main()
