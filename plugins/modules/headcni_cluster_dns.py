#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Names of the tailnet in the DNS of a Kubernetes cluster."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_cluster_dns
short_description: Let the pods of a Kubernetes cluster resolve names of the tailnet
version_added: 0.2.0
description:
  - Runs on a host with the cluster's administrator kubeconfig. Adds a server block for the
    tailnet's domain and its reverse zones to CoreDNS, which forwards these queries to the resolver
    of the tailscaled on its node.
  - If the Corefile imports C(custom/*.server), as in k3s, the block is the key C(headcni.server) of
    the ConfigMap C(coredns-custom). Otherwise it is at the end of the Corefile, as with kubeadm,
    between the lines C(# BEGIN headcni) and C(# END headcni).
  - Everything else in both ConfigMaps stays as it is, byte for byte. A change that somebody else
    makes at the same time is kept.
author:
  - The HeadCNI authors (@headcni)
options:
  state:
    description: V(absent) removes the block, and C(coredns-custom) if this module has created it.
    type: str
    choices: [present, absent]
    default: present
  domain:
    description:
      - The tailnet's domain, C(dns.base_domain) of Headscale. Required with O(state=present).
    type: str
    default: ""
  ranges:
    description: The tailnet's ranges, for the reverse zones.
    type: list
    elements: str
    default: [100.64.0.0/10, "fd7a:115c:a1e0::/48"]
  pod_cidrs:
    description:
      - Ranges of pods. If there is no IPv4 range, CoreDNS asks the resolver at
        C(fd7a:115c:a1e0::53), and otherwise at C(100.100.100.100).
    type: list
    elements: str
    default: []
  tailnet_access:
    description:
      - What pods may reach of the tailnet, C(network.tailnetAccess) of the nodes. If CoreDNS may
        not reach the resolver, this module fails and changes nothing.
    type: raw
    default: all
  tailnet_access_namespaces:
    description: The exceptions for namespaces, C(network.tailnetAccessNamespaces) of the nodes.
    type: dict
    default: {}
  namespace:
    description: The namespace of CoreDNS.
    type: str
    default: kube-system
attributes:
  check_mode:
    description: The API server checks the change, and does not store it.
    support: full
  diff_mode:
    description: Shows both files before and after.
    support: full
extends_documentation_fragment:
  - headcni.mesh.kubernetes
  - headcni.mesh.node
"""

EXAMPLES = r"""
- name: Let pods resolve names of the tailnet
  headcni.mesh.headcni_cluster_dns:
    domain: mesh.example.org
    kubectl: [kubectl]
    kubeconfig: /etc/kubernetes/admin.conf
  delegate_to: server1

- name: Remove the block
  headcni.mesh.headcni_cluster_dns:
    state: absent
  delegate_to: server1
"""

RETURN = r"""
place:
  description: The ConfigMap and the key with the block. Empty if there is no block.
  type: str
  returned: success
  sample: coredns-custom/headcni.server
"""

import json
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple, Optional

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import corefile, kubernetes, node

MAIN = "coredns"
MAIN_KEY = "Corefile"
CUSTOM = "coredns-custom"
CUSTOM_KEY = "headcni.server"
ANNOTATION = "headcni.dev/tailnet-access"
LABEL = {"app.kubernetes.io/managed-by": "headcni"}
TRIES = 3  # somebody else may write the same ConfigMap at the same moment


class Change(NamedTuple):
    """A ConfigMap as it is and the text that its key should have; "" for no key."""

    name: str
    key: str
    found: Optional[dict[str, Any]]
    text: str

    @property
    def before(self) -> str:
        return str(data(self.found).get(self.key, ""))


class Wish(NamedTuple):
    """The block that is wanted; None for no block."""

    domain: str
    ranges: tuple[str, ...]
    resolver: str


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["present", "absent"], "default": "present"},
            "domain": {"default": ""},
            "ranges": {"type": "list", "elements": "str", "default": list(corefile.RANGES)},
            "pod_cidrs": {"type": "list", "elements": "str", "default": []},
            "tailnet_access": {"type": "raw", "default": "all"},
            "tailnet_access_namespaces": {"type": "dict", "default": {}},
            "namespace": {"default": "kube-system"},
            **kubernetes.ADMIN_SPEC,
        },
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    given = module.params
    kubectl = kubernetes.administrator(module)
    try:
        wish = wished(given)
        if wish is not None:
            refuse_unreachable(kubectl, given, wish.resolver)
        done = settle(module, kubectl, wish)
    except kubernetes.KubectlError as wrong:
        kubernetes.fail(module, wrong)
    except ValueError as wrong:
        module.fail_json(msg=str(wrong))
    module.exit_json(**done)


def wished(given: dict[str, Any]) -> Optional[Wish]:
    if given["state"] == "absent":
        return None
    try:
        domain = corefile.domain(given["domain"])
    except ValueError as wrong:
        raise ValueError(f"domain: {wrong}") from None
    for name in ("ranges", "pod_cidrs"):
        for text in given[name]:
            try:
                ip_network(text)
            except ValueError:
                raise ValueError(
                    f"{name}: {text[:80]!r}, expected a range in CIDR notation"
                ) from None
    families = {ip_network(text).version for text in given["pod_cidrs"]}
    return Wish(domain, tuple(given["ranges"]), corefile.RESOLVERS[6 if families == {6} else 4])


def refuse_unreachable(kubectl: kubernetes.Kubectl, given: dict[str, Any], resolver: str) -> None:
    """CoreDNS is a pod, so limits for pods apply to it."""
    namespace = given["namespace"]
    access, source = given["tailnet_access"], "headcni_node_tailnet_access"
    if namespace in given["tailnet_access_namespaces"]:
        access = given["tailnet_access_namespaces"][namespace]
        source = f"headcni_node_tailnet_access_namespaces.{namespace}"
    elif access != "all":
        found = kubectl.get("namespace", namespace) or {}
        annotations = (found.get("metadata") or {}).get("annotations") or {}
        if ANNOTATION in annotations:
            access, source = annotations[ANNOTATION], f"the annotation {ANNOTATION} of {namespace}"
    if not allows(access, resolver):
        entry = f"[{resolver}]:53" if ":" in resolver else f"{resolver}:53"
        raise ValueError(
            f"{source}: {access}, so CoreDNS may not reach tailscaled's resolver: set "
            f"headcni_node_tailnet_access_namespaces: {{{namespace}: ['{entry}']}}"
        )


def allows(access: Any, resolver: str) -> bool:
    """Whether pods with this access reach the resolver by UDP and TCP."""
    if isinstance(access, str):
        access = access.split(",")
    protocols = set()
    for entry in map(str.strip, map(str, access or ())):
        if entry == "all":
            return True
        address, _unused, port = entry.rpartition("]:" if entry.startswith("[") else ":")
        if not entry.startswith("[") and entry.count(":") != 1:
            address, port = entry, ""
        ports, _unused, protocol = port.partition("/")
        first, _unused, last = ports.partition("-")
        try:
            covers = ip_address(resolver) in ip_network(address.strip("[]"), strict=False)
            covers = covers and (not first or int(first) <= 53 <= int(last or first))
        except ValueError:
            continue  # the checks of the node's configuration report it
        if covers:
            protocols |= {protocol} if protocol else {"udp", "tcp"}
    return {"udp", "tcp"} <= protocols


def settle(
    module: AnsibleModule, kubectl: kubernetes.Kubectl, wish: Optional[Wish]
) -> dict[str, Any]:
    namespace, dry = module.params["namespace"], module.check_mode
    for turn in range(TRIES):
        changes = planned(kubectl, namespace, wish)
        differing = [change for change in changes if change.text != change.before]
        try:
            for change in differing:
                write(kubectl, namespace, change, dry)
            break
        except kubernetes.KubectlError as wrong:
            raced = "Conflict" in str(wrong) or "has been modified" in str(wrong)
            if not (raced or "AlreadyExists" in str(wrong)) or turn == TRIES - 1:
                raise
    main_file = next((change for change in changes if change.name == MAIN), None)
    if wish is not None and main_file is not None and not corefile.reloads(main_file.before):
        module.warn(
            f"{namespace}/{MAIN} has no plugin reload: CoreDNS must be restarted to see the change"
        )
    place = next(
        (f"{one.name}/{one.key}" for one in changes if wish and corefile.BEGIN in one.text), ""
    )
    return {
        "changed": bool(differing),
        "place": place,
        "diff": [
            {
                "before_header": f"{namespace}/{change.name}: {change.key}",
                "after_header": f"{namespace}/{change.name}: {change.key}",
                "before": change.before,
                "after": change.text,
            }
            for change in differing
        ],
    }


def planned(kubectl: kubernetes.Kubectl, namespace: str, wish: Optional[Wish]) -> list[Change]:
    """Both files as they should be. The block is in one of them at most."""
    main_map = kubectl.get("configmap", MAIN, "-n", namespace)
    custom_map = kubectl.get("configmap", CUSTOM, "-n", namespace)
    text = data(main_map).get(MAIN_KEY)
    if text is None:
        if wish is not None:
            raise ValueError(
                f"there is no ConfigMap {namespace}/{MAIN} with a {MAIN_KEY}, so CoreDNS does not "
                "run here as kubeadm and k3s install it: set headcni_node_cluster_dns: false"
            )
        return [Change(CUSTOM, CUSTOM_KEY, custom_map, "")]
    try:
        bare = corefile.without_block(text)
    except ValueError as wrong:
        raise ValueError(f"{namespace}/{MAIN}: {wrong}") from None
    if wish is None:
        return [Change(MAIN, MAIN_KEY, main_map, bare), Change(CUSTOM, CUSTOM_KEY, custom_map, "")]
    servers = {
        f"{CUSTOM}: {key}": value
        for key, value in data(custom_map).items()
        if key.endswith(".server") and key != CUSTOM_KEY
    }
    others = []
    for where, content in {f"{MAIN}: {MAIN_KEY}": bare, **servers}.items():
        try:
            others += corefile.blocks(content)
        except ValueError as wrong:
            raise ValueError(f"{namespace}/{where} cannot be read: {wrong}") from None
    port = corefile.port_of_all(others)
    if found := corefile.conflicts(wish.domain, wish.ranges, port, others):
        raise ValueError(f"{namespace}/{MAIN}: {'; '.join(found)}")
    ours = corefile.block(wish.domain, wish.ranges, [wish.resolver], port)
    is_imported = any(one.endswith("custom/*.server") for one in corefile.imports(text))
    return [
        Change(CUSTOM, CUSTOM_KEY, custom_map, ours if is_imported else ""),
        Change(MAIN, MAIN_KEY, main_map, bare if is_imported else corefile.with_block(text, ours)),
    ]


def data(found: Optional[dict[str, Any]]) -> dict[str, Any]:
    return dict((found or {}).get("data") or {})


def write(kubectl: kubernetes.Kubectl, namespace: str, change: Change, dry: bool) -> None:
    """Only our key, and only if the object is as it was read: the API server refuses the patch if
    its resourceVersion has changed. `kubectl replace` would also rewrite an annotation of others'
    `kubectl apply`."""
    options = ["-n", namespace, *(["--dry-run=server"] if dry else [])]
    content = {**data(change.found), change.key: change.text}
    if not change.text:
        del content[change.key]
    if sum(map(len, content.values())) > corefile.LARGEST:
        raise ValueError(
            f"{namespace}/{change.name}: larger than {corefile.LARGEST} bytes with our block"
        )
    if change.found is None:
        metadata = {"name": change.name, "namespace": namespace, "labels": LABEL}
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": content}
        kubectl.run("create", "-f", "-", *options, given=json.dumps(made))
        return
    labels = change.found["metadata"].get("labels") or {}
    is_ours = LABEL.items() <= labels.items()
    if is_ours and not content and not change.found.get("binaryData"):
        kubectl.run("delete", "configmap", change.name, *options)
        return
    patch = {
        "metadata": {"resourceVersion": change.found["metadata"]["resourceVersion"]},
        "data": {change.key: change.text or None},
    }
    how = ("--type=merge", "--patch-file=/dev/stdin")
    kubectl.run("patch", "configmap", change.name, *how, *options, given=json.dumps(patch))


if __name__ == "__main__":
    main()
