#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Read the version of a node's Tailscale, and its state in the tailnet."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tailscale_info
short_description: Read the version of a node's Tailscale and its state in the tailnet
version_added: 0.1.0
description:
  - Reads the version from the installed programs, and everything else from the running tailscaled.
  - Also works if Tailscale is not installed or does not run. Then RV(needs_login) is true.
options:
  socket:
    description: The socket of tailscaled.
    type: path
    default: /run/tailscale/tailscaled.sock
  login_server:
    description: The server that the node should have joined. By default any server is accepted.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    details: Changes nothing in either mode.
  diff_mode:
    support: none
    details: There is nothing to compare.
extends_documentation_fragment:
  - headcni.mesh.node
author:
  - The HeadCNI authors (@headcni)
"""

EXAMPLES = r"""
- name: Check whether the node must log in
  headcni.mesh.tailscale_info:
    login_server: https://headscale.example.org
  register: standing
"""

RETURN = r"""
installed:
  description: Whether both programs are installed.
  returned: success
  type: bool
version:
  description: The version of the programs. Empty if they are not installed, and V(mixed) if their
    versions differ.
  returned: success
  type: str
unit:
  description: Whether systemd knows C(tailscaled.service).
  returned: success
  type: bool
arch:
  description: Tailscale's name for this node's architecture.
  returned: success
  type: str
running_version:
  description: The version of the running tailscaled. Empty if none runs.
  returned: success
  type: str
backend_state:
  description: The state that tailscaled reports. Empty if it does not run.
  returned: success
  type: str
needs_login:
  description: Whether the node must log in to join O(login_server).
  returned: success
  type: bool
login_reason:
  description: Why it must log in.
  returned: success
  type: str
login_server:
  description: The server that the node has joined.
  returned: success
  type: str
node_key:
  description: The node's public key, by which Headscale knows it.
  returned: success
  type: str
name:
  description: The node's name in the tailnet.
  returned: success
  type: str
domain:
  description: The domain of the tailnet's names. Empty if MagicDNS is off.
  returned: success
  type: str
tailnet_ips:
  description: The node's addresses in the tailnet.
  returned: success
  type: list
  elements: str
tags:
  description: The tags that the login server has assigned to the node.
  returned: success
  type: list
  elements: str
served_routes:
  description: The node's routes that the login server has approved, as far as the node knows.
  returned: success
  type: list
  elements: str
prefs:
  description: tailscaled's prefs, without keys.
  returned: success
  type: dict
peers:
  description: How many other nodes this one sees.
  returned: success
  type: int
peers_online:
  description: How many of them are online.
  returned: success
  type: int
health:
  description: The problems that tailscaled reports.
  returned: success
  type: list
  elements: str
"""

import platform

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import (
    SOCKET,
    LocalAPI,
    LocalAPIError,
    Status,
)
from ansible_collections.headcni.mesh.plugins.module_utils.tailnet import (
    read,
    server_mistakes,
    why_login,
)
from ansible_collections.headcni.mesh.plugins.module_utils.tailscale_release import (
    ARCHITECTURES,
    installed_version,
)
from ansible_collections.headcni.mesh.plugins.module_utils.tailscale_service import (
    unit_exists,
)

SPEC = {
    "socket": {"type": "path", "default": SOCKET},
    "login_server": {"type": "str", "default": ""},
}


def main() -> None:
    module = AnsibleModule(argument_spec=SPEC, supports_check_mode=True)
    server = module.params["login_server"].rstrip("/")
    if server and server_mistakes(server):
        module.fail_json(msg="; ".join(server_mistakes(server)))
    try:
        now = read(LocalAPI(module.params["socket"]), peers=True)
    except LocalAPIError as problem:
        module.fail_json(msg=str(problem))
    version = installed_version()
    status = now.status or Status.of({"BackendState": ""})
    module.exit_json(
        changed=False,
        installed=bool(version),
        version=version,
        unit=unit_exists(),
        arch=ARCHITECTURES.get(platform.machine(), platform.machine()),
        running_version=status.version,
        backend_state=status.state if now.status else "",
        needs_login=bool(why_login(now, server)),
        login_reason=why_login(now, server),
        login_server=now.login_server,
        node_key=status.node_key,
        name=status.name,
        domain=status.domain,
        tailnet_ips=list(status.addresses),
        tags=list(status.tags),
        served_routes=list(status.served),
        prefs=dict(now.prefs),
        peers=status.peers,
        peers_online=status.peers_online,
        health=list(status.health),
    )


if __name__ == "__main__":
    main()
