#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a node's daemon says about itself."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_status
short_description: Ask the daemon of a node for its status
version_added: 0.4.0
description:
  - Runs C(headcnictl status) on the node, and changes nothing.
  - A node whose daemon does not answer is not a failure; RV(problem) says why.
author:
  - The HeadCNI authors (@headcni)
attributes:
  check_mode:
    support: full
    details: It never changes anything.
  diff_mode:
    support: none
    details: There is nothing to compare.
extends_documentation_fragment:
  - headcni.mesh.node
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

import json
import os
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import node, node_config

COMMAND = os.path.join(node_config.RELEASE, "bin", "headcnictl")
SECONDS = 30


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    node.refuse_other_platforms(module)
    status, problem = ask([COMMAND, "status", "--json"])
    module.exit_json(changed=False, status=status, problem=problem)


def ask(command: list[str]) -> tuple[dict, str]:
    """The status, or the reason why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        return {}, "HeadCNI is not installed on this node: run site.yml"
    except subprocess.TimeoutExpired:
        return {}, f"headcnictl status did not end in {SECONDS} s"
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return {}, (done.stderr.strip() or "headcnictl status printed nothing")[-600:]
    if "error" in answer:
        return {}, str(answer["error"])
    return answer, ""


if __name__ == "__main__":
    main()
