#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What Kubernetes says of the node that it runs on."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_kubernetes_info
short_description: Ask Kubernetes about this node
version_added: 0.1.0
description:
  - Asks the API server, as the node's own kubelet would, what it calls the node and which pod CIDRs
    it gave it. Nothing is changed.
  - A node that has not joined yet is no error; RV(joined) and RV(problem) say so.
author:
  - The HeadCNI authors (@headcni)
options:
  name:
    description: What Kubernetes calls this node, if not by its host name.
    type: str
    default: ""
  kubectl:
    description:
      - How to run kubectl here. Without a path it is looked for where k3s puts it, too.
    type: list
    elements: str
    default: [k3s, kubectl]
  kubeconfig:
    description: The kubelet's own. It is there once the node has joined.
    type: path
    default: /var/lib/rancher/k3s/agent/kubelet.kubeconfig
  timeout:
    description:
      - How many seconds to wait for the API server, and for the pod CIDR of a node that is new.
    type: int
    default: 30
attributes:
  check_mode:
    description: Can run in check_mode; it changes nothing anyway.
    support: full
  diff_mode:
    description: It changes nothing.
    support: none
  platform:
    description: The nodes it is for.
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
  description: Why it is not, or why it has no pod CIDR; empty if all is well.
  type: str
  returned: success
name:
  description: What Kubernetes calls the node.
  type: str
  returned: success
pod_cidrs:
  description: What it gave the node for pods.
  type: list
  elements: str
  returned: success
cluster:
  description: The API server's address and CA as a kubeconfig has them, for this very node.
  type: dict
  returned: success
"""

import os
import socket
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import kubernetes, node


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
            "timeout": {"type": "int", "default": 30},
        },
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    name = module.params["name"] or socket.gethostname().lower()
    found = {"changed": False, "joined": False, "name": name, "pod_cidrs": [], "cluster": {}}
    kubeconfig = module.params["kubeconfig"]
    if not os.path.exists(kubeconfig):
        problem = f"{kubeconfig} is not there: this node has not joined its cluster yet"
        module.exit_json(**found, problem=problem)
    program, *words = module.params["kubectl"]
    program = module.get_bin_path(program, required=True, opt_dirs=list(kubernetes.PLACES))
    kubectl = kubernetes.Kubectl([program, *words], kubeconfig)
    try:
        found["cluster"] = kubectl.cluster()
        found["pod_cidrs"] = pod_cidrs(kubectl, name, module.params["timeout"])
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


def pod_cidrs(kubectl: kubernetes.Kubectl, name: str, seconds: int) -> list[str]:
    """They come a moment after the node; and a server that restarts is back soon."""
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
