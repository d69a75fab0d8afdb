#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Write the daemon's configuration, once the runtime itself has found it right."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_config
short_description: Write the configuration of the HeadCNI daemon on a node
version_added: 0.1.0
description:
  - Writes C(/etc/headcni/config.yaml) from a dictionary. The release on the node checks the new
    file before it takes the place of the old one, in one step; every mistake is named at once.
  - Finds this node's pod CIDR, as the daemon would, and writes it down in the file, so that the
    daemon, the conflist and the approval at Headscale can never have different ones.
  - A node that has another pod CIDR already keeps it. That is refused, as the pods that run would
    be cut off.
  - Tells which keys changed, and whether a reload of the daemon is enough for that.
author:
  - The HeadCNI authors (@headcni)
options:
  config:
    description:
      - The content of the file, by its own keys. See C(docs/configuration.md).
      - Keys that are null or empty count as not given.
    type: dict
    default: {}
  path:
    description: The file. One that ends in C(.next) is the file to come; the pod CIDR that the node
      has is in the one without that.
    type: path
    default: /etc/headcni/config.yaml
  release:
    description: The release whose code checks the file.
    type: path
    default: /opt/headcni/current
  require_pod_cidr:
    description:
      - Whether to fail if nobody said what this node's pod CIDR is, rather than to warn and take
        a guess by the host's name.
    type: bool
    default: false
  may_change_pod_cidr:
    description: Whether the node may get another pod CIDR than it has. Only
      C(playbooks/change_pod_cidr.yml) does all that this takes.
    type: bool
    default: false
  only_pod_cidr:
    description: Whether to see to the pod CIDR alone, and to write nothing. For a playbook that
      is to stop before its first change, not when it comes to the configuration.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    details: >-
      On a node without a release there is nothing to check the file with yet; I(validated) then
      says so.
  diff_mode:
    support: full
    details: Returns the file before and after, without secrets.
extends_documentation_fragment:
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.headcni_release
  - module: headcni.mesh.headcni_conflist
"""

EXAMPLES = r"""
- name: Configure the daemon
  headcni.mesh.headcni_config:
    config:
      tailscale:
        mode: host
      network:
        podCIDR:
          nodeLocal: 10.244.1.0/24
          base: 10.244.0.0/16
        serviceCIDR: 10.96.0.0/16
"""

RETURN = r"""
changed_keys:
  description: Keys whose value is another now, as paths such as C(logging.level).
  type: list
  elements: str
  returned: success, unless O(only_pod_cidr)
needs_restart:
  description: Whether a daemon that runs must be restarted for that.
  type: bool
  returned: success, unless O(only_pod_cidr)
needs_reload:
  description: Whether a reload of it is enough.
  type: bool
  returned: success, unless O(only_pod_cidr)
pod_cidrs:
  description: This node's pod CIDRs, one, or one of each family.
  type: list
  elements: str
  returned: success
  sample: [10.244.1.0/24]
pod_cidr_source:
  description: Who said so, V(config), V(env), V(file), V(hash) or V(default).
  type: str
  returned: success
pod_cidr_guessed:
  description: Whether it is a guess, which another node may have come to as well.
  type: bool
  returned: success
considered:
  description: Every place that was looked at for the pod CIDR, and what came of it.
  type: list
  elements: dict
  returned: success
cluster_cidrs:
  description: The cluster's CIDRs, as given or as the daemon takes them to be.
  type: list
  elements: str
  returned: success
mode:
  description: V(host) or V(daemon).
  type: str
  returned: success
validated:
  description: Whether the release checked the file. Check mode on a fresh node does without, and
    O(only_pod_cidr).
  type: bool
  returned: success
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import node, node_config
from ansible_collections.headcni.mesh.plugins.module_utils.shared import podcidr

