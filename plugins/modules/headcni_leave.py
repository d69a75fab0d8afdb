#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Remove HeadCNI from a node step by step, and restore the node's previous state."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_leave
short_description: Remove HeadCNI from a node, and restore its previous state
version_added: 0.1.0
description:
  - The steps of C(playbooks/uninstall.yml) that no other module does. The node's previous state was
    recorded by M(headcni.mesh.headcni_release) when it first installed a release.
  - Each step can be repeated.
author:
  - The HeadCNI authors (@headcni)
options:
  state:
    description:
      - V(asked) changes nothing, and returns which pods use the network and the previous state.
      - V(idle) removes the pods' bridge if it has an address that no longer belongs to the node's
        pod CIDRs, and no pod uses it. The next pod creates a new one.
      - V(left) stops the daemon, withdraws the node's routes from the mesh, releases addresses and
        host ports of pods, and restores tailscaled's prefs. Restore the conflists first.
      - V(gone) restores the sysctls and removes the remaining files. Remove the release first.
    type: str
    choices: [asked, idle, left, gone]
    default: asked
  with_pods:
    description: Whether to proceed even though pods use the network. They lose connectivity.
    type: bool
    default: false
  network:
    description: The name of the network in the conflist.
    type: str
    default: headcni
  bridge:
    description: The pods' bridge.
    type: str
    default: headcni0
  data_dir:
    description: The directory of the allocation store.
    type: path
    default: /var/lib/cni/headcni
  tailscale_removed:
    description:
      - With V(gone), whether Tailscale has been removed as well. Then the module also removes what
        tailscaled leaves behind, namely its state and cache, its sysctl and empty iptables tables.
    type: bool
    default: false
  keep_sysctls:
    description: With V(gone), whether to keep forwarding and other sysctls as they are.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
    details: Shows what is removed.
extends_documentation_fragment:
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.headcni_release
  - module: headcni.mesh.headcni_conflist
"""

EXAMPLES = r"""
- name: Read which pods use the network
  headcni.mesh.headcni_leave:
  register: node_use

- name: Leave the mesh
  headcni.mesh.headcni_leave:
    state: left
"""

RETURN = r"""
pods:
  description: The pods that use the network.
  type: list
  elements: str
  returned: state is asked
installed:
  description: Whether a release is installed.
  type: bool
  returned: state is asked
mode:
  description: V(host), V(daemon), or empty if there is no configuration.
  type: str
  returned: state is asked
pod_cidrs:
  description: The node's pod CIDRs.
  type: list
  elements: str
  returned: state is asked
tailscale_ours:
  description: Whether the node's tailscaled was installed, and first joined, for HeadCNI.
  type: bool
  returned: state is asked
known_before:
  description: Whether the node's previous state is known.
  type: bool
  returned: state is asked
done:
  description: What was done or would be done, in words.
  type: list
  elements: str
  returned: always
