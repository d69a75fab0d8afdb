#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What Kubernetes knows about this node."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_kubernetes_info
short_description: Read what Kubernetes knows about this node
version_added: 0.1.0
description:
  - Asks the API server, with the kubelet's own kubeconfig, for the node's name and pod CIDRs.
    Changes nothing.
  - Also returns whether the daemon of this node needs a new token. It asks the API server whether
    it accepts the daemon's current token.
  - A node that has not joined yet is not an error. RV(joined) and RV(problem) say so.
author:
  - The HeadCNI authors (@headcni)
options:
  name:
    description: The node's name in Kubernetes, if it is not its host name.
    type: str
    default: ""
  kubectl:
    description:
      - The command that runs kubectl. Without a path it is also searched where k3s puts it.
    type: list
    elements: str
    default: [k3s, kubectl]
  kubeconfig:
    description: The kubelet's own kubeconfig, which exists after the node has joined.
    type: path
    default: /var/lib/rancher/k3s/agent/kubelet.kubeconfig
  daemon_kubeconfig:
    description: The kubeconfig that C(site.yml) wrote for the daemon of this node.
    type: path
    default: /etc/headcni/kubeconfig
  token_file:
    description: The file with the daemon's token, to which that kubeconfig refers.
    type: path
    default: /var/lib/headcni/kubernetes-token
  token_lifetime:
    description:
      - How long a token should be valid, such as V(2160h). A token with a longer lifetime is
        replaced.
    type: str
    default: 2160h
  account:
    description: The first part of the name of the node's service account.
    type: str
    default: headcni-node
  timeout:
    description:
      - How many seconds to wait for the API server, and for the pod CIDR of a new node.
    type: int
    default: 30
attributes:
  check_mode:
    description: Changes nothing, so check mode makes no difference.
    support: full
  diff_mode:
    description: It changes nothing.
    support: none
  platform:
    description: The platform of the nodes.
    support: full
    platforms: linux
seealso:
  - module: headcni.mesh.headcni_kubernetes_identity
"""

EXAMPLES = r"""
- name: Ask Kubernetes about this node
  headcni.mesh.headcni_kubernetes_info:
  register: asked
"""

RETURN = r"""
joined:
  description: Whether the node is in a cluster.
  type: bool
  returned: success
problem:
  description: Why it is not, or why it has no pod CIDR. Empty if there is no problem.
  type: str
  returned: success
name:
  description: The node's name in Kubernetes.
  type: str
  returned: success
pod_cidrs:
  description: The pod CIDRs that Kubernetes assigned to the node.
  type: list
  elements: str
  returned: success
cluster:
  description: The API server's address and CA as this node reaches it, in the format of kubeconfig.
  type: dict
  returned: success
token:
  description: Whether the daemon needs a new token, and why.
  type: dict
  returned: success
  contains:
    needed:
      description: Whether a new token should be created.
      type: bool
      returned: success
    reason:
      description: The reason. Empty if no new token is needed.
      type: str
      returned: success
    expires:
      description: When the current token expires. Empty if there is no token that expires.
      type: str
      returned: success
