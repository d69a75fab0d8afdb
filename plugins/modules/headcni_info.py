#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""The state of HeadCNI on a node: installed, configured, running, ready."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_info
short_description: Read the state of HeadCNI on a node
version_added: 0.1.0
description:
  - Changes nothing. A node without HeadCNI is not a failure; the result says so.
author:
  - The HeadCNI authors (@headcni)
options:
  cni_conf_dir:
    description: The directory in which the container runtime looks for conflists.
    type: path
    default: /etc/cni/net.d
extends_documentation_fragment:
  - headcni.mesh.node
  - headcni.mesh.node.read_only
seealso:
  - module: headcni.mesh.headcni_release
  - module: headcni.mesh.headcni_config
"""

EXAMPLES = r"""
- name: Read the state of HeadCNI
  headcni.mesh.headcni_info:
  register: node_state

- name: Check that the installed version runs
  ansible.builtin.assert:
    that: node_state.running_version == node_state.current.version
"""

RETURN = r"""
current:
  description: The release in use. None if HeadCNI is not installed.
  type: dict
  returned: success
installed:
  description: Every release on the node.
  type: list
  elements: dict
  returned: success
running_version:
  description: The version of the running daemon. Empty if none runs, or it does not answer.
  type: str
  returned: success
mode:
  description: V(host) or V(daemon). Empty if there is no configuration.
  type: str
  returned: success
pod_cidrs:
  description: This node's pod CIDRs.
  type: list
  elements: str
  returned: success
pod_cidr_source:
  description: Where they come from.
  type: str
  returned: success
conflist:
  description: The conflist in use, whether it is HeadCNI's, and the conflists that were renamed.
  type: dict
  returned: success
units:
  description: The state of each service.
  type: dict
  returned: success
  sample: {headcni-daemon: {active: active, enabled: enabled}}
ready:
  description: Whether the daemon reports that it is ready.
  type: bool
  returned: success
conditions:
  description: The conditions that the daemon reports.
  type: list
  elements: dict
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import (
    monitor,
    node,
    node_config,
    node_release,
)
from ansible_collections.headcni.mesh.plugins.module_utils.shared import conflist

UNITS = ("headcni-daemon", "headcni-tailscaled")


def main() -> None:
    module = AnsibleModule(
        argument_spec={"cni_conf_dir": {"type": "path", "default": conflist.DIRECTORY}},
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    try:
        module.exit_json(changed=False, **state(module.params["cni_conf_dir"]))
    except (node_config.ConfigError, node.NodeError) as problem:
        module.fail_json(msg=str(problem))
    except OSError as problem:
        module.fail_json(msg=f"{problem.filename}: {problem.strerror}")


def state(cni_conf_dir: str) -> dict:
    releases = node_release.report()
    text = node_config.read()
    config = node_config.effective(text) if text is not None and releases["current"] else {}
    monitoring = config.get("monitoring", {})
    answer = monitor.Readiness(False, [], [])
    running = ""
    if monitoring.get("enabled"):
        where = monitoring["address"], monitoring["port"]
        answer = monitor.ready(*where)
        running = monitor.version(*where, monitoring["path"])
    return {
        **releases,
        "running_version": running,
        "mode": config.get("tailscale", {}).get("mode", ""),
        "pod_cidrs": config.get("network", {}).get("podCIDR", {}).get("nodeLocal", []),
        "pod_cidr_source": node_config.source_of(text) if config and text else "",
        "conflist": conflist_in_use(cni_conf_dir),
        "units": units(),
        "ready": answer.ready,
        "conditions": answer.conditions,
    }


def conflist_in_use(directory: str) -> dict:
    seen = conflist.survey(directory)
    picked = seen.picked()
    aside = [name for name in seen.files if name.endswith(conflist.SUFFIX)]
    ours = picked == conflist.NAME
    return {"directory": directory, "in_charge": picked, "ours": ours, "disabled": sorted(aside)}


def units() -> dict:
    if not node.has_systemd():
        return {}
    found = {name: node.unit(f"{name}.service") for name in UNITS}
    return {
        name: {"active": unit.active, "enabled": unit.enabled or "not-found"}
        for name, unit in found.items()
    }


if __name__ == "__main__":
    main()
