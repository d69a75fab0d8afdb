#!/usr/bin/python
# GNU General Public License v3.0+ (see https://www.gnu.org/licenses/gpl-3.0.txt)
"""Join a node to its tailnet, and set what of tailscaled is wanted."""

from __future__ import annotations

DOCUMENTATION = r"""
module: tailscale_join
short_description: Join a node to a tailnet and set tailscaled's prefs
version_added: 0.1.0
description:
  - Asks tailscaled, by its LocalAPI, how it stands, and changes what differs from what is wanted.
    Nothing is remembered between runs, and options that are not given leave their pref alone.
  - A key is needed only where the node has to log in. It goes to tailscaled in the body of a
    request, never to a command line or a file.
  - A node that was logged in before goes back to where it was if it cannot log in.
options:
  socket:
    description: The socket of tailscaled.
    type: path
    default: /run/tailscale/tailscaled.sock
  login_server:
    description:
      - The Headscale server to be joined to. A node that is joined to another one logs in anew,
        and keeps its prefs, but for an exit node of the other tailnet.
      - Without it, a node stays at the server that it knows.
    type: str
    default: ""
  auth_key:
    description: A pre-auth key of that server, for the case that the node must log in.
    type: str
    default: ""
  force_reauth:
    description: Log in anew, with a new node key, even if there is no need.
    type: bool
    default: false
  login:
    description:
      - V(now) logs in where that is needed, with O(auth_key).
      - V(later) leaves a node that must log in as it is, and says so in what is returned. So it can
        be found out who needs a key before one is made.
    type: str
    choices: [now, later]
    default: now
  hostname:
    description: The node's name in the tailnet. An empty one is that of the machine.
    type: str
  tags:
    description:
      - The tags to ask the login server for, each V(tag:NAME). Headscale refuses them together with
        a key, and gives a node the tags of its key instead.
    type: list
    elements: str
  accept_routes:
    description: Whether to use the routes that other nodes advertise.
    type: bool
  snat_subnet_routes:
    description:
      - Whether traffic for routes that this node advertises gets the node's own address. Pods keep
        theirs only if this is V(false).
    type: bool
  accept_dns:
    description: Whether to use the tailnet's DNS on this node.
    type: bool
  shields_up:
    description: Whether to refuse all connections from the tailnet.
    type: bool
  advertise_routes:
    description: CIDRs that this node is to advertise, or not, by O(routes_state).
    type: list
    elements: str
  routes_state:
    description:
      - V(merge) adds O(advertise_routes) to what the node advertises already.
      - V(exact) also takes back all others. Being an exit node is another matter and stays.
      - V(absent) takes O(advertise_routes) back.
    type: str
    choices: [merge, exact, absent]
    default: merge
  timeout:
    description: Seconds in which tailscaled has to be running.
    type: int
    default: 60
attributes:
  check_mode:
    support: full
    details: Predicts. No key is needed for that, nor a tailscaled that runs.
  diff_mode:
    support: full
    details: Shows the prefs that change. There are no secrets in them.
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
  description: Whether the node had to log in, or would have to, or has to with O(login=later).
  returned: success
  type: bool
login_reason:
  description: Why.
  returned: success
  type: str
backend_state:
  description: What tailscaled says of itself.
  returned: success
  type: str
  sample: Running
node_key:
  description: The node's public key, by which Headscale knows it. Empty if the node has yet to log
    in, as in check mode.
  returned: success
  type: str
  sample: nodekey:0000000000000000000000000000000000000000000000000000000000000001
tailnet_ips:
  description: The node's addresses in the tailnet.
  returned: success
  type: list
  elements: str
login_server:
  description: The server that the node is joined to.
  returned: success
  type: str
prefs_changed:
  description: The prefs that were changed, or would be, each with what it was and what it is.
  returned: success
  type: dict
health:
  description: What tailscaled complains about.
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


def refuse_what_cannot_be(now: Standing, plan: Plan, wanted: dict[str, Any]) -> None:
    """What a dry run need not know."""
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
            refuse_what_cannot_be(now, plan, wanted)
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
