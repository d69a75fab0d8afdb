#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Write HeadCNI's conflist on a node, or restore the conflists that it replaced."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_conflist
short_description: Write the CNI conflist of HeadCNI on a node
version_added: 0.1.0
description:
  - Writes C(10-headcni.conflist) so that the container runtime uses it. Other conflists are
    renamed, and restored when ours is removed.
  - The directory always contains a usable network. The next run finishes an interrupted one.
author:
  - The HeadCNI authors (@headcni)
options:
  state:
    description: V(absent) restores the previous conflists and then removes ours.
    type: str
    choices: [present, absent]
    default: present
  directory:
    description: The directory in which the container runtime looks for conflists.
    type: path
    default: /etc/cni/net.d
  file:
    description: The name of the file.
    type: str
    default: 10-headcni.conflist
  pod_cidrs:
    description: This node's pod CIDRs, one per address family. Required for V(present).
    type: list
    elements: str
  cluster_cidrs:
    description: The cluster's CIDRs. Traffic between them is never masqueraded.
    type: list
    elements: str
  service_cidrs:
    description: The address ranges of services, which pods must not use.
    type: list
    elements: str
  name:
    description: The network's name.
    type: str
    default: headcni
  plugin:
    description: V(bridge) writes a conflist for the Go bridge plugin, which runs without HeadCNI.
    type: str
    choices: [headcni, bridge]
    default: headcni
  cni_version:
    description: The CNI version of the network.
    type: str
    choices: ["0.3.1", "0.4.0", "1.0.0", "1.1.0"]
    default: "1.0.0"
  mode:
    description: The mode of the daemon, V(host) or V(daemon).
    type: str
    choices: [host, daemon]
    default: host
  datapath:
    description: V(bridge) connects pods to a bridge. V(routed) installs a route to each pod.
    type: str
    choices: [bridge, routed]
    default: bridge
  bridge:
    description: The bridge's name.
    type: str
    default: headcni0
  mtu:
    description: The MTU of pods' interfaces.
    type: int
    default: 1280
  ip_masq:
    description: Whether to masquerade traffic that leaves the cluster.
    type: bool
    default: true
  hairpin:
    description: Whether a pod can reach itself through its service.
    type: bool
    default: true
  anti_spoofing:
    description: Whether to drop packets that a pod sends with a MAC or IP that is not its own.
    type: bool
    default: true
  anti_spoofing_exempt:
    description:
      - Pods that may send from other addresses, such as routers, as patterns of
        C(namespace/name), for example V(metallb-system/speaker-*).
    type: list
    elements: str
  reserved_ports:
    description:
      - Host ports that no pod may use, each a port or a range, with or without a protocol, for
        example V(22), V(10250/tcp) or V(30000-32767).
      - By default V(10250/tcp) and V(41641-41642/udp).
    type: list
    elements: str
  host_ports_over_listeners:
    description: Whether a pod may use a host port on which a program of the node listens.
    type: bool
    default: false
  ip_annotation_namespaces:
    description:
      - Namespaces whose pods may request an address with the annotation C(headcni.dev/ip), as
        patterns. V(*) means all namespaces.
    type: list
    elements: str
  network_policy:
    description:
      - Whether the plugin enforces network policies. Must agree with C(network.enableNetworkPolicy)
        of the daemon's configuration.
    type: bool
    default: false
  ipam:
    description: The plugin that assigns addresses.
    type: str
    choices: [headcni-ipam, host-local]
    default: headcni-ipam
  strategy:
    description: Which free address a pod gets.
    type: str
    choices: [sequential, random, dense-pack]
  headscale_url:
    description: The control server. With it, the plugin's STATUS requires the mesh interface.
    type: str
  tailscale_socket:
    description: The socket of tailscaled.
    type: path
  magic_dns:
    description: >-
      The tailnet's resolver, with the keys C(enable), C(base_domain), C(nameservers) and
      C(search_domains).
    type: dict
  capabilities:
    description: The capabilities that the plugin requests from the container runtime.
    type: list
    elements: str
  chained:
    description: More plugins, which run after ours.
    type: list
    elements: dict
  extra:
    description: More keys of our own plugin's section.
    type: dict
  keep:
    description: Patterns of file names that are not renamed, for networks of other engines.
    type: list
    elements: str
    default: ["*podman*", "nerdctl-*"]
  release:
    description: The release whose C(headcnictl) checks the file before it is written.
    type: path
    default: /opt/headcni/current
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
    details: Shows the file before and after, and the files that are renamed.
extends_documentation_fragment:
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.headcni_config
"""

EXAMPLES = r"""
- name: Let pods use HeadCNI
  headcni.mesh.headcni_conflist:
    pod_cidrs: [10.244.1.0/24]
    cluster_cidrs: [10.244.0.0/16]

