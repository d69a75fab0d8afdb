#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Keep a service of HeadCNI running with the installed version, and wait until it is ready."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_service
short_description: Run the services of HeadCNI on a node
version_added: 0.1.0
description:
  - Starts and enables C(headcni-daemon.service) or C(headcni-tailscaled.service).
  - Restarts a running service if its release, unit, configuration or tailscaled has changed since
    it was started. So the next run finishes an interrupted one. A restart of the daemon does not
    affect pods.
  - Waits until the daemon reports that it is ready. If it does not, the failure names every
    condition that is not met. Waits until tailscaled answers on its socket. If it ends instead, the
    failure quotes its last message.
author:
  - The HeadCNI authors (@headcni)
options:
  name:
    description: The service.
    type: str
    choices: [headcni-daemon, headcni-tailscaled]
    required: true
  state:
    description: What to do. V(stopped) also disables the service.
    type: str
    choices: [started, restarted, stopped]
    default: started
  restart:
    description: Whether this play has changed something that needs a restart.
    type: bool
    default: false
  reload:
    description: Whether this play has changed something that needs a reload.
    type: bool
    default: false
  environment:
    description:
      - Environment variables of C(headcni-tailscaled), written to
        C(/etc/default/headcni-tailscaled).
      - If this is not given, the file is not changed.
    type: dict
  port:
    description: The UDP port of C(headcni-tailscaled). If it uses another port, it is restarted.
    type: int
  ready_address:
    description: The address of the daemon's monitor. Without it, systemd's state is enough.
    type: str
  ready_port:
    description: The port of the monitor.
    type: int
    default: 9001
  ready_timeout:
    description: How many seconds to wait until the service is ready. V(0) does not wait.
    type: int
    default: 60
  ready_without:
    description:
      - Conditions that need not be met. If they are not met, there is a warning.
      - By default V(pods) and V(policy-source), the watches of pods and of network policies,
        because a node may be set up before the API server.
    type: list
    elements: str
    default: [pods, policy-source]
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
    details: Shows the state of the service before and after.
extends_documentation_fragment:
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.headcni_release
  - module: headcni.mesh.headcni_config
"""

EXAMPLES = r"""
- name: Start the daemon and wait until it is ready
  headcni.mesh.headcni_service:
    name: headcni-daemon
    ready_address: 127.0.0.1
"""

RETURN = r"""
action:
  description: What was done, V(none), V(started), V(restarted), V(reloaded) or V(stopped).
  type: str
  returned: success
reason:
  description: Why the service was restarted.
  type: str
  returned: success
conditions:
  description: The conditions that the daemon reports.
  type: list
  elements: dict
  returned: when the daemon was asked
  sample: [{name: cni-socket, ok: true, reason: ""}]
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import monitor, node, node_config
from ansible_collections.headcni.mesh.plugins.module_utils.shared import modes
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import (
    LocalAPI,
    LocalAPIError,
)

ENVIRONMENT = "/etc/default/headcni-tailscaled"
UNIT_DIR = "/etc/systemd/system"
POLL_SECONDS = 0.25
LIVES = 3  # a service that has been started this often does not stay up


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"choices": ["headcni-daemon", "headcni-tailscaled"], "required": True},
            "state": {"choices": ["started", "restarted", "stopped"], "default": "started"},
            "restart": {"type": "bool", "default": False},
            "reload": {"type": "bool", "default": False},
            "environment": {"type": "dict"},
            "port": {"type": "int"},
            "ready_address": {},
            "ready_port": {"type": "int", "default": 9001},
            "ready_timeout": {"type": "int", "default": 60},
            "ready_without": {
                "type": "list",
                "elements": "str",
                "default": ["pods", "policy-source"],
            },
        },
        supports_check_mode=True,
    )
    module.no_log_values.update(node.secrets_of(module.params["environment"] or {}))
    node.refuse_other_platforms(module)
    try:
        module.exit_json(**(stop if module.params["state"] == "stopped" else run)(module))
    except node.NodeError as problem:
        module.fail_json(msg=str(problem))
    except OSError as problem:
        module.fail_json(msg=f"{problem.filename}: {problem.strerror}")


def run(module: AnsibleModule) -> dict:
    given, name = module.params, f"{module.params['name']}.service"
    variables, opened = environment(module), restore_mode(module)
    before = node.unit(name)
    if before.load == "not-found" and not module.check_mode:
        raise node.NodeError(f"{name} is not installed: install a release first")
    action, reason = decide(given, before, variables)
    enable = before.enabled != "enabled"
    if not module.check_mode:
        if before.stale:
            node.order("daemon-reload")
        if enable:
            node.order("enable", name)
        if action != "none":
            node.order(
                {"started": "start", "restarted": "restart", "reloaded": "reload"}[action], name
            )
    result = {
        "changed": action != "none" or enable or bool(variables or opened),
        "action": action,
        "reason": reason,
        "diff": {
            "before": state(name, before.is_active, not enable)
            + (variables or ("", ""))[0]
            + opened,
            "after": state(name, True, True, reason) + (variables or ("", ""))[1],
        },
    }
    if module.check_mode or not given["ready_timeout"]:
        return result
    if given["name"] == "headcni-tailscaled":
        wait_until_it_answers(name, given["ready_timeout"])
    elif given["ready_address"]:
        result["conditions"] = wait_until_ready(module, name)
    return result


