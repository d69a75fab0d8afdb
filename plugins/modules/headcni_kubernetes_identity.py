#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Service accounts and tokens of the nodes' daemons in Kubernetes."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_kubernetes_identity
short_description: Create or remove the identities of nodes' daemons in Kubernetes
version_added: 0.1.0
description:
  - Runs on a host with the cluster's administrator kubeconfig. Applies a manifest with the daemons'
    permissions, and creates a service account for each node. Each account may request new tokens
    for itself, and for no other account.
  - This module creates the first token of a node. It expires, and the daemon renews it.
  - Pass all nodes at once. The module lists the existing objects once, for any number of nodes.
  - When a node's service account is removed, its tokens become invalid. With the last account the
    manifest's objects are removed, too.
author:
  - The HeadCNI authors (@headcni)
options:
  state:
    description:
      - V(absent) removes the accounts of O(nodes), so all their tokens become invalid.
      - V(switched) deletes the secrets with tokens that never expire, which earlier versions
        created for O(nodes). Use it after the nodes have got a new token.
    type: str
    choices: [present, absent, switched]
    default: present
  nodes:
    description: The names of the nodes in Kubernetes.
    type: list
    elements: str
    required: true
  tokens_for:
    description:
      - The nodes among O(nodes) that need a token, as
        RV(headcni.mesh.headcni_kubernetes_info#module:token) says. A node whose account is new
        always gets a token.
    type: list
    elements: str
    default: []
  policies_for:
    description:
      - The nodes among O(nodes) whose daemons enforce network policies. Their accounts may also
        list and watch network policies. The permission is removed from the other nodes of O(nodes).
    type: list
    elements: str
    default: []
  lifetime:
    description:
      - How long a token is valid, such as V(2160h), from V(10m) to V(8760h). The API server may
        grant less.
    type: str
    default: 2160h
  manifest:
    description: The text of the manifest.
    type: str
    required: true
  account:
    description:
      - The name of the manifest's role. The role for network policies has the suffix C(:policies).
        The name of each node's objects starts with it.
    type: str
    default: headcni-node
  namespace:
    description: The namespace of the service accounts.
    type: str
    default: kube-system
attributes:
  check_mode:
    description: Asks the API server what would change. No token is created.
    support: full
  diff_mode:
    description: Shows the names of the objects that are created or removed.
    support: full
extends_documentation_fragment:
  - headcni.mesh.kubernetes
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.headcni_kubernetes_info
"""

EXAMPLES = r"""
- name: Create the daemons' identities in Kubernetes
  headcni.mesh.headcni_kubernetes_identity:
    nodes: [agent1, agent2]
    tokens_for: [agent2]
    policies_for: [agent1, agent2]
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
last:
  description: Whether no other node of the cluster has an identity, so that nothing is left.
  type: bool
  returned: when O(state=absent)
old:
  description: The nodes that still have a secret of an earlier version, whose token never expires.
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
AT_ONCE = 4  # calls of kubectl, which takes longer to start than the API server to answer
LABEL = "app.kubernetes.io/managed-by=headcni"
RBAC = "rbac.authorization.k8s.io"
KINDS = ("serviceaccount", f"role.{RBAC}", f"rolebinding.{RBAC}", f"clusterrolebinding.{RBAC}")
SECRET = "secret"  # noqa: S105 # a kind of object
POLICIES = "policies"  # no node's name contains the colon that separates it from other names


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["present", "absent", "switched"], "default": "present"},
            "nodes": {"type": "list", "elements": "str", "required": True},
            "tokens_for": {"type": "list", "elements": "str", "default": [], "no_log": False},
            "policies_for": {"type": "list", "elements": "str", "default": []},
            "lifetime": {"default": "2160h"},
            "manifest": {"required": True},
            "account": {"default": "headcni-node"},
            "namespace": {"default": "kube-system"},
            **kubernetes.ADMIN_SPEC,
        },
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    kubectl = kubernetes.administrator(module)
    work = {"present": present, "absent": absent, "switched": switched}[module.params["state"]]
    try:
        module.exit_json(**work(module, kubectl))
    except kubernetes.KubectlError as wrong:
        kubernetes.fail(module, wrong)
    except ValueError as wrong:
        module.fail_json(msg=str(wrong))


