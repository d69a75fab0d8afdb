#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Who the daemons of nodes are to Kubernetes."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_kubernetes_identity
short_description: Give nodes' daemons an identity at Kubernetes, or take it back
version_added: 0.1.0
description:
  - Runs where the cluster's administrator is. Applies a manifest with what a daemon may do, and
    makes a service account for each node. That account may ask for new tokens of its own, and of
    no other account.
  - The first token of a node comes from this module. It expires, and the daemon renews it.
  - Give it all nodes at once. It lists what is there once, however many nodes there are.
  - A node's tokens end with its service account. With the last account the manifest's objects go
    too.
author:
  - The HeadCNI authors (@headcni)
options:
  state:
    description:
      - V(absent) removes the accounts of O(nodes), which ends all their tokens.
      - V(switched) deletes the secrets with tokens that never expire, which earlier versions made
        for O(nodes). Use it once the nodes have a new token.
    type: str
    choices: [present, absent, switched]
    default: present
  nodes:
    description: The nodes, as Kubernetes calls them.
    type: list
    elements: str
    required: true
  tokens_for:
    description:
      - Those of O(nodes) that need a token. RV(headcni.mesh.headcni_kubernetes_info#module:token)
        tells which do. A node whose account is new gets a token in any case.
    type: list
    elements: str
    default: []
  lifetime:
    description:
      - How long a token lives, such as V(2160h), from V(10m) to V(8760h). The API server may grant
        less.
    type: str
    default: 2160h
  manifest:
    description: The text of the manifest.
    type: str
    required: true
  account:
    description: The manifest's role. Each node's objects are called by it and the node.
    type: str
    default: headcni-node
  namespace:
    description: Where the service accounts are.
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
    description: Asks the API server what would change. No token is made.
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
    tokens_for: [agent2]
    manifest: "{{ lookup('ansible.builtin.file', 'headcni-node.yaml') }}"
  delegate_to: server1
  no_log: true
  register: identity
"""

RETURN = r"""
tokens:
  description: The new tokens, by node. Empty in check mode.
  type: dict
  returned: when O(state=present)
renewed:
  description: The nodes that get a new token, in check mode too.
  type: list
  elements: str
  returned: when O(state=present)
old:
  description: The nodes that have a secret with a token that never expires, of an earlier version.
  type: list
  elements: str
  returned: when O(state=present)
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import kubernetes, node

AT_A_TIME = 50
AT_ONCE = 4  # calls of kubectl, which needs more time to start than the API server to answer
LABEL = "app.kubernetes.io/managed-by=headcni"
RBAC = "rbac.authorization.k8s.io"
KINDS = ("serviceaccount", f"role.{RBAC}", f"rolebinding.{RBAC}", f"clusterrolebinding.{RBAC}")
SECRET = "secret"  # noqa: S105 # a kind of object


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["present", "absent", "switched"], "default": "present"},
            "nodes": {"type": "list", "elements": "str", "required": True},
            "tokens_for": {"type": "list", "elements": "str", "default": [], "no_log": False},
            "lifetime": {"default": "2160h"},
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
    work = {"present": present, "absent": absent, "switched": switched}[module.params["state"]]
    try:
        module.exit_json(**work(module, kubectl))
    except kubernetes.KubectlError as wrong:
        module.fail_json(
            msg=f"Kubernetes, asked with {module.params['kubeconfig']}, does not do it: {wrong}"
        )
    except ValueError as wrong:
        module.fail_json(msg=str(wrong))


def present(module: AnsibleModule, kubectl: kubernetes.Kubectl) -> dict:
    given = module.params
    seconds = kubernetes.lifetime(given["lifetime"])
    dry = ["--dry-run=server"] if module.check_mode else []
    said = kubectl.run("apply", "-f", "-", *dry, given=given["manifest"])
    made = [line for line in said.splitlines() if " unchanged" not in line]
    found = ours(kubectl, given)
    # Somebody may have changed the objects of a node whose token was not renewed in time.
    lacking = [
        name
        for name in given["nodes"]
        if name in given["tokens_for"] or set(objects_of(given, name)) - found
    ]
    for part in () if module.check_mode else parts(lacking):
        # Not `create`: some of a node's objects may be there, or have lost their label.
        kubectl.run("apply", "-f", "-", given=json.dumps(new_objects(given, part)))
    without = [name for name in lacking if objects_of(given, name)[0] not in found]
    renewed = sorted({*given["tokens_for"], *without} & set(given["nodes"]))
    made += [
        f"{one} created" for name in lacking for one in objects_of(given, name) if one not in found
    ]
    made += [f"token of {account(given, name)} created" for name in renewed]
    return {
        "changed": bool(made),
        "diff": {"before": "", "after": lines(made)},
        "tokens": {} if module.check_mode else new_tokens(kubectl, given, renewed, seconds),
        "renewed": renewed,
        "old": [name for name in given["nodes"] if old_secret(given, name) in found],
    }