DAEMON = "headcni-daemon.service"
STAGED = ".next"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "config": {"type": "dict", "default": {}},
            "path": {"type": "path", "default": node_config.PATH},
            "release": {"type": "path", "default": node_config.RELEASE},
            "require_pod_cidr": {"type": "bool", "default": False},
            "may_change_pod_cidr": {"type": "bool", "default": False},
            "only_pod_cidr": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    try:
        module.exit_json(**configure(module))
    except node_config.ConfigError as problem:
        module.fail_json(msg=str(problem))
    except podcidr.PodCidrError as problem:
        module.fail_json(msg=f"no pod CIDR for this node: {problem}")
    except OSError as problem:
        path = problem.filename or module.params["path"]
        module.fail_json(msg=f"{path} cannot be written: {problem.strerror}")


def configure(module: AnsibleModule) -> dict:
    given, path = module.params, module.params["path"]
    config = node_config.pruned(given["config"])
    found = node_config.resolved(config, os.environ)
    if found.guessed:
        refuse_or_warn(module, found)
    change = node_config.cidr_change(found.cidrs, in_force(path))
    if change and not given["may_change_pod_cidr"]:
        raise node_config.ConfigError(f"network.podCIDR.nodeLocal: {change}")
    if given["only_pod_cidr"]:
        return {"changed": False, **told(config, found), "validated": False}
    text = node_config.render(node_config.pinned(config, found))
    old = node_config.read(path)
    answer = node_config.Answer((), (), ())
    has_release = os.path.isdir(given["release"])
    if not has_release and not module.check_mode:
        raise node_config.ConfigError(
            f"release: {given['release']} is not there to check the file; install it first"
        )
    if has_release and (old != text or not os.path.exists(path)):
        answer = node_config.ask(text, old, given["release"])
        if answer.problems:
            raise node_config.ConfigError(mistakes(answer.problems))
    restart = bool(answer.restart) or (bool(answer.reload) and owes_a_restart(path))
    changed = node_config.needs_writing(path, text)
    if changed and not module.check_mode:
        node_config.write(path, text)
    return {
        "changed": changed,
        "changed_keys": sorted((*answer.reload, *answer.restart)),
        "needs_restart": restart,
        "needs_reload": bool(answer.reload),
        **told(config, found),
        "validated": has_release,
        "diff": {
            "before_header": path,
            "after_header": path,
            "before": node_config.redacted(old or ""),
            "after": node_config.redacted(text),
        },
    }


def told(config: dict, found: podcidr.Resolution) -> dict:
    return {
        "pod_cidrs": [str(cidr) for cidr in found.cidrs],
        "pod_cidr_source": found.source,
        "pod_cidr_guessed": found.guessed,
        "considered": found.as_dict()["considered"],
        "cluster_cidrs": node_config.cluster_cidrs(config, found.cidrs),
        "mode": (config.get("tailscale") or {}).get("mode", "host"),
    }


def in_force(path: str) -> str:
    """The file that the daemon reads, of one that may be staged to take its place."""
    return path[: -len(STAGED)] if path.endswith(STAGED) else path


def owes_a_restart(path: str) -> bool:
    """Whether the daemon has yet to read the file as it was: of a run that was cut off before it
    was restarted, and what needed that is not known any more once the file is another."""
    if path != node_config.PATH or not node.has_systemd():
        return False
    daemon = node.unit(DAEMON)
    return daemon.is_active and os.stat(path).st_mtime > daemon.changed_at


def refuse_or_warn(module: AnsibleModule, found: podcidr.Resolution) -> None:
    told = f"{podcidr.join(found.cidrs)} is a guess at this node's pod CIDR ({found.source})"
    if module.params["require_pod_cidr"]:
        raise node_config.ConfigError(
            f"network.podCIDR.nodeLocal: not given, and {told}: set headcni_node_pod_cidr"
        )
    module.warn(f"{told}: set headcni_node_pod_cidr to be sure")


def mistakes(problems: tuple[str, ...]) -> str:
    count = "one mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
    return f"{count} in the configuration: " + "; ".join(problems)


if __name__ == "__main__":
    main()
