#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Make a pod for a few minutes, see what it reaches, and take it away again."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_probe
short_description: See what a pod on this node reaches
version_added: 0.1.0
description:
  - V(present) connects a network namespace by the conflist that is in charge, with the installed
    plugins, just as a container runtime would, and answers in it.
  - V(tested) has that pod ask the pods of other nodes.
  - V(absent) takes it away. A pod that nobody takes away ends by itself after I(lifetime), and the
    next V(present) begins with what an earlier one left.
author:
  - The HeadCNI authors (@headcni)
options:
  state:
    description: What to do.
    type: str
    choices: [present, tested, absent]
    required: true
  name:
    description: What the others call this node. By default its host name.
    type: str
  cni_conf_dir:
    description: Where the conflist is.
    type: path
    default: /etc/cni/net.d
  cni_bin_dirs:
    description: Where the plugins are.
    type: list
    elements: path
    default: [/opt/cni/bin]
  host_port:
    description: A port of the node that leads to the pod. V(0) does without.
    type: int
    default: 18473
  socket:
    description: The socket of the tailscaled that carries the mesh, if not where the mode has it.
    type: path
  targets:
    description: What I(state=present) returned as RV(probe) on the other nodes. For V(tested).
    type: list
    elements: dict
    default: []
  timeout:
    description: How many seconds to try for.
    type: int
    default: 15
  lifetime:
    description: After how many seconds the pod ends by itself.
    type: int
    default: 600
attributes:
  check_mode:
    support: none
    details: Does nothing then, and says so by being skipped.
  diff_mode:
    support: none
    details: There is nothing to compare.
extends_documentation_fragment:
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.headcni_conflist
"""

EXAMPLES = r"""
- name: Make a pod on each node
  headcni.mesh.headcni_probe:
    state: present
  register: made

- name: See what it reaches
  headcni.mesh.headcni_probe:
    state: tested
    targets: "{{ ansible_play_hosts | map('extract', hostvars, 'made') | map(attribute='probe') }}"

- name: Take it away
  headcni.mesh.headcni_probe:
    state: absent
"""

RETURN = r"""
probe:
  description: The pod that was made, for the other nodes.
  type: dict
  returned: state is present
reached:
  description:
    - For each target by name, each check with C(ok) and C(detail). C(ok) is none for what was not
      asked.
  type: dict
  returned: state is tested
found:
  description: What an earlier probe had left here.
  type: list
  elements: str
  returned: state is present or absent
