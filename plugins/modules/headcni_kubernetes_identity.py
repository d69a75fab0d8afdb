#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Who the daemons of nodes are to Kubernetes."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_kubernetes_identity
short_description: Give nodes' daemons an identity at Kubernetes, or take it back
version_added: 0.1.0
description:
  - Runs where the cluster's administrator is. Applies a manifest with a service account and what it
    may do, and makes a token of that account for each node, in a secret of its own.
  - Give it all nodes at once. It lists the secrets once, however many nodes there are.
  - A node's token ends with its secret. With the last of them the manifest's objects go too.
author:
  - The HeadCNI authors (@headcni)
options:
  state:
    description: V(absent) takes the tokens of O(nodes) back.
    type: str
    choices: [present, absent]
    default: present
  nodes:
    description: The nodes, as Kubernetes calls them.
    type: list
    elements: str
    required: true
  manifest:
    description: The text of the manifest.
    type: str
    required: true
  account:
    description: The manifest's service account. Secrets are called by it and the node.
    type: str
    default: headcni-node
  namespace:
    description: Where the service account is.
    type: str
    default: kube-system
  kubectl:
    description:
      - How to run kubectl here. Without a path it is looked for where k3s puts it, too.
    type: list
    elements: str
    default: [k3s, kubectl]
  kubeconfig:
    description: The administrator's.
    type: path
    default: /etc/rancher/k3s/k3s.yaml
attributes:
  check_mode:
    description: Asks the API server what would change. A token that is not there yet is left out.
    support: full
  diff_mode:
    description: Returns the names of what is made or removed.
    support: full
  platform:
    description: The nodes it is for.
    support: full
    platforms: linux
seealso:
  - module: headcni.mesh.headcni_kubernetes_info
"""

EXAMPLES = r"""
- name: Give the daemons an identity at Kubernetes
  headcni.mesh.headcni_kubernetes_identity:
    nodes: [agent1, agent2]
    manifest: "{{ lookup('ansible.builtin.file', 'headcni-node.yaml') }}"
  delegate_to: server1
  no_log: true
  register: identity
"""

RETURN = r"""
tokens:
  description: Each node's token.
  type: dict
  returned: when O(state=present)
"""

import base64
import json
import time
from collections.abc import Iterator
from typing import Any, Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import kubernetes, node

TOKEN_SECONDS = 20
AT_A_TIME = 100
LABEL = "app.kubernetes.io/managed-by=headcni"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["present", "absent"], "default": "present"},
            "nodes": {"type": "list", "elements": "str", "required": True},
            "manifest": {"required": True},
            "account": {"default": "headcni-node"},
            "namespace": {"default": "kube-system"},
            "kubectl": {
                "type": "list",
                "elements": "str",
                "default": list(kubernetes.K3S_KUBECTL),
            },
            "kubeconfig": {"type": "path", "default": kubernetes.K3S_ADMIN},
        },
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    program, *words = module.params["kubectl"]
    program = module.get_bin_path(program, required=True, opt_dirs=list(kubernetes.PLACES))
    kubectl = kubernetes.Kubectl([program, *words], module.params["kubeconfig"])
    try:
        module.exit_json(
            **(present if module.params["state"] == "present" else absent)(module, kubectl)
        )
    except kubernetes.KubectlError as wrong:
        module.fail_json(
            msg=f"Kubernetes, asked with {module.params['kubeconfig']}, does not do it: {wrong}"
        )


def present(module: AnsibleModule, kubectl: kubernetes.Kubectl) -> dict:
    given = module.params
    dry = ["--dry-run=server"] if module.check_mode else []
    said = kubectl.run("apply", "-f", "-", *dry, given=given["manifest"])
    made = [line for line in said.splitlines() if " unchanged" not in line]
    found = secrets(kubectl, given)
    missing = [name for name in given["nodes"] if secret_name(given, name) not in found]
    made += [f"secret/{secret_name(given, name)} created" for name in missing]
    if module.check_mode:
        there = [name for name in given["nodes"] if name not in missing]
        return changes(made, tokens=tokens(found, given, there))
    for part in parts(missing):
        # Not `create`: if somebody took its label off, it is there already, and not in the list.
        kubectl.run("apply", "-f", "-", given=json.dumps(new_secrets(given, part)))
    return changes(made, tokens=all_tokens(kubectl, given, None if missing else found))


def absent(module: AnsibleModule, kubectl: kubernetes.Kubectl) -> dict:
    given = module.params
    there = set(secrets(kubectl, given))
    ours = there & {secret_name(given, name) for name in given["nodes"]}
    gone = [f"secret/{name}" for name in sorted(ours)]
    for part in () if module.check_mode else parts(gone):
        kubectl.run("delete", *part, "-n", given["namespace"], "--ignore-not-found")
    if there == ours:
        # In check mode the API server still names them; without, only what it has deleted.
        dry = ["--dry-run=server"] if module.check_mode else []
        options = ("--ignore-not-found", *dry)
        gone += kubectl.run("delete", "-f", "-", *options, given=given["manifest"]).splitlines()
    return {"changed": bool(gone), "diff": {"before": lines(gone), "after": ""}}


def changes(made: list, **result: Any) -> dict:
    return {"changed": bool(made), "diff": {"before": "", "after": lines(made)}, **result}


def parts(names: list) -> Iterator[list]:
    """So many that one call of kubectl stays within its time: its client sends 50 requests a
    second."""
    for at in range(0, len(names), AT_A_TIME):
        yield names[at : at + AT_A_TIME]


def secrets(kubectl: kubernetes.Kubectl, given: dict) -> dict:
    """All secrets that were ever made here, by their names: one list, however many nodes."""
    found = kubectl.get("secret", "-n", given["namespace"], "-l", LABEL) or {}
    return {one["metadata"]["name"]: one for one in found.get("items", [])}


def tokens(found: dict, given: dict, names: list) -> dict:
    """Of those nodes whose secret Kubernetes has filled in."""
    coded = {
        name: (found.get(secret_name(given, name)) or {}).get("data", {}).get("token")
        for name in names
    }
    return {name: base64.b64decode(code).decode() for name, code in coded.items() if code}


def all_tokens(kubectl: kubernetes.Kubectl, given: dict, found: Optional[dict]) -> dict:
    """Wait for them as long as more of them come: for many nodes Kubernetes needs a while."""
    most, deadline = -1, 0.0
    while True:
        found = secrets(kubectl, given) if found is None else found
        ready = tokens(found, given, given["nodes"])
        lacking = [name for name in given["nodes"] if name not in ready]
        if not lacking:
            return ready
        if len(ready) > most:
            most, deadline = len(ready), time.monotonic() + TOKEN_SECONDS
        if time.monotonic() > deadline:
            more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
            raise kubernetes.KubectlError(
                f"secret {secret_name(given, lacking[0])}{more} has no token after "
                f"{TOKEN_SECONDS} s: is the controller manager running?"
            )
        time.sleep(0.5)
        found = None


def secret_name(given: dict, name: str) -> str:
    return f"{given['account']}-{name}"


def new_secrets(given: dict, names: list) -> dict:
    """Kubernetes fills them in, and a token holds for as long as its secret is there."""
    label, value = LABEL.split("=")
    items = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "kubernetes.io/service-account-token",
            "metadata": {
                "name": secret_name(given, name),
                "namespace": given["namespace"],
                "labels": {label: value},
                "annotations": {"kubernetes.io/service-account.name": given["account"]},
            },
        }
        for name in names
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def lines(words: list) -> str:
    return "".join(f"{word}\n" for word in words)


if __name__ == "__main__":
    main()
