#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Write the daemon's configuration after the runtime itself has checked it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_config
short_description: Write the configuration of the HeadCNI daemon on a node
version_added: 0.1.0
description:
  - Writes C(/etc/headcni/config.yaml) from a dictionary. The release on the node checks the new
    file before it replaces the old one atomically, and reports every mistake at once.
  - Finds this node's pod CIDR, as the daemon would, and writes it to the file. So the daemon, the
    conflist and the approval in Headscale always use the same one.
  - Refuses to change the pod CIDR of a node, because its running pods would be cut off.
  - Returns which keys changed, and whether a reload of the daemon is enough.
author:
  - The HeadCNI authors (@headcni)
options:
  config:
    description:
      - The content of the file, with the daemon's own keys. See C(docs/configuration.md).
      - Keys that are null or empty count as not given.
    type: dict
    default: {}
  path:
    description: The file. If it ends in C(.next), it is the configuration of a mode to switch to,
      and the node's current pod CIDR is in the file without this ending.
    type: path
    default: /etc/headcni/config.yaml
  release:
    description: The release whose code checks the file.
    type: path
    default: /opt/headcni/current
  require_pod_cidr:
    description:
      - Whether to fail if nothing specifies this node's pod CIDR. By default the module warns and
        derives one from the host name.
    type: bool
    default: false
  may_change_pod_cidr:
    description: Whether the node may get another pod CIDR. Only C(playbooks/change_pod_cidr.yml)
      does everything else that such a change needs.
    type: bool
    default: false
  only_pod_cidr:
    description: Whether to check only the pod CIDR and write nothing. With this a playbook can stop
      before its first change instead of when it writes the configuration.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    details: >-
      On a node without a release nothing can check the file yet. Then I(validated) is false.
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
  description: Keys whose value has changed, as paths such as C(logging.level).
  type: list
  elements: str
  returned: success, unless O(only_pod_cidr)
needs_restart:
  description: Whether a running daemon must be restarted to apply the change.
  type: bool
  returned: success, unless O(only_pod_cidr)
needs_reload:
  description: Whether the daemon must be reloaded to apply the change.
  type: bool
  returned: success, unless O(only_pod_cidr)
pod_cidrs:
  description: This node's pod CIDRs, one per address family.
  type: list
  elements: str
  returned: success
  sample: [10.244.1.0/24]
pod_cidr_source:
  description: Where they come from, V(config), V(env), V(file), V(hash) or V(default).
  type: str
  returned: success
pod_cidr_guessed:
  description: Whether they are a guess, which another node may have made as well.
  type: bool
  returned: success
considered:
  description: Every place in which the pod CIDR was searched, with the result.
  type: list
  elements: dict
  returned: success
cluster_cidrs:
  description: The cluster's CIDRs, as given or as the daemon derives them.
  type: list
  elements: str
  returned: success
mode:
  description: V(host) or V(daemon).
  type: str
  returned: success
validated:
  description: Whether the release has checked the file. False in check mode on a fresh node, and
    with O(only_pod_cidr).
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
    restart = bool(answer.restart) or (bool(answer.reload) and missed_a_restart(path))
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
    """The file that the daemon reads; `path` may be the staged file that will replace it."""
    return path[: -len(STAGED)] if path.endswith(STAGED) else path


def missed_a_restart(path: str) -> bool:
    """Whether the daemon has not read the current file yet, because a run was interrupted before
    the restart. Once the file is replaced, nobody knows which change needed the restart."""
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