def present(module: AnsibleModule, kubectl: kubernetes.Kubectl) -> dict:
    given = module.params
    seconds = kubernetes.lifetime(given["lifetime"])
    dry = ["--dry-run=server"] if module.check_mode else []
    said = kubectl.run("apply", "-f", "-", *dry, given=given["manifest"])
    made = [line for line in said.splitlines() if " unchanged" not in line]
    found = ours(kubectl, given)
    # Also the nodes that need a token: somebody may have changed their objects.
    lacking = [
        name
        for name in given["nodes"]
        if name in given["tokens_for"] or set(objects_of(given, name)) - found
    ]
    for part in () if module.check_mode else parts(lacking):
        # Not `create`: some of a node's objects may already exist, or have lost their label.
        kubectl.run("apply", "-f", "-", given=json.dumps(new_objects(given, part)))
    without = [name for name in lacking if objects_of(given, name)[0] not in found]
    renewed = sorted({*given["tokens_for"], *without} & set(given["nodes"]))
    made += [
        f"{entry} created"
        for name in lacking
        for entry in objects_of(given, name)
        if entry not in found
    ]
    made += [f"token of {account(given, name)} created" for name in renewed]
    gone = sorted(
        found
        & {policy_binding(given, name) for name in given["nodes"] if not has_policies(given, name)}
    )
    delete(module, kubectl, gone)
    return {
        "changed": bool(made or gone),
        "diff": {"before": lines(gone), "after": lines(made)},
        "tokens": {} if module.check_mode else new_tokens(kubectl, given, renewed, seconds),
        "renewed": renewed,
        "old": [name for name in given["nodes"] if old_secret(given, name) in found],
    }


def absent(module: AnsibleModule, kubectl: kubernetes.Kubectl) -> dict:
    given = module.params
    found = ours(kubectl, given)
    mine = {
        entry
        for name in given["nodes"]
        for entry in (
            *objects_of(given, name),
            policy_binding(given, name),
            old_secret(given, name),
        )
    }
    gone = sorted(found & mine)
    delete(module, kubectl, gone)
    last = not found - mine
    if last:
        gone += delete_all(module, kubectl, given["manifest"])
        gone += delete_shared(module, kubectl)
    return {"changed": bool(gone), "last": last, "diff": {"before": lines(gone), "after": ""}}


def switched(module: AnsibleModule, kubectl: kubernetes.Kubectl) -> dict:
    given = module.params
    secrets = {entry for entry in ours(kubectl, given) if entry.startswith(f"{SECRET}/")}
    gone = sorted(secrets & {old_secret(given, name) for name in given["nodes"]})
    # Remove the account before its last secrets: then the next run can finish an interrupted one.
    shared = delete_shared(module, kubectl) if gone and len(gone) == len(secrets) else []
    delete(module, kubectl, gone)
    gone += shared
    return {"changed": bool(gone), "diff": {"before": lines(gone), "after": ""}}


def delete(module: AnsibleModule, kubectl: kubernetes.Kubectl, names: list) -> None:
    options = ("-n", module.params["namespace"], "--ignore-not-found")
    for part in () if module.check_mode else parts(names):
        kubectl.run("delete", *part, *options)


def delete_all(module: AnsibleModule, kubectl: kubernetes.Kubectl, manifest: str) -> list:
    """Returns what the API server has deleted, and in check mode what it would delete."""
    dry = ["--dry-run=server"] if module.check_mode else []
    return kubectl.run("delete", "-f", "-", "--ignore-not-found", *dry, given=manifest).splitlines()


def delete_shared(module: AnsibleModule, kubectl: kubernetes.Kubectl) -> list:
    """Delete the account that all nodes shared in earlier versions."""
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
    """All objects that this module has created, as kind/name: one call for any number of nodes. It
    reads only names, no secrets."""
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
    """Small enough that one call of kubectl stays within its timeout: its client sends 50 requests
    per second."""
    for at in range(0, len(names), AT_A_TIME):
        yield names[at : at + AT_A_TIME]


def account(given: dict, name: str) -> str:
    return f"{given['account']}-{name}"


def objects_of(given: dict, name: str) -> list:
    """A node's own objects, the account first."""
    own = [f"{kind}/{account(given, name)}" for kind in KINDS]
    return [*own, policy_binding(given, name)] if has_policies(given, name) else own


def has_policies(given: dict, name: str) -> bool:
    return given["state"] == "present" and name in given["policies_for"]


def policy_binding(given: dict, name: str) -> str:
    return f"clusterrolebinding.{RBAC}/{policy_account(given)}:{name}"


def policy_account(given: dict) -> str:
    return f"{given['account']}:{POLICIES}"


def old_secret(given: dict, name: str) -> str:
    return f"{SECRET}/{account(given, name)}"


def new_objects(given: dict, names: list) -> dict:
    return as_list(
        [entry for name in names for entry in new_objects_of(given, account(given, name))]
        + [new_policy_binding(given, name) for name in names if has_policies(given, name)]
    )


def new_policy_binding(given: dict, name: str) -> dict:
    label, value = LABEL.split("=")
    role = policy_account(given)
    subject = {
        "kind": "ServiceAccount",
        "name": account(given, name),
        "namespace": given["namespace"],
    }
    metadata = {"name": f"{role}:{name}", "labels": {label: value}}
    return binding("ClusterRoleBinding", metadata, subject, "ClusterRole", role)


def new_objects_of(given: dict, name: str) -> list:
    """An account, the manifest's role for it, and the permission to create tokens for itself."""
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
