#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Check whether a machine can be a node, and report every problem at once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_preflight
short_description: Check that a machine can be a HeadCNI node
version_added: 0.1.0
description:
  - Changes nothing. Reports every problem at once, each with what to do.
  - Checks Python, the kernel (TUN, veth, bridge, nftables, policy routing), libnftables,
    forwarding, systemd, ports, the clock, CIDRs, names of interfaces and the conflist; whether
    directories are writable and allow execution; and whether other CNIs are active.
  - Checks that the running container runtimes (containerd, also in k3s and RKE2, and CRI-O) look
    for plugins and networks in the directories that HeadCNI uses.
  - Everything that would keep pods from working is a problem. The rest is a note, such as SELinux,
    cgroup version 1, an unsynchronised clock, and firewalls with what HeadCNI does about them.
  - The controller checks the configuration with the runtime's own code, and that there is a release
    to install.
  - Finds this node's pod CIDR, so that the nodes can be compared before the first change.
  - Returns which parts of the node are up to date, so that a playbook can skip them.
author:
  - The HeadCNI authors (@headcni)
options:
  config:
    description: The daemon's configuration, as for M(headcni.mesh.headcni_config).
    type: dict
    default: {}
  src:
    description: The tarball of the release, as for M(headcni.mesh.headcni_release).
    type: path
  wheels:
    description: The wheels on the controller, as for M(headcni.mesh.headcni_release).
    type: path
  version:
    description: The version of the release, as for M(headcni.mesh.headcni_release).
    type: str
  checksum:
    description: The SHA-256 of its tarball. The controller fills it in.
    type: str
  plugin_dirs:
    description: Where to look for a loopback plugin, as for M(headcni.mesh.headcni_release).
    type: list
    elements: path
    default:
      - /usr/lib/cni
      - /usr/libexec/cni
      - /var/lib/rancher/k3s/data/cni
      - /var/lib/rancher/k3s/data/current/bin
  keep:
    description: How many releases to keep, as for M(headcni.mesh.headcni_release).
    type: int
    default: 3
  native_shim:
    description: Whether to use the native shim, as for M(headcni.mesh.headcni_release).
    type: bool
    default: true
    version_added: 0.2.0
  conflist:
    description: The options of M(headcni.mesh.headcni_conflist), without the pod and cluster CIDRs.
      By default the conflist is not checked.
    type: dict
  require_pod_cidr:
    description: Whether a guessed pod CIDR is a problem.
    type: bool
    default: false
  awaits_pod_cidr:
    description: Whether Kubernetes has yet to assign the pod CIDR. Then the module does not return
      a guess.
    type: bool
    default: false
  may_change_pod_cidr:
    description: Whether the node may already have another pod CIDR.
    type: bool
    default: false
  enable_ipv6:
    description: Whether pods must have IPv6 or must not have it. By default both are accepted.
    type: bool
  datapath:
    description: V(bridge) or V(routed).
    type: str
    choices: [bridge, routed]
    default: bridge
  bridge:
    description: The bridge's name.
    type: str
    default: headcni0
  cni_bin_dirs:
    description: The directories in which the container runtime looks for CNI plugins.
    type: list
    elements: path
    default: [/opt/cni/bin]
  cni_conf_dir:
    description: The directory in which the container runtime looks for conflists.
    type: path
    default: /etc/cni/net.d
  bin_dir:
    description: The directory of the link to C(headcnictl).
    type: path
    default: /usr/local/bin
  ignore_routes:
    description: Routes of the host that pods may overlap, as CIDRs.
    type: list
    elements: str
    default: []
  min_free_mib:
    description: The free space that releases require, in MiB.
    type: int
    default: 128
  max_clock_skew:
    description: How many seconds the node's clock may differ from the controller's.
    type: int
    default: 60
  now:
    description: The controller's time, in seconds since 1970. The controller fills it in.
    type: float
  report_only:
    description: Whether to return the problems instead of failing.
    type: bool
    default: false
attributes:
  platform:
    details: On other platforms it fails with a clear message.
    support: full
    platforms: linux
extends_documentation_fragment:
  - headcni.mesh.node
  - headcni.mesh.node.read_only
seealso:
  - module: headcni.mesh.headcni_config
  - module: headcni.mesh.headcni_release
"""

EXAMPLES = r"""
- name: Check whether these machines can be nodes
  headcni.mesh.headcni_preflight:
    config:
      network:
        podCIDR:
          base: 10.244.0.0/16
"""

RETURN = r"""
problems:
  description: Everything that prevents the installation, each with what to do.
  type: list
  elements: str
  returned: always
notes:
  description: Warnings. None of them keeps pods from working. C(site.yml) shows them at the end.
  type: list
  elements: str
  returned: always
pod_cidrs:
  description: This node's pod CIDRs. Empty if they cannot be found.
  type: list
  elements: str
  returned: always
pod_cidr_source:
  description: Where they come from, V(config), V(env), V(file), V(hash) or V(default).
  type: str
  returned: always
pod_cidr_guessed:
  description: Whether they are a guess.
  type: bool
  returned: always
cluster_cidrs:
  description: The cluster's CIDRs, as given or as the daemon derives them.
  type: list
  elements: str
  returned: always
networks:
  description: The networks in the node's main routing table, except HeadCNI's and Tailscale's.
  type: list
  elements: dict
  returned: always
  sample:
    - {network: 192.168.7.0/24, interface: eth0}
