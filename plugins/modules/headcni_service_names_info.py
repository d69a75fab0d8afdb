#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which services of Kubernetes want a name in the tailnet."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_service_names_info
short_description: Read which services of Kubernetes want a name in the tailnet
version_added: 0.2.0
description:
  - Runs on a host with the cluster's administrator kubeconfig. Reads all services, and returns
    records for those with the annotation C(headcni.dev/tailnet-name=true). Changes nothing.
  - The service C(web) in the namespace C(shop) gets the name C(web.shop.ZONE) with its cluster IPs.
    A service without a cluster IP gets the addresses of its ready pods, and pods with a host name,
    as those of a StatefulSet, names of their own such as C(web-0.web.shop.ZONE).
  - The annotation only says whether a service has a name. Nobody can choose the name, so the owner
    of a namespace cannot take names of other namespaces or of devices.
author:
  - The HeadCNI authors (@headcni)
options:
  zone:
    description: The domain of all names, such as V(svc.mesh.example.org).
    type: str
    required: true
attributes:
  check_mode:
    description: Changes nothing, so check mode makes no difference.
    support: full
  diff_mode:
    description: It changes nothing.
    support: none
extends_documentation_fragment:
  - headcni.mesh.kubernetes
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.headscale_extra_records
"""

EXAMPLES = r"""
- name: Read which services want a name
  headcni.mesh.headcni_service_names_info:
    zone: svc.mesh.example.org
  delegate_to: server1
  register: names
"""

RETURN = r"""
records:
  description: The records, sorted, in the format of Headscale's C(dns.extra_records_path).
  type: list
  elements: dict
  returned: success
  sample: [{"name": "web.shop.svc.mesh.example.org", "type": "A", "value": "10.96.7.7"}]
problems:
  description: Why services with the annotation have no name, or not all of their addresses.
  type: list
  elements: str
  returned: success
"""

import json
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import (
    corefile,
    kubernetes,
    node,
    service_names,
)

LARGEST = 64 << 20  # characters of an answer


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "zone": {"required": True},
            **kubernetes.ADMIN_SPEC,
        },
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    given = module.params
    kubectl = kubernetes.administrator(module)
    try:
        zone = corefile.domain(given["zone"])
    except ValueError as wrong:
        module.fail_json(msg=f"zone: {wrong}")
    try:
        found = service_names.records(
            items(kubectl, "services", "-A"),
            zone,
            lambda namespace, name: items(
                kubectl,
                "endpointslices.discovery.k8s.io",
                "-n",
                namespace,
                "-l",
                f"kubernetes.io/service-name={name}",
            ),
        )
    except kubernetes.KubectlError as wrong:
        kubernetes.fail(module, wrong)
    except ValueError as wrong:
        module.fail_json(msg=str(wrong))
    module.exit_json(
        changed=False,
        records=[one.as_dict() for one in found.records],
        problems=list(found.problems),
    )


def items(kubectl: kubernetes.Kubectl, *words: str) -> list[dict[str, Any]]:
    said = kubectl.run("get", *words, "-o", "json")
    if len(said) > LARGEST:
        raise ValueError(f"the answer to `kubectl get {words[0]}` is larger than {LARGEST} bytes")
    return list(json.loads(said)["items"])


if __name__ == "__main__":
    main()