def decide(given: dict, unit: node.Unit, variables) -> tuple[str, str]:
    """What to do with a service, and why."""
    if not unit.is_active:
        return "started", ""
    if given["state"] == "restarted" or given["restart"]:
        return "restarted", "asked for"
    if variables:
        return "restarted", f"{ENVIRONMENT} changed"
    if given["port"] and not has_port(unit.pid, given["port"]):
        return "restarted", f"it does not run with port {given['port']}"
    if given["name"] == "headcni-tailscaled" and was_replaced(unit.pid):
        return "restarted", "another tailscaled was installed since it was started"
    for path in sources(given["name"]):
        if path == node_config.PATH and given["reload"]:
            continue
        if changed_at(path) > unit.changed_at:
            return "restarted", f"{path} is newer than the service"
    return ("reloaded", "the configuration changed") if given["reload"] else ("none", "")


def sources(name: str) -> list[str]:
    """The files that a service uses. If one is newer than the service, it needs a restart."""
    unit = os.path.join(UNIT_DIR, f"{name}.service")
    if name == "headcni-daemon":
        return [node_config.RELEASE, unit, node_config.PATH]
    return [unit, ENVIRONMENT]


def has_port(pid: int, port: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            return f"--port={port}".encode() in stream.read().split(b"\0")
    except OSError:
        return True  # it has just ended, and systemd starts it again


def was_replaced(pid: int) -> bool:
    """Whether the program of a process has been deleted or replaced on disk."""
    try:
        return os.readlink(f"/proc/{pid}/exe").endswith(" (deleted)")
    except OSError:
        return False  # it has just ended, and systemd starts it again


def changed_at(path: str) -> float:
    """The time of the file itself: for the link `current`, when it was switched."""
    try:
        return os.lstat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def environment(module: AnsibleModule):
    """Write the variables, and return the text before and after if it changed."""
    wanted = module.params["environment"]
    if wanted is None:
        return None
    for key, value in wanted.items():
        if not str(key).isidentifier() or "\n" in str(value):
            raise node.NodeError(f"environment: {key!r}: expected NAME: a value of one line")
    lines = [f'{key}="{quoted(value)}"\n' for key, value in sorted(wanted.items())]
    text = "# Written by Ansible (headcni.mesh.headcni_node).\n" + "".join(lines)
    old = node_config.read(ENVIRONMENT)
    if old == text or (old is None and not wanted):
        return None
    if not module.check_mode:
        node_config.write(ENVIRONMENT, text)
    return node_config.redacted_env(old or ""), node_config.redacted_env(text)


def restore_mode(module: AnsibleModule) -> str:
    """Restore the mode of the file, without a restart. Returns in words what was wrong."""
    if module.params["environment"] is None or not os.path.exists(ENVIRONMENT):
        return ""
    mode = os.stat(ENVIRONMENT).st_mode & 0o7777
    if mode == node_config.MODE:
        return ""
    if not module.check_mode:
        os.chmod(ENVIRONMENT, node_config.MODE)
    return f"{ENVIRONMENT}: mode {mode:04o}\n"


def quoted(value) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"')


def stop(module: AnsibleModule) -> dict:
    name = f"{module.params['name']}.service"
    before = node.unit(name)
    enabled = before.enabled == "enabled"
    active = before.active not in ("inactive", "failed", "")
    if not module.check_mode:
        if active:
            node.order("stop", name)
        if enabled:
            node.order("disable", name)
    return {
        "changed": active or enabled,
        "action": "stopped" if active else "none",
        "reason": "",
        "diff": {
            "before": state(name, active, enabled),
            "after": state(name, False, False),
        },
    }


def state(name: str, active: bool, enabled: bool, reason: str = "") -> str:
    why = f", restarted: {reason}" if reason and active else ""
    return (
        f"{name}: {'active' if active else 'inactive'}, "
        f"{'enabled' if enabled else 'disabled'}{why}\n"
    )


def wait_until_ready(module: AnsibleModule, name: str) -> list[dict]:
    given = module.params
    deadline = time.monotonic() + given["ready_timeout"]
    while True:
        answer = monitor.ready(given["ready_address"], given["ready_port"])
        lacking = [condition for condition in answer.conditions if not condition["ok"]]
        if answer.conditions and all(
            condition["name"] in given["ready_without"] for condition in lacking
        ):
            for condition in lacking:
                module.warn(f"{name}: {condition['name']}: {condition['reason']}")
            return answer.conditions
        if time.monotonic() > deadline:
            said = "; ".join(answer.problems) or "no answer"
            raise node.NodeError(
                f"{name} is not ready after {given['ready_timeout']} s: {said}; "
                f"see journalctl -u {name}"
            )
        time.sleep(POLL_SECONDS)


def wait_until_it_answers(name: str, seconds: float) -> None:
    """tailscaled tells systemd that it is ready before it has a TUN and a firewall. Without them it
    ends, and systemd restarts it again and again."""
    api = LocalAPI(modes.SOCKETS["daemon"], timeout=3.0)
    deadline = time.monotonic() + seconds
    lives: list[int] = []  # the process ids that it has had
    while True:
        pid = node.unit(name).pid
        if pid and pid not in lives:
            lives.append(pid)
        try:
            api.status()
            return
        except LocalAPIError as problem:
            said = str(problem)
        if len(lives) == LIVES:
            reason = "; ".join(node.last_words([name], 1, pid=lives[-2])) or said
            raise node.NodeError(f"{name} does not stay up: {reason}; see journalctl -u {name}")
        if time.monotonic() > deadline:
            raise node.NodeError(
                f"{name} does not answer after {seconds:g} s: {said}; see journalctl -u {name}"
            )
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