- name: Restore the previous conflists
  headcni.mesh.headcni_conflist:
    state: absent
"""

RETURN = r"""
path:
  description: The file.
  type: str
  returned: success
in_charge:
  description: The file that the container runtime uses afterwards.
  type: str
  returned: success
disabled:
  description: Files that were renamed.
  type: list
  elements: str
  returned: success
put_back:
  description: Files that were restored. With their directory, if it was configured earlier.
  type: list
  elements: str
  returned: success
removed:
  description: Our files that were removed. With their directory, if it was configured earlier.
  type: list
  elements: str
  returned: success
left:
  description: Files that unexpectedly stay as they are, each with the reason.
  type: list
  elements: str
  returned: success
"""

import json
import os
import subprocess
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import (
    conflist_places,
    node,
    node_up_to_date,
)
from ansible_collections.headcni.mesh.plugins.module_utils.shared import conflist


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **node_up_to_date.CONFLIST,
            **node_up_to_date.CONFLIST_PLACE,
            "state": {"choices": ["present", "absent"], "default": "present"},
            "release": {"type": "path", "default": "/opt/headcni/current"},
        },
        required_if=[("state", "present", ("pod_cidrs",))],
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    try:
        module.exit_json(**(present if module.params["state"] == "present" else absent)(module))
    except conflist.ConflistError as problem:
        module.fail_json(msg=str(problem))
    except OSError as problem:
        path = problem.filename or module.params["directory"]
        module.fail_json(msg=f"{path}: {problem.strerror}")


def present(module: AnsibleModule) -> dict:
    given = module.params
    conf = conflist.build(
        conflist.Options.of({key: given[key] for key in node_up_to_date.CONFLIST})
    )
    where = {"name": given["file"], "keep": given["keep"]}
    plan = conflist.plan(conflist.survey(given["directory"]), conf, **where)
    if plan.writes:
        check(conf, given["release"])
    if not module.check_mode:
        conflist_places.record(given["directory"], root_of(given["release"]))
        plan = conflist.write(conf, given["directory"], **where)
    for sentence in plan.left:
        module.warn(sentence)
    return report([plan, *left_elsewhere(module)], module, plan.name)


def absent(module: AnsibleModule) -> dict:
    plan = restored(module, module.params["directory"])
    plans = [plan, *left_elsewhere(module)]
    return report(plans, module, next(iter(sorted(plan.put_back)), ""))


def restored(module: AnsibleModule, directory: str) -> conflist.Plan:
    name = module.params["file"]
    if module.check_mode:
        return conflist.plan_restore(conflist.survey(directory), name)
    return conflist.restore(directory, name)


def left_elsewhere(module: AnsibleModule) -> list[conflist.Plan]:
    """What is restored in directories that were configured earlier."""
    root = root_of(module.params["release"])
    return [
        restored(module, place)
        for place in conflist_places.former(module.params["directory"], root)
    ]


def root_of(release: str) -> str:
    return os.path.dirname(release)


def check(conf: dict, release: str) -> None:
    """Let the plugin check it, if it is installed: it knows its options best."""
    command = os.path.join(release, "bin", "headcnictl")
    if not os.path.exists(command):
        return
    with tempfile.NamedTemporaryFile("w", suffix=".conflist") as file:
        file.write(conflist.render(conf))
        file.flush()
        asked = [command, "validate", file.name, "--json"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 1:
        raise conflist.ConflistError(f"the plugin refuses the conflist: {complaints(done.stdout)}")


def complaints(said: str) -> str:
    try:
        problems = json.loads(said)["problems"]
        return "; ".join(f"{p['path']}: {p['value']}, expected {p['expected']}" for p in problems)
    except (ValueError, KeyError, TypeError):
        return " ".join(said.split())[:500]


def report(plans: list[conflist.Plan], module: AnsibleModule, in_charge: str) -> dict:
    here, *elsewhere = plans
    if not module.check_mode:
        in_charge = conflist.survey(here.directory).picked()
    found = {
        "disabled": list(here.back_up),
        "put_back": list(here.put_back),
        "removed": list(here.remove),
        "left": list(here.left),
    }
    for plan in elsewhere:
        found["put_back"] += [os.path.join(plan.directory, name) for name in plan.put_back]
        found["removed"] += [os.path.join(plan.directory, name) for name in plan.remove]
        found["left"] += [f"{plan.directory}: {sentence}" for sentence in plan.left]
    return {
        "changed": any(plan.changed for plan in plans),
        "path": here.path,
        "in_charge": in_charge,
        **found,
        "diff": [part for plan in plans for part in plan.diff()],
    }


if __name__ == "__main__":
    main()