"""

import inspect
import json
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import (
    conflist,
    kernel,
    node,
    probe,
    probe_pod,
)
from ansible_collections.headcni.mesh.plugins.module_utils.localapi import (
    LocalAPI,
    LocalAPIError,
)

PROGRAM = os.path.join(probe_pod.HOME, "probe.py")
STATE = os.path.join(probe_pod.HOME, "probe.json")
SOCKETS = {"host": "/run/tailscale/tailscaled.sock", "daemon": "/run/headcni/tailscaled.sock"}
UNIT = f"{probe_pod.NAME}.service"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"choices": ["present", "tested", "absent"], "required": True},
            "name": {},
            "cni_conf_dir": {"type": "path", "default": conflist.DIRECTORY},
            "cni_bin_dirs": {
                "type": "list",
                "elements": "path",
                "default": ["/opt/cni/bin"],
            },
            "host_port": {"type": "int", "default": 18473},
            "socket": {"type": "path"},
            "targets": {"type": "list", "elements": "dict", "default": []},
            "timeout": {"type": "int", "default": 15},
            "lifetime": {"type": "int", "default": 600},
        },
    )
    node.refuse_other_platforms(module)
    work = {"present": present, "tested": tested, "absent": absent}[module.params["state"]]
    try:
        module.exit_json(changed=False, **work(module.params))
    except (probe_pod.ProbeError, node.NodeError, LocalAPIError) as problem:
        module.fail_json(msg=str(problem))
    except OSError as problem:
        module.fail_json(msg=f"{problem.filename or 'the probe'}: {problem.strerror or problem}")


def present(given: dict) -> dict:
    conf = in_charge(given["cni_conf_dir"])
    found = take_away()
    os.makedirs(probe_pod.HOME, mode=0o700)
    with open(PROGRAM, "w") as stream:
        stream.write(inspect.getsource(probe_pod))
    probe_pod.ip("netns", "add", probe_pod.NAME)
    probe_pod.ip("-n", probe_pod.NAME, "link", "set", "lo", "up")
    state = {"conf": conf, "bin_dirs": given["cni_bin_dirs"], "host_port": given["host_port"]}
    remember(state)
    keep(given["lifetime"])
    try:
        result = probe_pod.add(conf, given["cni_bin_dirs"], given["host_port"])
    except probe_pod.ProbeError:
        take_away()
        raise
    remember({**state, "dns": result.get("dns") or {}})
    status = asked(given["socket"] or socket_of(conf))
    me = status.get("Self") or {}
    mapped = any(one.get("capabilities", {}).get("portMappings") for one in conf["plugins"])
    described = {
        "node": given["name"] or os.uname().nodename,
        "addresses": [one["address"].partition("/")[0] for one in result["ips"]],
        "gateways": [one["gateway"] for one in result["ips"] if one.get("gateway")],
        "mtu": mtu_of(conf),
        "host_port": given["host_port"] if mapped else 0,
        "host_addresses": [*(status.get("TailscaleIPs") or ()), *underlay()],
        "tailnet_addresses": list(status.get("TailscaleIPs") or ()),
        "tailnet_name": str(me.get("DNSName") or "").rstrip("."),
        "pod_cidrs": pod_cidrs(conf),
    }
    return {"probe": described, "found": found}


def tested(given: dict) -> dict:
    if not os.path.exists(STATE):
        raise probe_pod.ProbeError("there is no probe on this node: state=present makes one")
    with open(STATE) as stream:
        state = json.load(stream)
    servers = state.get("dns", {}).get("nameservers") or []
    seconds, targets = given["timeout"], given["targets"]
    pings = [
        echo
        for target in targets
        for echo in probe.echoes(target["node"], target["addresses"], target["mtu"])
    ]
    answers = kernel.apart(lambda: probe.ping(pings, seconds), probe_pod.netns_path())
    results = {target["node"]: {} for target in targets}
    for echo, answer in zip(pings, answers):
        results[echo.target][echo.check] = answer
    peers = list(
        (asked(given["socket"] or socket_of(state["conf"]), peers=True).get("Peer") or {}).values()
    )
    # Before the first thread here: the C library of Debian 11 ends a child that is forked while a
    # thread is ending.
    dns = kernel.apart(
        lambda: at_once(lambda one: names(one, servers, seconds), targets), probe_pod.netns_path()
    )
    ports = at_once(lambda one: port(one, seconds), targets)
    for target, its_port, its_name in zip(targets, ports, dns):
        results[target["node"]].update(
            route=probe.route(target["pod_cidrs"], target["tailnet_addresses"], peers),
            port=its_port,
            dns=its_name,
        )
    return {"reached": results}


def at_once(work, targets: list) -> list:
    with ThreadPoolExecutor(max_workers=16) as pool:
        return list(pool.map(work, targets))


def port(target: dict, seconds: int) -> dict:
    if not target["host_port"]:
        return probe.outcome(None, "the conflist does not ask for portMappings")
    return probe.port(target["host_addresses"], target["host_port"], seconds)


def names(target: dict, servers: list, seconds: int) -> dict:
    if not servers:
        return probe.outcome(None, "pods have no nameserver of the tailnet's")
    if not target["tailnet_name"]:
        return probe.outcome(None, "the tailnet gives nodes no names")
    return probe.resolve(target["tailnet_name"], servers, seconds)


def remember(state: dict) -> None:
    with open(STATE, "w") as stream:
        json.dump(state, stream)


def absent(given: dict) -> dict:
    del given
    return {"found": take_away()}


def take_away() -> list[str]:
    """By ending the unit, whose end cleans up; and by hand, if there is none."""
    if node.unit(UNIT).active not in ("inactive", "failed", ""):
        node.order("stop", UNIT)
    return probe_pod.clean()


def keep(seconds: int) -> None:
    """A unit that answers in the pod. Its end, by whatever cause, is the end of the pod."""
    program = [probe_pod.PYTHON, "-IS", PROGRAM]
    command = ["systemd-run", "--quiet", "--collect", f"--unit={UNIT}"]
    command += [f"--property=RuntimeMaxSec={seconds}"]
    command += [f"--property=ExecStopPost={' '.join(program)} clean {probe_pod.HOME}"]
    done = subprocess.run(
        [*command, *program, "serve", probe_pod.HOME],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise node.NodeError(f"systemd-run: {done.stderr.strip()}")


def in_charge(directory: str) -> dict:
    picked = conflist.survey(directory).picked()
    if not picked:
        raise probe_pod.ProbeError(f"there is no conflist in {directory}: run site.yml first")
    path = os.path.join(directory, picked)
    with open(path) as stream:
        conf = json.load(stream)
    return conf if "plugins" in conf else {**conf, "plugins": [conf]}


def ours(conf: dict) -> dict:
    return next((one for one in conf["plugins"] if one["type"] == "headcni"), {})


def socket_of(conf: dict) -> str:
    return SOCKETS.get(ours(conf).get("mode", "host"), SOCKETS["host"])


def pod_cidrs(conf: dict) -> list[str]:
    """As the conflist has them: those are the pods that there can be."""
    given = ours(conf).get("pod_cidr") or []
    return [one.strip() for one in given.split(",")] if isinstance(given, str) else list(given)


def mtu_of(conf: dict) -> int:
    return next((one["mtu"] for one in conf["plugins"] if one.get("mtu")), 1280)


def underlay() -> list[str]:
    """The addresses by which this node would speak to others, apart from the tailnet."""
    found = []
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as one:
                one.connect((far, 9))
                found.append(one.getsockname()[0])
        except OSError:
            continue
    return found


def asked(path: str, peers: bool = False) -> dict:
    deadline = time.monotonic() + 10
    while True:
        try:
            return LocalAPI(path).raw_status(peers)
        except LocalAPIError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


if __name__ == "__main__":
    main()
