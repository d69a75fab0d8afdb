#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a node knows about itself and its paths, for the mesh report."""

from __future__ import annotations

DOCUMENTATION = r"""
module: headcni_survey
short_description: Collect what the mesh report shows of a node
version_added: 0.2.0
description:
  - Runs C(headcnictl status), C(routes), C(ipam) and C(diagnose) on the node, and has tailscaled
    ping other nodes to measure path, latency and loss. Changes nothing.
  - With up to 50 nodes it measures all others, with more a sample of twelve.
  - A part that does not answer is not a failure; RV(problems) says why.
author:
  - The HeadCNI authors (@headcni)
options:
  socket:
    description: Where the tailscaled of host mode has its socket.
    type: path
    default: /run/tailscale/tailscaled.sock
  measure:
    description: Whether to ping other nodes.
    type: bool
    default: true
extends_documentation_fragment:
  - headcni.mesh.node
  - headcni.mesh.node.read_only
seealso:
  - module: headcni.mesh.headcni_report
  - module: headcni.mesh.headcni_status
"""

EXAMPLES = r"""
- name: Collect what the report shows of this node
  headcni.mesh.headcni_survey:
  register: headcni_survey
"""

RETURN = r"""
status:
  description: The answer of C(headcnictl status --json). Empty if there is none.
  type: dict
  returned: success
routes:
  description:
    - C(counts), the number of routes in each state; C(wrong), those that differ from what they
      should be; C(own), C(alarms) and C(refused) as C(headcnictl routes --json) has them; C(rules),
      the number of rules.
  type: dict
  returned: success
pools:
  description: The pools of C(headcnictl ipam --json), without the list of addresses.
  type: list
  elements: dict
  returned: success
findings:
  description: The findings of C(headcnictl diagnose --json).
  type: list
  elements: dict
  returned: success
tailnet:
  description: The node's C(name), C(addresses), C(version) of tailscaled and home C(relay).
  type: dict
  returned: success
system:
  description: The C(kernel), C(machine), C(distribution) and C(python) of the node.
  type: dict
  returned: success
paths:
  description:
    - For each measured node C(name), C(address), C(path), C(through), C(sent), C(lost) and
      C(latency_ms).
  type: list
  elements: dict
  returned: success
problems:
  description: Why a part has no answer, by the name of the part.
  type: dict
  returned: success
"""

import os
import platform
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import (
    headcnictl,
    node,
    node_config,
    path_survey,
)
from ansible_collections.headcni.mesh.plugins.module_utils.shared import modes
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import (
    LocalAPI,
    LocalAPIError,
    short_version,
)

PARTS = {"status": (), "routes": ("--no-ping",), "ipam": (), "diagnose": ()}
SECONDS = 60.0
PING_SECONDS = 1.5
FINE = ("ok", "blocked", "kept")
MOST = 100  # of the items of each list


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "socket": {"type": "path", "default": modes.SOCKETS["host"]},
            "measure": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    node.refuse_other_platforms(module)
    module.exit_json(changed=False, **survey(module.params["socket"], module.params["measure"]))


def survey(socket: str, measure: bool) -> dict:
    with ThreadPoolExecutor(len(PARTS)) as pool:
        asked = {
            part: pool.submit(headcnictl.ask, part, *options, seconds=SECONDS)
            for part, options in PARTS.items()
        }
        answers = {part: waiting.result() for part, waiting in asked.items()}
    problems = {part: problem for part, (_unused, problem) in answers.items() if problem}
    found = {part: answer for part, (answer, _unused) in answers.items()}
    mode = found["status"].get("mode") or node_config.mode_of() or "host"
    tailnet, paths = {}, []
    try:
        tailnet, paths = of_tailnet(socket if mode == "host" else modes.SOCKETS["daemon"], measure)
    except LocalAPIError as problem:
        problems["paths"] = str(problem)
    return {
        "status": found["status"],
        "routes": reduced_routes(found["routes"]),
        "pools": [reduced_pool(pool) for pool in (found["ipam"].get("pools") or ())[:MOST]],
        "findings": (found["diagnose"].get("findings") or [])[:MOST],
        "tailnet": tailnet,
        "system": system(),
        "paths": paths,
        "problems": problems,
    }


def of_tailnet(socket: str, measure: bool) -> tuple:
    """This node in the tailnet, and its measured paths."""
    status = LocalAPI(socket).raw_status(peers=True)
    me = status.get("Self") or {}
    addresses = [str(address) for address in status.get("TailscaleIPs") or ()]
    name = path_survey.name_of(me)
    tailnet = {
        "name": name,
        "addresses": addresses,
        "version": short_version(str(status.get("Version") or "")),
        "relay": str(me.get("Relay") or ""),
    }
    if not addresses or not measure:
        return tailnet, []
    peers = path_survey.mesh_peers(status)
    chosen = path_survey.choice(path_survey.Peer(name, addresses[0]), peers)
    return tailnet, path_survey.measured(LocalAPI(socket, PING_SECONDS).ping, chosen)


def reduced_routes(answer: dict) -> dict:
    """The routes that are as they should be are only counted."""
    routes = answer.get("routes") or []
    return {
        "counts": dict(Counter(str(route.get("state")) for route in routes)),
        "wrong": [route for route in routes if route.get("state") not in FINE][:MOST],
        "own": (answer.get("own") or [])[:MOST],
        "rules": len(answer.get("rules") or ()),
        "alarms": (answer.get("alarms") or [])[:MOST],
        "refused": (answer.get("refused") or [])[:MOST],
    }


def reduced_pool(pool: dict) -> dict:
    return {name: value for name, value in pool.items() if name != "held"}


def system() -> dict:
    return {
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "distribution": distribution(),
        "python": platform.python_version(),
    }


def distribution(path: str = "/etc/os-release") -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            lines = stream.read(65536).splitlines()
    except OSError:
        return ""
    known = dict(line.split("=", 1) for line in lines if "=" in line)
    return known.get("PRETTY_NAME", "").strip('"')


if __name__ == "__main__":
    main()
