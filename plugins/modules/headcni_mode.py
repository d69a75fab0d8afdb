#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Switch a node from one mode to the other, step by step."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_mode
short_description: Switch a node from one mode to the other, step by step
version_added: 0.1.0
description:
  - The steps of C(playbooks/switch_mode.yml) that run on the node. Between them the controller
    joins the other tailscaled and moves the node's routes to it in Headscale.
  - Each step can be repeated, and each returns how far an earlier run got.
author:
  - The HeadCNI authors (@headcni)
options:
  mode:
    description: The mode to switch to.
    type: str
    choices: [host, daemon]
    required: true
  state:
    description:
      - V(settled) only repairs what an interrupted move has left, and returns the node's state.
      - V(begun) records that a switch has begun, with O(keys). V(prepared) does that as well.
      - V(prepared) lets the tailscaled of O(mode) serve the node's pods, too, and sends each packet
        through both. The new configuration must already be in C(config.yaml.next).
      - V(moved) sends all packets through the tailscaled of O(mode). If the daemon does not become
        ready, it moves them back.
      - V(dropped) undoes the changes for the other mode.
      - V(finished) removes the record of the switch.
    type: str
    choices: [settled, begun, prepared, moved, dropped, finished]
    default: settled
  keys:
    description: The node keys of the identities by mode, for the record. Recorded keys are kept.
    type: dict
    default: {}
  forget:
    description:
      - With V(finished), whether to remove the state of HeadCNI's own tailscaled, if the node no
        longer uses it. Set this if its identity has been removed from Headscale.
    type: bool
    default: false
  socket:
    description: The socket of the node's own tailscaled, for V(dropped).
    type: path
    default: /run/tailscale/tailscaled.sock
    version_added: 0.2.0
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
    details: Shows the mode before and after.
extends_documentation_fragment:
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.headcni_config
  - module: headcni.mesh.headscale_routes
"""

EXAMPLES = r"""
- name: Read the node's mode
  headcni.mesh.headcni_mode:
    mode: daemon
  register: node_mode

- name: Serve its pods through both tailscaleds
  headcni.mesh.headcni_mode:
    mode: daemon
    state: prepared
"""

RETURN = r"""
mode:
  description: The node's mode, or the mode it would have.
  type: str
  returned: success
unfinished:
  description: Whether a switch has begun and is not finished.
  type: bool
  returned: success
left_mode:
  description: The mode that the node had when the switch began. Empty if there is no switch.
  type: str
  returned: success
keys:
  description: The node keys of both identities, as far as they are recorded.
  type: dict
  returned: success
done:
  description: What was done, in words.
  type: str
  returned: success
pod_cidrs:
  description: The node's pod CIDRs.
  type: list
  elements: str
  returned: state is settled
targets:
  description: What pods should reach, in the format of M(headcni.mesh.headcni_probe).
  type: list
  elements: dict
  returned: state is settled
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import mode_switch, node, node_config
from ansible_collections.headcni.mesh.plugins.module_utils.shared import modes
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import (
    LocalAPI,
    LocalAPIError,
)

STATES = ("settled", "begun", "prepared", "moved", "dropped", "finished")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "mode": {"choices": list(modes.MODES), "required": True},
            "state": {"choices": list(STATES), "default": "settled"},
            "keys": {"type": "dict", "default": {}, "no_log": False},
            "forget": {"type": "bool", "default": False},
            "socket": {"type": "path", "default": modes.SOCKETS["host"]},
        },
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    try:
        with mode_switch.alone() as handle:
            module.exit_json(**step(module, handle))
    except (mode_switch.SwitchError, node_config.ConfigError, node.NodeError) as problem:
        module.fail_json(msg=str(problem))
    except OSError as problem:
        module.fail_json(msg=f"{problem.filename or 'the node'}: {problem.strerror or problem}")


def step(module: AnsibleModule, handle: int) -> dict:
    given, dry = module.params, module.check_mode
    state, wanted = given["state"], given["mode"]
    done, extra = "", {}
    if state == "settled":
        wrong = mode_switch.left_behind()
        if wrong and not dry:
            mode_switch.put_right()
        done = "; ".join(wrong)
    config = mode_switch.configuration() if os.path.exists(node_config.PATH) else {}
    if not config and not dry:
        raise mode_switch.SwitchError(f"{node_config.PATH} is not there: run site.yml first")
    mode = before = mode_switch.mode_of(config) if config else ""
    if state == "settled":
        extra["targets"] = targets(config)
        extra["pod_cidrs"] = config["network"]["podCIDR"]["nodeLocal"] if config else []
    elif state == "begun":
        done = begin(wanted, mode, given["keys"], dry)
    elif state == "prepared" and mode != wanted and not dry:
        begin(wanted, mode, given["keys"], dry)
        said = mode_switch.ctl(handle, "prepare", "--next", mode_switch.NEXT)
        done = "" if said == "all was as it should be" else said
    elif state == "moved" and mode != wanted:
        done = "would be moved"
        if not dry:
            done = mode_switch.ctl(handle, "move", "--next", mode_switch.NEXT)
        mode = wanted
    elif state == "dropped":
        done = drop(handle, wanted, mode, given["socket"], dry)
    elif state == "finished":
        done = finish(wanted, mode, given["forget"], dry)
    note = mode_switch.read_note()
    return {
        "changed": bool(done),
        "mode": mode,
        "unfinished": note is not None,
        "left_mode": note.left if note else "",
        "keys": dict(note.keys) if note else {},
        "done": done,
        "diff": {"before": f"mode: {before}\n", "after": f"mode: {mode}\n"},
        **extra,
    }


def targets(config: dict) -> list[dict]:
    """Empty if the current tailscaled does not answer."""
    if not config:
        return []
    path = modes.socket_of(mode_switch.mode_of(config), config["tailscale"]["socket"]["path"])
    try:
        status = LocalAPI(path).raw_status(peers=True)
    except LocalAPIError:
        return []
    return mode_switch.targets(config, status)


def begin(wanted: str, mode: str, keys: dict, dry: bool) -> str:
    known = mode_switch.read_note()
    merged = {**(known.keys if known else {}), **{k: v for k, v in keys.items() if v}}
    left = mode if mode != wanted else modes.other(wanted)
    note = mode_switch.Note(left, wanted, merged)
    if known == note:
        return ""
    if not dry:
        mode_switch.write_note(note)
    return f"noted: from {left} to {wanted}"


def drop(handle: int, wanted: str, mode: str, socket: str, dry: bool) -> str:
    if mode != wanted:
        raise mode_switch.SwitchError(f"the node is in {mode} mode, not in {wanted}: move it first")
    if dry:
        return "would be dropped"
    said = mode_switch.drop(handle, modes.other(wanted), socket)
    return "" if said == "nothing was there" else said


def finish(wanted: str, mode: str, forget: bool, dry: bool) -> str:
    if mode != wanted:
        raise mode_switch.SwitchError(f"the node is in {mode} mode, not in {wanted}: move it first")
    done = []
    for path in (mode_switch.NEXT, mode_switch.NOTE):
        if os.path.exists(path):
            done.append(f"{path} removed")
            if not dry:
                os.unlink(path)
    if forget and wanted == "host" and os.path.isdir(mode_switch.STATE_OF_OURS):
        done.append(f"{mode_switch.STATE_OF_OURS} removed")
        if not dry:
            mode_switch.forget_ours()
    return "; ".join(done)


if __name__ == "__main__":
    main()