"""

import ipaddress
import json
import os
import shutil
import subprocess

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import (
    mode_switch,
    nft_leftovers,
    node,
    node_baseline,
    node_config,
    node_release,
)
from ansible_collections.headcni.mesh.plugins.module_utils.shared import modes
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import (
    LocalAPI,
    LocalAPIError,
)
from ansible_collections.headcni.mesh.plugins.module_utils.tailnet import same_server
from ansible_collections.headcni.mesh.plugins.module_utils.tailscale_release import UNIT, is_ours

DAEMON = mode_switch.DAEMON
TAILSCALED = "headcni-tailscaled.service"
FILES = (
    "/etc/headcni",
    "/etc/default/headcni-tailscaled",
    "/run/headcni",
    mode_switch.LOCK,
)
STATE = "/var/lib/headcni"
TAILSCALES = ("/var/lib/tailscale", "/var/cache/tailscale", "/run/tailscale")
IPTABLES = ("filter", "nat", "mangle", "raw", "security")
SOURCE_MARK = "net/ipv4/conf/all/src_valid_mark"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["asked", "idle", "left", "gone"], "default": "asked"},
            "with_pods": {"type": "bool", "default": False},
            "network": {"default": "headcni"},
            "bridge": {"default": "headcni0"},
            "data_dir": {"type": "path", "default": "/var/lib/cni/headcni"},
            "tailscale_removed": {"type": "bool", "default": False},
            "keep_sysctls": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    work = {"asked": asked, "idle": idle, "left": left, "gone": gone}[module.params["state"]]
    try:
        module.exit_json(**work(module))
    except (mode_switch.SwitchError, node_config.ConfigError, node.NodeError) as problem:
        module.fail_json(msg=str(problem))
    except LocalAPIError as problem:
        module.fail_json(msg=f"tailscaled's prefs were not restored: {problem}")
    except OSError as problem:
        module.fail_json(msg=f"{problem.filename or 'the node'}: {problem.strerror or problem}")


def asked(module: AnsibleModule) -> dict:
    del module
    before = node_baseline.recall()
    text = node_config.read()
    release = node_release.current()
    config = node_config.effective(text) if text is not None and release else {}
    return {
        "changed": False,
        "pods": pods() if release else [],
        "installed": release is not None,
        "mode": config.get("tailscale", {}).get("mode", ""),
        "pod_cidrs": config.get("network", {}).get("podCIDR", {}).get("nodeLocal", []),
        "tailscale_ours": tailscale_is_ours(before),
        "known_before": bool(before),
        "done": [],
    }


def idle(module: AnsibleModule) -> dict:
    bridge = module.params["bridge"]
    done = []
    if is_bridge(bridge) and has_former_address(bridge) and not pods():
        done.append(f"link {bridge} removed")
        if not module.check_mode:
            must("ip", "link", "del", bridge)
    return {"changed": bool(done), "done": done, "diff": shown(done)}


def has_former_address(bridge: str) -> bool:
    cidrs = [
        ipaddress.ip_network(cidr)
        for cidr in mode_switch.configuration()["network"]["podCIDR"]["nodeLocal"]
    ]
    shown = run("ip", "-j", "address", "show", "dev", bridge, "scope", "global")
    addresses = [
        ipaddress.ip_address(address["local"])
        for link in json.loads(shown.stdout or "[]")
        for address in link.get("addr_info", [])
        if address  # addresses of other scopes are listed as empty objects
    ]
    return any(all(address not in cidr for cidr in cidrs) for address in addresses)


def is_bridge(name: str) -> bool:
    return os.path.isdir(f"/sys/class/net/{name}/bridge")


def tailscale_is_ours(before: dict) -> bool:
    """Also if an interrupted run has already removed its unit."""
    tailscale = before.get("tailscale") or {}
    has_unit = is_ours(node_config.read(UNIT) or "")
    return tailscale.get("joined") is False and (has_unit or bool(tailscale.get("ours")))


def pods() -> list[str]:
    said = ctl("pods", "--json")
    found = json.loads(said)
    return sorted({pod_name(attachment) or attachment["container_id"][:20] for attachment in found})


def pod_name(attachment: dict) -> str:
    return "/".join(part for part in (attachment["namespace"], attachment["pod"]) if part)


def ctl(*words: str) -> str:
    done = run(mode_switch.COMMAND, *words)
    if done.returncode != 0:
        said = " ".join(f"{done.stderr} {done.stdout}".split())
        raise node.NodeError(f"headcnictl {' '.join(words)}: {said[-600:]}")
    return done.stdout


def run(*argv: str, stdin: str = "", env: dict | None = None) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(
            argv, input=stdin, env=env, capture_output=True, text=True, timeout=180, check=False
        )
    except subprocess.TimeoutExpired:
        raise node.NodeError(f"{' '.join(argv)} did not end in 180 s") from None


def must(*argv: str) -> None:
    done = run(*argv)
    if done.returncode != 0:
        raise node.NodeError(f"{' '.join(argv)}: {done.stderr.strip()[-300:]}")


def stop(name: str, dry: bool) -> list[str]:
    unit = node.unit(name)
    if unit.active in ("inactive", "failed", "") and unit.enabled != "enabled":
        return []
    if not dry:
        node.order("disable", "--now", name)
    return [f"{name} stopped"]


def left(module: AnsibleModule) -> dict:
    given, dry = module.params, module.check_mode
    done: list[str] = []
    if node_release.current() is None:
        return {"changed": False, "done": done}
    users = pods()
    if users and not given["with_pods"]:
        raise node.NodeError(
            f"{len(users)} pods use this network ({', '.join(users[:8])}): drain the node first, "
            "or set with_pods, and they lose connectivity"
        )
    before = node_baseline.recall()
    done += stop(DAEMON, dry)
    if dry:
        done.append("the mesh would be left")
        return {"changed": True, "done": done, "diff": shown(done)}
    if tailscale_is_ours(before):
        node_baseline.note_tailscale_is_ours()
    cidrs = []
    if os.path.exists(node_config.PATH):
        config = mode_switch.configuration()
        mode, cidrs = mode_switch.mode_of(config), config["network"]["podCIDR"]["nodeLocal"]
        with mode_switch.alone() as handle:  # what an interrupted switch of modes has left
            mode_switch.drop(handle, modes.other(mode), node_baseline.own_socket(before))
        done += ctl("leave", *(["--keep-pods"] if users else [])).splitlines()
    done += stop(TAILSCALED, dry)
    done += free_pods(given["network"], cidrs)
    done += kernel_leftovers(given["bridge"])
    done += restore_prefs(before)
    return {"changed": bool(done), "done": done, "diff": shown(done)}


def free_pods(network: str, cidrs: list[str]) -> list[str]:
    """Let the plugin release everything: no attachment is valid any more."""
    if not cidrs:
        return []
    conf = {
        "cniVersion": "1.1.0",
        "name": network,
        "type": "headcni",
        "pod_cidr": cidrs,
        "enable_ipv6": any(":" in cidr for cidr in cidrs),
        "cni.dev/valid-attachments": [],
    }
    plugin = os.path.join(node_config.RELEASE, "bin", "headcni")
    env = {"PATH": os.environ.get("PATH", ""), "CNI_COMMAND": "GC", "CNI_PATH": "/opt/cni/bin"}
    done = run(plugin, stdin=json.dumps(conf), env=env)
    if done.returncode != 0:
        said = " ".join(done.stdout.split())[-300:]
        return [f"not everything that pods used could be released: {said}"]
    return []


def kernel_leftovers(bridge: str) -> list[str]:
    done = []
    if is_bridge(bridge):
        must("ip", "link", "del", bridge)
        done.append(f"link {bridge} removed")
    for family, name, _unused in nft_leftovers.tables():
        if name == "headcni" or name.startswith(("headcni_", "headcni-")):
            must("nft", "delete", "table", family, name)
            done.append(f"nft table {family} {name} removed")
    return done


def restore_prefs(before: dict) -> list[str]:
    """Restore the prefs that the join has changed, if the node's tailscaled was joined before, and
    is still joined to the same server."""
    was = (before.get("tailscale") or {}).get("prefs")
    if not was:
        return []
    api = LocalAPI(node_baseline.own_socket(before))
    try:
        now = api.prefs()
    except LocalAPIError:
        return ["the node's tailscaled does not run: its prefs were not changed"]
    if not same_server(str(was.get("ControlURL") or ""), str(now.get("ControlURL") or "")):
        return [f"the node's tailscaled was joined to {was.get('ControlURL')}, and is not now"]
    edits = node_baseline.prefs_to_turn_back(before, now)
    if edits:
        api.edit_prefs(edits)
    return [f"pref {name} is {value} again" for name, value in edits.items()]


def gone(module: AnsibleModule) -> dict:
    given, dry = module.params, module.check_mode
    if node_release.current() is not None and not dry:
        raise node.NodeError("a release is still installed: remove it first, with headcni_release")
    before = node_baseline.recall()
    done = []
    if not given["keep_sysctls"]:
        done += sysctls(before, given["tailscale_removed"], dry)
    if given["tailscale_removed"]:
        for family, name, used in nft_leftovers.tables():
            if name in IPTABLES and not used:
                done.append(f"empty nft table {family} {name} removed")
                if not dry:
                    must("nft", "delete", "table", family, name)
    removed = [*FILES, given["data_dir"], *(TAILSCALES if given["tailscale_removed"] else ())]
    for path in [*removed, STATE]:  # last, because it holds the record of the previous state
        if os.path.lexists(path):
            done.append(f"{path} removed")
            if not dry:
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    for path in sorted(before.get("missing") or (), key=len, reverse=True):
        if os.path.isdir(path) and not os.listdir(path):
            done.append(f"{path} removed")
            if not dry:
                os.rmdir(path)
    if done and not dry and node.has_systemd():
        node.order("daemon-reload")
        node.systemctl("reset-failed", DAEMON, TAILSCALED)
    return {"changed": bool(done), "done": done, "diff": shown(done)}


def sysctls(before: dict, tailscale_removed: bool, dry: bool) -> list[str]:
    todo = node_baseline.turned(before)
    if tailscale_removed and node_baseline.read_sysctl(SOURCE_MARK) == "1":
        todo.append((SOURCE_MARK, "1", "0"))
    for path, _unused, value in todo if not dry else ():
        node_baseline.turn_back(path, value)
    return [f"{path.replace('/', '.')} is {value} again, not {now}" for path, now, value in todo]


def shown(done: list[str]) -> dict:
    return {"before": "", "after": "".join(f"{line}\n" for line in done)}


if __name__ == "__main__":
    main()