controller:
  description: The address from which the controller has logged in. Empty if it did not use SSH or
    came through the tailnet.
  type: str
  returned: always
mode:
  description: The wanted mode, V(host) or V(daemon).
  type: str
  returned: always
current:
  description: The release in use, with name, version and digest. None on a fresh node.
  type: dict
  returned: always
up_to_date:
  description: The parts V(release), V(config) and V(conflist) that are already as wanted. Their own
    modules would change nothing and warn about nothing.
  type: list
  elements: str
  returned: always
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import (
    kernel,
    node,
    node_config,
    node_platform,
    node_release,
    node_up_to_date,
    other_networks,
    preflight_cni,
    preflight_firewall,
    preflight_install,
    preflight_machine,
    preflight_network,
    ssh_client,
)
from ansible_collections.headcni.mesh.plugins.module_utils.shared import conflist

MOST_NETWORKS = 256  # in the result; a router has thousands


def main() -> None:
    paths = {"type": "list", "elements": "path"}
    module = AnsibleModule(
        argument_spec={
            "config": {"type": "dict", "default": {}},
            "src": {"type": "path"},
            "wheels": {"type": "path"},
            "version": {"type": "str"},
            "checksum": {"type": "str"},
            "plugin_dirs": {**paths, "default": list(node_release.PLUGIN_DIRS)},
            "keep": {"type": "int", "default": 3},
            "native_shim": {"type": "bool", "default": True},
            "conflist": {"type": "dict"},
            "require_pod_cidr": {"type": "bool", "default": False},
            "awaits_pod_cidr": {"type": "bool", "default": False},
            "may_change_pod_cidr": {"type": "bool", "default": False},
            "enable_ipv6": {"type": "bool"},
            "datapath": {"choices": ["bridge", "routed"], "default": "bridge"},
            "bridge": {"default": "headcni0"},
            "cni_bin_dirs": {**paths, "default": ["/opt/cni/bin"]},
            "cni_conf_dir": {"type": "path", "default": conflist.DIRECTORY},
            "bin_dir": {"type": "path", "default": "/usr/local/bin"},
            "ignore_routes": {"type": "list", "elements": "str", "default": []},
            "min_free_mib": {"type": "int", "default": 128},
            "max_clock_skew": {"type": "int", "default": 60},
            "now": {"type": "float"},
            "report_only": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    arrived = time.time()
    node.refuse_other_platforms(module)
    given = module.params
    config = node_config.pruned(given["config"])
    found, wrong = preflight_network.pod_cidrs(config, given)
    own = found.cidrs if found else ()
    interpreter, lacking = preflight_machine.python()
    elsewhere, runtime_notes = preflight_cni.runtimes(given)
    problems = [
        *wrong,
        *preflight_machine.clock(given, arrived),
        *preflight_machine.root(),
        *lacking,
        *node_platform.lacks_library(),
        *node_platform.lacks_programs(preflight_install.mode_of(config)),
        *preflight_machine.kernel_features(given),
        *preflight_machine.policies(given),
        *preflight_machine.forwarding(own),
        *preflight_install.mode(config),
        *preflight_machine.services(config),
        *preflight_install.places(given),
        *preflight_install.release(given),
        *preflight_network.names(config, given),
        *(of_ranges(config, own, given) if own else []),
        *elsewhere,
        *preflight_cni.other_cnis(given),
    ]
    told = None if given["awaits_pod_cidr"] else found
    current = node_release.current()
    result = {
        "changed": False,
        "problems": problems,
        "notes": [*runtime_notes, *notes(config, own, given), *preflight_firewall.notes(config)],
        "pod_cidrs": [str(cidr) for cidr in told.cidrs] if told else [],
        "pod_cidr_source": told.source if told else "",
        "pod_cidr_guessed": bool(told and told.guessed),
        "cluster_cidrs": node_config.cluster_cidrs(config, told.cidrs) if told else [],
        "networks": [
            {"network": str(route.network), "interface": route.interface}
            for route in preflight_network.own_routes(given)[:MOST_NETWORKS]
        ],
        "controller": ssh_client.controller_address(),
        "mode": preflight_install.mode_of(config),
        "current": current.as_dict() if current else None,
        "up_to_date": []
        if problems or not told
        else preflight_install.up_to_date(config, told, given, interpreter),
    }
    if problems and not given["report_only"]:
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        module.fail_json(msg=f"{count} on this node: " + "; ".join(problems), **result)
    module.exit_json(**result)


def of_ranges(config: dict, own, given: dict) -> list[str]:
    """Problems with these pod CIDRs on this node."""
    return [
        *preflight_network.former_cidrs(own, given),
        *preflight_network.overlaps(config, own, given),
        *preflight_cni.conflists(config, own, given),
        *preflight_firewall.problems(config, own),
    ]


def notes(config: dict, own, given: dict) -> list[str]:
    """What does not stop the installation, but explains what a user may see."""
    return [
        *other_networks.interface_notes(kernel.interfaces()),
        *(
            preflight_cni.conflists(config, own, given, node_up_to_date.conflist_notes)
            if own
            else []
        ),
        *node_platform.selinux_notes(),
        *node_platform.cgroup_notes(),
        *node_platform.clock_notes(node_platform.clock_status()),
        *node_platform.program_notes(),
    ]


if __name__ == "__main__":
    main()