"""

import os
import socket
import time
from typing import Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import kubernetes, node
from ansible_collections.headcni.mesh.plugins.module_utils.shared import bearer_token


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"default": ""},
            "kubectl": {
                "type": "list",
                "elements": "str",
                "default": list(kubernetes.K3S_KUBECTL),
            },
            "kubeconfig": {"type": "path", "default": kubernetes.K3S_KUBELET},
            "daemon_kubeconfig": {"type": "path", "default": "/etc/headcni/kubeconfig"},
            "token_file": {"type": "path", "default": bearer_token.FILE, "no_log": False},
            "token_lifetime": {"default": "2160h", "no_log": False},
            "account": {"default": "headcni-node"},
            "timeout": {"type": "int", "default": 30},
        },
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    name = module.params["name"] or socket.gethostname().lower()
    try:
        lifetime = kubernetes.lifetime(module.params["token_lifetime"])
    except ValueError as wrong:
        module.fail_json(msg=f"headcni_node_token_lifetime: {wrong}")
    found = {"changed": False, "joined": False, "name": name, "pod_cidrs": [], "cluster": {}}
    found["token"] = {"needed": False, "reason": "", "expires": ""}
    kubeconfig = module.params["kubeconfig"]
    if not os.path.exists(kubeconfig):
        problem = f"{kubeconfig} is not there: this node has not joined its cluster yet"
        module.exit_json(**found, problem=problem)
    program, *words = module.params["kubectl"]
    program = module.get_bin_path(program, required=True, opt_dirs=list(kubernetes.PLACES))
    kubectl = kubernetes.Kubectl([program, *words], kubeconfig)
    daemons = kubernetes.Kubectl([program, *words], module.params["daemon_kubeconfig"])
    try:
        found["cluster"] = kubectl.cluster()
        found["pod_cidrs"] = pod_cidrs(kubectl, name, module.params["timeout"])
        found["token"] = token(daemons, name, module.params, lifetime)
    except kubernetes.KubectlError as wrong:
        module.fail_json(
            msg=f"Kubernetes does not say which pod CIDR {name} has: {wrong}. See that kubelet, or "
            "k3s, runs on this node and the API server on its own; where Kubernetes calls the node "
            "by another name, set headcni_node_name"
        )
    problem = ""
    if not found["pod_cidrs"]:
        problem = (
            f"Kubernetes knows {name}, but gave it no pod CIDR within {module.params['timeout']} s"
        )
    module.exit_json(**{**found, "joined": True}, problem=problem)


def token(kubectl: kubernetes.Kubectl, name: str, given: dict, lifetime: int) -> dict[str, object]:
    """Whether the daemon's token must be replaced. Normally the daemon renews it much earlier."""
    known = held(given["daemon_kubeconfig"], given["token_file"])
    if known is None:
        return {"needed": True, "reason": "the daemon has no token that expires", "expires": ""}
    reason = outdated(known, f"{given['account']}-{name}", lifetime)
    if not reason and not is_accepted(kubectl, name):
        reason = "the API server does not accept the daemon's token"
    return {"needed": bool(reason), "reason": reason, "expires": bearer_token.date(known.expires)}


def held(kubeconfig: str, token_file: str) -> Optional[bearer_token.BearerToken]:
    """The daemon's token. A kubeconfig that does not refer to the file is of an earlier version,
    and its token never expires."""
    try:
        with open(kubeconfig, encoding="utf-8") as file:
            if token_file not in file.read(1 << 20):
                return None
        with open(token_file, encoding="ascii") as file:
            known = bearer_token.read(file.read(bearer_token.LARGEST + 1).strip())
    except (OSError, ValueError):
        return None
    return known if known is not None and known.expires else None


def outdated(known: bearer_token.BearerToken, account: str, lifetime: int) -> str:
    now, until = time.time(), bearer_token.date(known.expires)
    if known.account != account:
        return f"the daemon's token is of {known.account}, not of {account}"
    if known.has_expired(now):
        return f"the daemon's token expired on {until}"
    if now >= known.late_at:
        return f"the daemon has not renewed its token, which expires on {until}"
    # The API server may round up to a whole minute.
    return (
        "the daemon's token lives longer than it should" if known.lifetime > lifetime + 60 else ""
    )


def is_accepted(kubectl: kubernetes.Kubectl, name: str) -> bool:
    try:
        kubectl.get("node", name)
    except kubernetes.KubectlError as wrong:
        return "Unauthorized" not in str(wrong) and "must be logged in" not in str(wrong)
    return True


def pod_cidrs(kubectl: kubernetes.Kubectl, name: str, seconds: int) -> list[str]:
    """Wait: the CIDRs appear shortly after the node, and the API server may be restarting."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = kubectl.get("node", name)
            if found is None:
                raise kubernetes.KubectlError("it knows no such node")
            if found["spec"].get("podCIDRs") or time.monotonic() > deadline:
                return list(found["spec"].get("podCIDRs", []))
        except kubernetes.KubectlError:
            if time.monotonic() > deadline:
                raise
        time.sleep(1)


if __name__ == "__main__":
    main()
