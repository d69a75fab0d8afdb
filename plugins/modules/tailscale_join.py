#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Join a node to its tailnet, and set tailscaled's prefs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tailscale_join
short_description: Join a node to a tailnet and set tailscaled's prefs
version_added: 0.1.0
description:
  - Reads tailscaled's state over its LocalAPI and changes what differs from the options. It keeps
    no record between runs. If an option is not given, its pref is not changed.
  - A key is required only if the node must log in. It is sent to tailscaled in the body of a
    request, and never appears on a command line or in a file.
  - If a node that was logged in cannot log in again, it returns to its previous state.
options:
  socket:
    description: The socket of tailscaled.
    type: path
    default: /run/tailscale/tailscaled.sock
  login_server:
    description:
      - The Headscale server to join. A node that has joined another server logs in again. It keeps
        its prefs, except an exit node of the other tailnet.
      - By default a node stays with its current server.
    type: str
    default: ""
  auth_key:
    description: A pre-auth key of that server, in case the node must log in.
    type: str
    default: ""
  force_reauth:
    description: Whether to log in again with a new node key, even if it is not necessary.
    type: bool
    default: false
  login:
    description:
      - V(now) logs in with O(auth_key), if the node must log in.
      - V(later) does not change a node that must log in, and only returns RV(needs_login). With
        this a playbook can find out which nodes need a key before it creates one.
    type: str
    choices: [now, later]
    default: now
  hostname:
    description: The node's name in the tailnet. If it is empty, the machine's host name.
    type: str
  tags:
    description:
      - The tags to request from the login server, each V(tag:NAME). Headscale refuses them together
        with a key, and gives a node the tags of its key instead.
    type: list
    elements: str
  accept_routes:
    description: Whether to use the routes that other nodes advertise.
    type: bool
  snat_subnet_routes:
    description:
      - Whether traffic to routes that this node advertises gets the node's own address. Pods keep
        their addresses only with V(false).
    type: bool
  accept_dns:
    description: Whether to use the tailnet's DNS on this node.
    type: bool
  shields_up:
    description: Whether to refuse all connections from the tailnet.
    type: bool
  advertise_routes:
    description: CIDRs that this node should advertise or, depending on O(routes_state), should not.
    type: list
    elements: str
  routes_state:
    description:
      - V(merge) adds O(advertise_routes) to the routes that the node already advertises.
      - V(exact) also withdraws all other routes. If the node is an exit node, it stays one.
      - V(absent) withdraws O(advertise_routes).
    type: str
    choices: [merge, exact, absent]
    default: merge
  timeout:
    description: How many seconds to wait for tailscaled to run.
    type: int
    default: 60
attributes:
  check_mode:
    support: full
    details: Needs neither a key nor a running tailscaled.
  diff_mode:
    support: full
    details: Shows the prefs that change. They contain no secrets.
extends_documentation_fragment:
  - headcni.mesh.node
seealso:
  - module: headcni.mesh.tailscale_info
  - module: headcni.mesh.tailscale_install
author:
  - The HeadCNI authors (@headcni)
"""

EXAMPLES = r"""
- name: Join the node to the tailnet
  headcni.mesh.tailscale_join:
    login_server: https://headscale.example.org
    auth_key: "{{ pre_auth_key }}"
    accept_routes: true
    snat_subnet_routes: false

- name: Advertise one more route
  headcni.mesh.tailscale_join:
    advertise_routes:
      - 192.168.50.0/24
"""

RETURN = r"""
needs_login:
  description: Whether the node had to log in or would have to.
  returned: success
  type: bool
login_reason:
  description: Why it must log in.
  returned: success
  type: str
backend_state:
  description: The state that tailscaled reports.
  returned: success
  type: str
  sample: Running
node_key:
  description: The node's public key in Headscale. Empty if the node has not logged in yet, for
    example in check mode.
  returned: success
  type: str
  sample: nodekey:0000000000000000000000000000000000000000000000000000000000000001
tailnet_ips:
  description: The node's addresses in the tailnet.
  returned: success
  type: list
  elements: str
login_server:
  description: The server that the node has joined.
  returned: success
  type: str
prefs_changed:
  description: The prefs that were or would be changed, each with its old and new value.
  returned: success
  type: dict
health:
  description: The problems that tailscaled reports.
  returned: success
  type: list
  elements: str
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import node_baseline
from ansible_collections.headcni.mesh.plugins.module_utils.shared.localapi import (
    LocalAPI,
    LocalAPIError,
)
from ansible_collections.headcni.mesh.plugins.module_utils.shared.modes import SOCKETS
from ansible_collections.headcni.mesh.plugins.module_utils.tailnet import (
    Joining,
    Plan,
    Standing,
    TailnetError,
    plain_http_warning,
    read,
)
from ansible_collections.headcni.mesh.plugins.module_utils.tailnet_options import (
    SPEC,
    mistakes,
    wishes_of,
)


def refuse_impossible(now: Standing, plan: Plan, wanted: dict[str, Any]) -> None:
    """Problems that do not matter in check mode."""
    if now.status is None:
        raise TailnetError(now.problem)
    if plan.login and not plan.login_server:
        raise TailnetError(f"login_server: none given, and this node must log in: {plan.login}")
    if plan.login and not wanted["auth_key"]:
        raise TailnetError(
            f"auth_key: none given, and this node must log in: {plan.login} "
            f"(tailscaled's state is {now.status.state})"
        )


def main() -> None:
    module = AnsibleModule(argument_spec=SPEC, supports_check_mode=True)
    wanted = module.params
    wrong = mistakes(wanted)
    if wrong:
        module.fail_json(msg="; ".join(wrong))
    server = wanted["login_server"].rstrip("/")
    if plain_http_warning(server):
        module.warn(plain_http_warning(server))
    api = LocalAPI(wanted["socket"])
    try:
        now = read(api)
        plan = Plan.of(now, server, wishes_of(wanted), wanted["force_reauth"])
        status = now.status
        put_off = bool(plan.login) and wanted["login"] == "later"
        if not module.check_mode and not put_off:
            refuse_impossible(now, plan, wanted)
            if wanted["socket"] != SOCKETS["daemon"]:
                node_baseline.note_turned(plan.edits)
            status = Joining(api, wanted["timeout"], module.log).carry_out(
                plan, wanted["auth_key"].strip()
            )
    except (LocalAPIError, TailnetError) as problem:
        module.fail_json(msg=str(problem))
    to_come = plan.login and (put_off or module.check_mode)
    module.exit_json(
        changed=plan.changed and not put_off,
        needs_login=bool(plan.login),
        login_reason=plan.login,
        login_server=plan.login_server,
        backend_state=status.state if status else "",
        node_key=status.node_key if status and not to_come else "",
        tailnet_ips=list(status.addresses) if status else [],
        health=list(status.health) if status else [],
        prefs_changed={} if put_off else plan.prefs_changed(),
        diff={} if put_off else plan.diff(),
    )


if __name__ == "__main__":
    main()