def absent(module: AnsibleModule, kubectl: kubernetes.Kubectl) -> dict:
    given = module.params
    found = ours(kubectl, given)
    mine = {
        one
        for name in given["nodes"]
        for one in (*objects_of(given, name), old_secret(given, name))
    }
    gone = sorted(found & mine)
    delete(module, kubectl, gone)
    if not found - mine:
        gone += delete_all(module, kubectl, given["manifest"])
        gone += delete_shared(module, kubectl)
    return {"changed": bool(gone), "diff": {"before": lines(gone), "after": ""}}


def switched(module: AnsibleModule, kubectl: kubernetes.Kubectl) -> dict:
    given = module.params
    secrets = {one for one in ours(kubectl, given) if one.startswith(f"{SECRET}/")}
    gone = sorted(secrets & {old_secret(given, name) for name in given["nodes"]})
    # The account goes before its last secrets: a run that is cut off here is finished by the next.
    shared = delete_shared(module, kubectl) if gone and len(gone) == len(secrets) else []
    delete(module, kubectl, gone)
    gone += shared
    return {"changed": bool(gone), "diff": {"before": lines(gone), "after": ""}}


def delete(module: AnsibleModule, kubectl: kubernetes.Kubectl, names: list) -> None:
    options = ("-n", module.params["namespace"], "--ignore-not-found")
    for part in () if module.check_mode else parts(names):
        kubectl.run("delete", *part, *options)


def delete_all(module: AnsibleModule, kubectl: kubernetes.Kubectl, manifest: str) -> list:
    """The API server names what it has deleted, and in check mode what it would delete."""
    dry = ["--dry-run=server"] if module.check_mode else []
    return kubectl.run("delete", "-f", "-", "--ignore-not-found", *dry, given=manifest).splitlines()


def delete_shared(module: AnsibleModule, kubectl: kubernetes.Kubectl) -> list:
    """The account that all nodes had together in earlier versions."""
    given = module.params
    name = {"name": given["account"]}
    items = [
        {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRoleBinding", "metadata": name},
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {**name, "namespace": given["namespace"]},
        },
    ]
    return delete_all(module, kubectl, json.dumps(as_list(items)))


def ours(kubectl: kubernetes.Kubectl, given: dict) -> set:
    """All that was ever made here, as kind/name: one call, however many nodes. Only names: no
    secret is read."""
    kinds = ",".join((*KINDS, SECRET))
    return set(
        kubectl.run("get", kinds, "-n", given["namespace"], "-l", LABEL, "-o", "name").split()
    )


def new_tokens(kubectl: kubernetes.Kubectl, given: dict, names: list, seconds: int) -> dict:
    def ask(name: str) -> str:
        return kubectl.token(given["namespace"], account(given, name), seconds)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(ask, names)))


def parts(names: list) -> Iterator[list]:
    """So many that one call of kubectl stays within its time: its client sends 50 requests a
    second."""
    for at in range(0, len(names), AT_A_TIME):
        yield names[at : at + AT_A_TIME]


def account(given: dict, name: str) -> str:
    return f"{given['account']}-{name}"


def objects_of(given: dict, name: str) -> list:
    """A node's own, the account first."""
    return [f"{kind}/{account(given, name)}" for kind in KINDS]


def old_secret(given: dict, name: str) -> str:
    return f"{SECRET}/{account(given, name)}"


def new_objects(given: dict, names: list) -> dict:
    return as_list([one for name in names for one in new_objects_of(given, account(given, name))])


def new_objects_of(given: dict, name: str) -> list:
    """An account, the manifest's role for it, and leave to ask for tokens of this very account."""
    label, value = LABEL.split("=")
    everywhere = {"name": name, "labels": {label: value}}
    here = {**everywhere, "namespace": given["namespace"]}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": given["namespace"]}
    renewal = {
        "apiGroups": [""],
        "resources": ["serviceaccounts/token"],
        "resourceNames": [name],
        "verbs": ["create"],
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": here,
            "automountServiceAccountToken": False,
        },
        {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": here, "rules": [renewal]},
        binding("RoleBinding", here, subject, "Role", name),
        binding("ClusterRoleBinding", everywhere, subject, "ClusterRole", given["account"]),
    ]


def binding(kind: str, metadata: dict, subject: dict, role_kind: str, role: str) -> dict:
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": kind,
        "metadata": metadata,
        "roleRef": {"apiGroup": RBAC, "kind": role_kind, "name": role},
        "subjects": [subject],
    }


def as_list(items: list) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": items}


def lines(words: list) -> str:
    return "".join(f"{word}\n" for word in words)


if __name__ == "__main__":
    main()
